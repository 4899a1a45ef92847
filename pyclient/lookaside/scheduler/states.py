"""The states of Mamba and its kin: where a hit may end, and how they are saved.

A hit ends where the states are held too, which is at few pages. vLLM has states where a step of a
prefill ended, at the prompt's last page, and at those pages that decoding fills. It hands them out
one by one, with their blocks (boundary_state_offloads). So they are saved as pages of their own
(kvgroups.py); a block table says nothing about them.

Once it is known how much of a prefix the sidecars hold, they are asked for the states at the end
of each of its pages, from the last page down, some at a time. A load is then two: one of the pages,
and one of the states at their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lookaside import kvgroups, wire
from lookaside.metadata import LoadSpec, SaveSpec
from lookaside.scheduler.names import Names
from lookaside.scheduler.pace import Pace
from lookaside.scheduler.requests import Question, RequestState
from lookaside.scheduler.rows import Rows
from lookaside.scheduler.setup import Setup
from lookaside.scheduler.waiting import Waiting

# States are looked up at the ends of this many pages at once, then of twice as many, and so on.
_STATES_AT_ONCE = 4
# At the ends of how many pages they are looked up in all.
_MAX_STATES = 252


class States:
    """Finds, loads and saves the states at the ends of pages."""

    def __init__(
        self, setup: Setup, rows: Rows, names: Names, pace: Pace, waiting: Waiting
    ) -> None:
        self._setup = setup
        self._rows = rows
        self._names = names
        self._pace = pace
        self._waiting = waiting
        self.groups = rows.states
        """The KV-cache groups that keep states; none for most models."""

    # ---- hits ----

    def find(self, state: RequestState, asked: Question, first: int, hit: int) -> int | None:
        """Return the last page up to hit at whose end all states are held; first if there is none.

        None while that is not known.
        """
        if asked.reached is not None:
            if asked.reached <= first:
                self._cancel(asked)
            return max(asked.reached, first)
        while True:
            while asked.states:
                page, lookup = asked.states[0]
                if page <= first:
                    self._cancel(asked)
                    break
                pages = self._waiting.answer(lookup)
                if pages is None:
                    return None
                del asked.states[0]
                if pages == len(self.groups):
                    self._cancel(asked)
                    asked.states.append((page, lookup))
                    asked.reached = page
                    return page
                if pages:
                    lookup.cancel()
            if not self._ask(state, asked, first, hit):
                asked.reached = first
                return first

    def _ask(self, state: RequestState, asked: Question, first: int, hit: int) -> bool:
        """Look up the states at the ends of further pages; return whether any are left to ask."""
        end = hit - asked.states_asked
        count = min(
            asked.states_asked + _STATES_AT_ONCE, _MAX_STATES - asked.states_asked, end - first
        )
        if count <= 0:
            return False
        for page in range(end, end - count, -1):
            (digest,) = self._names.of(state, page - 1, page)
            lookup = self._setup.sidecars.start(
                page,
                digest,
                b"".join(self._of(digest)),
                0,
                self._pace.prefill_s(page - first),
                state.hints.tenant,
                state.request.request_id,
            )
            asked.states.append((page, lookup))
        asked.states_asked += count
        return True

    @staticmethod
    def _cancel(asked: Question) -> None:
        states, asked.states = asked.states, []
        for _, lookup in states:
            lookup.cancel()

    # ---- loads ----

    def take_over(self, asked: Question, end_page: int) -> tuple[wire.LeaseRef, ...]:
        """Return what takes over the leases of the states at end_page; empty if none are held."""
        if not asked.states or asked.reached != end_page:
            return ()
        ((_, lookup),) = asked.states
        asked.states = []
        return lookup.refs

    def load(
        self,
        request_id: str,
        refs: tuple[wire.LeaseRef, ...],
        tables: Sequence[list[int]],
        end_page: int,
        digest: bytes,
    ) -> LoadSpec:
        """Return the order to load the states at end_page, whose page before has this digest."""
        rows = self._rows.of_states(self._rows.states_at(tables, end_page))
        names = wire.names(self._of(digest), end_page, self._setup.chunk)
        return LoadSpec(request_id, refs, end_page, rows, names)

    # ---- saves ----

    def offered(self, offers: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, list[int]]]:
        """Yield (page, a block for each group) where vLLM hands out all states at a page's end.

        offers are vLLM's: (group, block, tokens).
        """
        ends: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            ends.setdefault(tokens, {})[group] = block_id
        for tokens, blocks in ends.items():
            page, beyond = divmod(tokens, self._setup.page)
            block_ids = [blocks.get(group, 0) for group in self.groups]
            if page and not beyond and 0 not in block_ids:
                yield page, block_ids

    def save(
        self, state: RequestState, save_id: int, page: int, block_ids: Sequence[int]
    ) -> SaveSpec:
        """Return the order to save the states at a page's end."""
        (digest,) = self._names.of(state, page - 1, page)
        return SaveSpec(
            save_id,
            state.request.request_id,
            first_page=page,
            prev=digest,
            hashes=b"".join(self._of(digest)),
            block_ids=self._rows.of_states(block_ids),
            divided=self._setup.sidecars.divided,
            hints=state.hints.of_store(),
        )

    def _of(self, digest: bytes) -> list[bytes]:
        return kvgroups.state_names(digest, len(self.groups))
