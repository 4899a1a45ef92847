"""What the scheduler role needs of the sidecars of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lookaside import wire
from lookaside.events import Feed
from lookaside.places import Place


class Lookup(Protocol):
    """One lookup on all ranks; see lookups.py. No method but wait blocks."""

    id: int
    """Its number, the same at all ranks."""
    late: bool
    """It was given up because a rank gave no answer in time."""
    # Of the rank that found the least, once it is known how much; see wire.LookupResult.
    reason: int
    took_us: int
    began_us: int
    sources: str
    page_bytes: int
    """Of a page at all ranks, as it lies in their arenas; 0 where nothing was found."""

    def poll(self) -> int | None:
        """Return how many pages every rank holds, from the first asked for; None while unknown."""
        ...

    @property
    def is_due(self) -> bool:
        """Whether the answer may come within a moment. Valid after poll has returned None."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Poll until the answer is known, for so long at most and while it is due."""
        ...

    def trim(self, first_page: int) -> None:
        """Give back what lies below first_page."""
        ...

    def cancel(self) -> None:
        """Give everything back."""
        ...

    @property
    def in_memory(self) -> bool:
        """Whether all pages lie in the sidecars' own memory, which cannot fail. Valid once poll has
        returned how many."""
        ...

    @property
    def refs(self) -> tuple[wire.LeaseRef, ...]:
        """What takes over the leases of each rank."""
        ...


class Sidecars(Protocol):
    """The sidecars of all ranks, as the scheduler sees them; see sidecars.py."""

    @property
    def available(self) -> bool:
        """Whether all of them are connected, and nothing that is void is left to clear."""
        ...

    @property
    def is_clean(self) -> bool:
        """Whether nothing that is void is left to clear."""
        ...

    def hold_back(self) -> None:
        """Be not available until go_on or move is called."""
        ...

    def go_on(self) -> None:
        """Be available as before hold_back."""
        ...

    def move(self, epoch: str) -> None:
        """Connect anew in the space of this epoch of weights. Call only while clean."""
        ...

    def take_named(self) -> str | None:
        """Return the epoch that an operator has named since the last call; None if none was."""
        ...

    @property
    def divided(self) -> bool:
        """Whether ranks that hold the same pages store a part of them each."""
        ...

    @property
    def max_pages(self) -> int:
        """How many pages one lookup may name."""
        ...

    @property
    def lease_s(self) -> float:
        """How long an answered lookup keeps its leases on every rank."""
        ...

    def start(
        self,
        first_page: int,
        prev: bytes,
        hashes: bytes,
        recompute_us: int,
        prefill_s: float,
        tenant: str = "",
        request: str = "",
    ) -> Lookup:
        """Look up a run of pages on all ranks. Never blocks and never fails: it misses.

        prev is the digest of the page before the first, empty for page 0. recompute_us is what
        computing a page takes, 0 if that is not known. prefill_s is what computing all that a hit
        can save takes; it bounds the wait. What is asked and hit is counted to tenant. request is
        the name by which people ask how it ended.
        """
        ...

    def advise(self, hashes: bytes, action: int, ms: int, priority: int, tenant: str) -> bool:
        """Advise all ranks about the pages of a prefix, from its first one on. Never blocks.

        action is one of wire.ADVISE_*. Returns whether it was sent to every rank.
        """
        ...

    def learn(self, places: Mapping[int, Place]) -> None:
        """Take in where workers have their sidecars, by rank."""
        ...

    def feeds(self) -> Sequence[Feed]:
        """Return what reports the pages that each rank's sidecar holds."""
        ...

    def void(self) -> None:
        """Make void what every rank holds in this space.

        The sidecars are not available until that has been cleared.
        """
        ...

    def report_prefilled(
        self, tokens: int, found: int, loaded: int, own: int, lookup: int = 0, reason: int = 0
    ) -> None:
        """Report to the sidecars what became of an admitted request. Never blocks.

        tokens are those that vLLM's own cache did not have. found counts those of them that the
        sidecars of all ranks had, loaded those that were loaded. own are the request's other
        tokens. lookup is the id of its last lookup, 0 if it had none, and reason why not all that
        this found was taken: a number in wire.REASONS, 0 if there is nothing to add.
        """
        ...

    def clear(self, timeout_s: float) -> bool:
        """Have what is void cleared; return whether every rank has cleared it in time.

        A rank that has not is asked again until it has.
        """
        ...

    def close(self) -> None:
        """End the sessions. Safe to call again."""
        ...
