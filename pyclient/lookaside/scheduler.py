"""The scheduler role: which prefixes to load, which pages to save, what to pin.

All of it runs on vLLM's scheduler thread and none of it waits, except reset_cache, which has a
deadline (clearing.py goes on after it). Nothing here moves KV bytes.

**Lookups** start when a request is added, for its whole prefix, and are asked
about when vLLM wants to know. While the answer is out vLLM is told to ask again: some steps at most
for what lies in the sidecars' memory, for longer where they bring pages up from a tier below. What
vLLM turns out to have itself is trimmed from the lookup, so that it is not brought up either. An
answer belongs to the prefix and the local hit it was asked for; when either changes, or its lease
may end before a worker has taken it over, the lookup is replaced, once: a request that finds its
second one as old, too, is computed. Only the last one of a request holds leases; it is cancelled
when the request is admitted without a load, is preempted or ends.

With each lookup goes what computing a page takes (prefill.py), from the forward times that the
workers report, so that a sidecar does not bring up what vLLM would compute sooner.

**Loads** are always asynchronous. Once vLLM has given the blocks, the workers
own the lookup's leases and report the request as received, whatever happens. A request whose load
failed is not offered a hit again: vLLM would loop.

**Saves** go out as chunks fill, for the rest of the prompt when its prefill
ends, and for what is left when the request ends. A block may be freed and rewritten by the very
next step, so every block of a save is pinned with the block pool until every rank has said that it
is done with it. Ranks that hold the same pages divide a save's chunks among them; one that has none
of them says so at once. A request's saved pages are a high-water mark that only counts pages handed
to the workers; it is void when the request is preempted or its hashes change under it.

**Roles**: a kv_producer stores and never looks up, a kv_consumer looks up and
never stores, kv_both does both. A prompt that is handed over (handover.py) is stored to its last
token, the incomplete page included, and may be hit to its last token: vLLM then computes that one
alone. Only what was handed over is hit beyond the last whole page, and only such a lookup is
repeated while it falls short of what the prefiller promised.

**Hybrids.** Where the model's layers are in several groups, a page is as many
tokens as vLLM schedules by, with the blocks of all groups (layout.py). vLLM frees what a sliding
window has left behind, and its table then has the null block there. A chunk is no longer than the
shortest window, so that what is stored as it fills is whole. Where vLLM had pages itself, and took
no more of a window than it needs, its own cache may still have the rest; pages that are not whole
even so are named and not copied. A load fills what vLLM's table has: all blocks of full attention,
of a window those that it reaches from the hit's end.

**States** (Mamba and its kin). A hit ends where the states are held too, which is at few pages:
vLLM has them where a step of a prefill ended, at the prompt's last page and at those that decoding
fills. It hands them out one by one, with their blocks (boundary_state_offloads), and so they are
saved, as pages of their own (layout.py); a block table says nothing about them. When it is known
how much of a prefix the sidecars hold, they are asked for the states at the end of each of its
pages, from the last one down, some at a time. A load is then two: the pages, and the states at
their end.

**Names.** A page is named by vLLM's hash of its last block. Where that does not tell what the page
depends on, such as the weights of an adapter, a digest of this goes into the name as well
(identity.py). Until it is known, and where it cannot be, nothing of a request is looked up or
saved. Only `_names` and `_page_name` make names; lookups, saves, states, tails and events all use
these."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lookaside import handover, layout, space, wire
from lookaside.config import Config
from lookaside.events import EventBook, Feed
from lookaside.identity import UNKNOWN, Identities, Identity
from lookaside.metadata import (
    LoadSpec,
    LookasideMetadata,
    LookasideWorkerMetadata,
    SaveSpec,
)
from lookaside.prefill import PrefillRate
from lookaside.stats import Collector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# What a load's order may take on its way to the worker, whose taking over ends the lease: at least
# this, where the lease is not shorter still. Steps that are under way come on top.
_TAKE_OVER_S = 0.5
# The longest step of late counts less with each further one, and no more than this: an engine may
# have been paused.
_STEP_DECAY = 0.9
_LONGEST_STEP_S = 30.0
# A miss is asked for again while the request still waits: others may have stored it.
_MISS_LIFE_S = 1.0
# An answer short of what a prefiller promised is asked for again after this.
_SHORT_LIFE_S = 0.005
# Requests that hold a lookup while they wait; later ones start theirs when asked.
_MAX_LOOKUPS = 512
_MAX_LOAD_CHUNKS = 8192
_MAX_SAVE_PAGES = 4096
# States are asked for at this many pages' ends at once, then twice as many, and so on, and at most
# at so many in all.
_STATES_AT_ONCE = 4
_MAX_STATES = 252
# Beyond this a save that no worker acknowledged no longer keeps the engine awake.
_SAVE_PATIENCE_S = 60.0
# Timed steps whose time has not come back; an engine has a few under way.
_MAX_TIMED = 64
# A request waits for its identity for so long, then it is computed.
_IDENTITY_PATIENCE_S = 2.0
_MAX_RECOMPUTE_US = 0xFFFFFFFF


class Lookup(Protocol):
    """One lookup on all ranks; see lookups.py. No method blocks."""

    def poll(self) -> int | None:
        """Pages held by every rank, from the first asked for; None while out."""
        ...

    def trim(self, first_page: int) -> None:
        """Give back what lies below first_page."""
        ...

    def cancel(self) -> None:
        """Give everything back."""
        ...

    @property
    def refs(self) -> tuple[wire.LeaseRef, ...]:
        """What takes over the leases of every rank."""
        ...


class Sidecars(Protocol):
    """The sidecars of all ranks, as the scheduler sees them."""

    @property
    def available(self) -> bool:
        """Whether all of them are connected, and nothing that is void is left to clear."""
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
        self, first_page: int, prev: bytes, hashes: bytes, recompute_us: int, prefill_s: float
    ) -> Lookup:
        """Ask all for a run of pages. Never blocks, never fails: it misses.

        prev is the digest of the page before the first, empty for page 0;
        recompute_us what computing a page takes, 0 if it is not known; prefill_s
        what computing all that a hit can save takes, which bounds the wait.
        """
        ...

    def feeds(self) -> Sequence[Feed]:
        """What each rank's sidecar tells of what it holds."""
        ...

    def void(self) -> None:
        """Make void what the space has on every rank: none is available until it has been
        cleared."""
        ...

    def tell_prefilled(self, tokens: int, found: int, loaded: int) -> None:
        """Tell the sidecars what became of an admitted request. Never blocks.

        tokens: those that vLLM's own cache did not have; found: of these, what all
        ranks' sidecars had; loaded: of these, what was loaded.
        """
        ...

    def clear(self, timeout_s: float) -> bool:
        """Have what is void cleared; False if some rank has not in time, which is done as soon as
        it can."""
        ...

    def close(self) -> None:
        """End the sessions. Safe to call again."""
        ...


@dataclass(slots=True)
class _Asked:
    """A lookup that a request holds, and its answer."""

    lookup: Lookup | None  # None once its leases were given back
    first_page: int
    end_page: int  # asked for [first_page, end_page)
    last_digest: bytes
    since: float
    trimmed: int
    leased: float  # when its leases may have begun at the earliest: it had no answer until then
    held: int | None = None  # absolute end of the pages held, once answered
    answered: float = 0.0
    states: list[tuple[int, Lookup]] = field(
        default_factory=list
    )  # at the ends of these pages, the last one first
    states_asked: int = 0
    reached: int | None = None  # the end of the last page whose states are held as well, once known


@dataclass(slots=True)
class _Request:
    """What is known of a request between its on_new_request and its end."""

    request: Request
    preemptions: int
    identity: Identity | None = None  # what its pages are named by, once known
    unshared: bool = False  # that cannot be known
    patient_since: float | None = None  # when vLLM first asked, while it is not known
    asked: _Asked | None = None
    local_page: int = 0  # vLLM's own hit when it last asked
    denied: bool = False  # a load failed: offer no hit again
    expired: bool = False  # a hit's lease was over before it could be used
    admitted: bool = False
    counted: bool = False
    stale: bool = False  # computed before a reset: must not be saved
    saved: int = 0  # pages known to be held, or handed to the workers
    saved_digest: bytes = b""  # of page saved - 1
    saved_tail: bool = False  # the prompt's incomplete last page, too
    handed: int = 0  # tokens that a prefiller may have handed over
    tail: bytes = b""  # names the page they end in, if that is incomplete
    promised: int = 0  # pages that it said it stores
    patient_until: float = 0.0  # for these


@dataclass(slots=True)
class _Prefill:
    """What becomes of the tokens of an admitted request that vLLM's own cache did not have."""

    tokens: int
    found: int
    loaded: int


@dataclass(slots=True)
class _Pin:
    blocks: list[KVCacheBlock]
    ranks_left: int
    since: float


def _parks_loads() -> bool:
    """Whether vLLM may leave a request whose load has ended behind one that waits for its blocks:
    before 0.31."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return not hasattr(Scheduler, "_holds_kv_blocks")


class SchedulerConnector:
    """See the module's comment. For the scheduler's thread alone."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        sidecars: Sidecars,
        stats: Collector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._sidecars = sidecars
        self._stats = stats
        self._clock = clock
        self._ranks = space.world(vllm_config).ranks
        # Steps that a worker may have to carry out before it sees what is ordered now.
        self._steps_ahead = max(1, getattr(vllm_config, "max_concurrent_batches", 1)) - 1
        self._step_s = 0.0  # the longest of late
        self._stepped: float | None = (
            None  # when the last step was, if requests have been there since
        )
        transfer = vllm_config.kv_transfer_config
        self._may_load = transfer is None or transfer.is_kv_consumer
        self._may_save = transfer is None or transfer.is_kv_producer
        self._warned = False  # of a promise that cannot be kept

        geometry, _ = space.geometry(config, vllm_config, kv_cache_config)
        self._page = geometry.page_tokens
        self._chunk = geometry.pages_per_chunk
        self._hashes_per_page = geometry.hashes_per_page
        self._identities = Identities(vllm_config)
        self._ends = handover.PageNames(vllm_config, self._page, self._hashes_per_page)
        self._lookup_pages = _MAX_LOAD_CHUNKS * self._chunk  # one load takes no more over
        self._save_pages = max(1, _MAX_SAVE_PAGES // self._chunk) * self._chunk

        # The draft layers' KV of a page's last position depends on the token
        # after it, so a page counts only when the next one matches too, and the
        # newest page of a request that decodes is not final yet.
        self._drafts = space.uses_drafts(vllm_config, kv_cache_config)

        self._shares = layout.shares(kv_cache_config.kv_cache_groups, self._page)
        self._states = tuple(number for number, share in enumerate(self._shares) if share.state)
        self._hybrid = space.is_hybrid(kv_cache_config)
        # A page that ends in the middle has other needs of a window than one that is
        # whole, and of draft layers.
        self._whole_pages = self._drafts or self._hybrid

        events = getattr(vllm_config, "kv_events_config", None)
        self._events: EventBook | None = None
        if events is not None and events.enable_kv_cache_events:
            self._events = EventBook(sidecars.feeds(), self._page, geometry.digest_bytes, clock)

        from vllm.v1.request import RequestStatus

        self._running = RequestStatus.RUNNING
        self._pool: BlockPool | None = None
        self._requests: dict[str, _Request] = {}
        self._holding = 0  # requests with a lookup
        self._loads: dict[str, frozenset[int]] = {}  # requests loading: their blocks
        self._loaded: set[str] | None = (
            set() if _parks_loads() else None
        )  # requests that vLLM has yet to go on with
        self._prefills: dict[
            str, _Prefill
        ] = {}  # of the requests in _loads, until it is known what was loaded
        self._pins: dict[int, _Pin] = {}  # by rising save id
        self._next_save = 1
        self._prefill = PrefillRate()
        self._timed: dict[int, int] = {}  # step -> its prompt tokens
        self._next_timed = 1
        # Of a reset whose clear waits until these have ended; nothing is asked for meanwhile.
        self._clear_waits = False
        self._saves_before = 0  # saves with a lower id
        self._loads_before: set[str] = set()
        # For the next step's metadata:
        self._new_loads: list[LoadSpec] = []
        self._last_saves: list[SaveSpec] = []
        self._aborted: list[str] = []

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """The pool to pin blocks with; without one nothing is saved."""
        self._pool = pool

    # ---- lookups and loads ----

    def on_new_request(self, request: Request) -> None:
        """Start the lookup of the whole prefix."""
        state = self._state(request)
        if self._holding < _MAX_LOOKUPS and self._wants_hit(state):
            self._ask(state, 0)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond vLLM's own hit; None: ask again."""
        state = self._state(request)
        first = state.local_page = num_computed_tokens // self._page
        if self._may_load and not self._identify(state) and self._waits_for_identity(state):
            return None, False
        if self._loaded and request.request_id not in self._loaded:
            # vLLM would stop here if it had no blocks for this one, while those that wait behind it
            # hold them all.
            return None, False
        if num_computed_tokens % self._page or not self._wants_hit(state):
            self._drop_lookup(state)
            return 0, False
        limit, limit_tokens = self._reach(state)
        if first >= limit:
            self._drop_lookup(state)
            return 0, False

        asked = state.asked
        if asked is None or not self._is_valid(state, asked, first):
            self._drop_lookup(state)
            # From the chunk's first page on: tiers know a chunk by all its pages.
            asked = self._ask(state, first - first % self._chunk)
            if asked is None:
                return 0, False
        if asked.lookup is not None and first > asked.trimmed:
            asked.lookup.trim(first)
            asked.trimmed = first
        if asked.held is None and not self._take_answer(asked):
            return None, False
        assert asked.held is not None
        if (
            asked.lookup is not None
            and asked.held > first
            and self._clock() - asked.leased >= self._hit_life_s()
        ):
            # Its leases may be over before a worker has taken them over: then the load would fail.
            self._drop_lookup(state)
            if state.expired:
                self._stats.add("hits_expired")
                return 0, False
            state.expired = True
            asked = self._ask(state, first - first % self._chunk)
            if asked is None:
                return 0, False
            return None, False
        if self._falls_short(state, asked) and self._may_wait(state, asked):
            if self._clock() - asked.answered >= _SHORT_LIFE_S:
                self._drop_lookup(state)
                self._ask(state, first - first % self._chunk)
            return None, False

        hit = min(asked.held - self._drafts, limit)
        if self._states:
            found = self._find_states(state, asked, first, hit)
            if found is None:
                return None, False
            if found < min(state.promised, asked.end_page) and self._may_wait(state, asked):
                if self._clock() - asked.answered >= _SHORT_LIFE_S:
                    self._drop_lookup(state)
                    self._ask(state, first - first % self._chunk)
                return None, False
            hit = found
        if hit <= first:
            if asked.lookup is not None:
                asked.lookup.cancel()
                asked.lookup = None
            return 0, False
        return min(hit * self._page, limit_tokens) - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has decided: load num_external_tokens into these blocks, or nothing."""
        state = self._state(request)
        first_time, state.admitted = not state.admitted, True
        asked = state.asked
        if first_time:
            self._note_prefill(state, asked, num_external_tokens)
        if asked is not None and asked.held is not None:
            if asked.first_page == 0:
                self._note_saved(state, asked.held)
            known = len(request.block_hashes) // self._hashes_per_page
            self._note_event_pages(state, asked.first_page, min(asked.held, known))
        if not state.counted:
            state.counted = True
            self._stats.add("query_tokens", request.num_tokens - state.local_page * self._page)
            if asked is not None and self._falls_short(state, asked):
                self._stats.add("promises_broken")
        if num_external_tokens <= 0:
            if self._loaded:
                self._loaded.discard(request.request_id)
            self._drop_lookup(state)
            return

        first, refs, states = state.local_page, (), ()
        pages = -(-num_external_tokens // self._page)
        tables = blocks.get_block_ids()
        fits = not self._hybrid or self._is_loadable(tables, first, first + pages)
        if not fits:
            self._stats.add("errors")
            logger.warning(
                "lookaside: vLLM's block tables are not as a hit of %d pages needs them",
                first + pages,
            )
        elif asked is not None and asked.lookup is not None and first + pages <= (asked.held or 0):
            if self._states and asked.states and asked.reached == first + pages:
                ((_, at_end),) = asked.states
                states, asked.states = at_end.refs, []
            if states or not self._states:
                refs = asked.lookup.refs
                asked.lookup = None  # the workers own it now
        self._drop_lookup(state)
        block_ids = self._rows(tables, first, first + pages)
        # Without refs the workers report a failure, which is what it is.
        digests = self._wanted(state, first, first + pages) if refs else []
        names = wire.names(digests, first, self._chunk) if refs else b""
        self._new_loads.append(LoadSpec(request.request_id, refs, first, block_ids, names))
        if states:
            ends = [
                tables[group][(first + pages) * self._shares[group].blocks - 1]
                for group in self._states
            ]
            rows = self._state_rows(ends)
            state_names = layout.state_names(digests[-1], len(self._states))
            names = wire.names(state_names, first + pages, self._chunk)
            self._new_loads.append(LoadSpec(request.request_id, states, first + pages, rows, names))
            block_ids = block_ids + rows
        self._loads[request.request_id] = frozenset(block_ids)
        self._note_saved(state, first + pages)
        self._stats.add("hit_tokens", num_external_tokens)

    def _note_prefill(self, state: _Request, asked: _Asked | None, to_load: int) -> None:
        """Tell the sidecars what becomes of a request that was just admitted, or will when its load
        has ended."""
        request = state.request
        local = state.local_page * self._page
        held = asked.held if asked is not None and asked.held is not None else 0
        tokens = max(0, request.num_tokens - local)
        found = max(0, min(held * self._page - local, tokens))
        if to_load <= 0:
            self._sidecars.tell_prefilled(tokens, found, 0)
        else:
            self._prefills[request.request_id] = _Prefill(tokens, found, min(to_load, tokens))

    def _wants_hit(self, state: _Request) -> bool:
        request = state.request
        return (
            self._may_load
            and not state.denied
            and not request.skip_reading_prefix_cache
            and self._reach(state)[0] > 0
            and self._identify(state)
        )

    def _reach(self, state: _Request) -> tuple[int, int]:
        """(pages, tokens) that a hit may reach at most.

        The last token is computed here to give logits, so that the page it is in is
        of no use, unless all before it was handed over: vLLM takes a load that ends
        anywhere, and goes back by one token where it is the whole prompt.
        """
        pages = (state.request.num_tokens - 1) // self._page
        if min(state.handed, state.request.num_tokens - 1) > pages * self._page:
            return pages + 1, state.handed
        return pages, pages * self._page

    def _end_page(self, state: _Request, first_page: int) -> int:
        """Where a lookup from first_page ends: the last page that could be used.

        One more with draft layers, whose last hit page only proves the one before.
        """
        pages, tokens = self._reach(state)
        known = len(state.request.block_hashes) // self._hashes_per_page
        if tokens % self._page:
            known = pages  # its last page is named by what is in it
        most = min(self._lookup_pages, self._sidecars.max_pages)
        return min(pages + self._drafts, known, first_page + most)

    def _wanted(self, state: _Request, first_page: int, end_page: int) -> list[Any]:
        """The digests of pages [first_page, end_page) that a lookup asks for."""
        pages, tokens = self._reach(state)
        if tokens % self._page and end_page == pages:
            return [*self._names(state, first_page, pages - 1), state.tail]
        return self._names(state, first_page, end_page)

    def _ask(self, state: _Request, first_page: int) -> _Asked | None:
        end = self._end_page(state, first_page)
        if end <= first_page or not self._sidecars.available:
            return None
        names = self._wanted(state, first_page, end)
        prev = self._names(state, first_page - 1, first_page)[0] if first_page else b""
        now = self._clock()  # its leases cannot begin before
        state.asked = _Asked(
            lookup=self._sidecars.start(
                first_page,
                prev,
                b"".join(names),
                self._recompute_us(),
                self._prefill_s(end - first_page),
            ),
            first_page=first_page,
            end_page=end,
            last_digest=names[-1],
            since=now,
            trimmed=first_page,
            leased=now,
        )
        self._holding += 1
        self._stats.add("lookups")
        return state.asked

    def _is_valid(self, state: _Request, asked: _Asked, first_page: int) -> bool:
        """Whether what was asked still answers the question."""
        if asked.trimmed > first_page:
            return False
        end = self._end_page(state, asked.first_page)
        if end != asked.end_page:
            return False
        if self._wanted(state, end - 1, end)[0] != asked.last_digest:
            return False
        if asked.held is None:
            return True
        # A hit is looked at where it is used: it may be asked for again once.
        return asked.lookup is not None or self._clock() - asked.answered < _MISS_LIFE_S

    def _take_answer(self, asked: _Asked) -> bool:
        """Whether the answer to a lookup is in."""
        assert asked.lookup is not None
        pages = asked.lookup.poll()
        now = self._clock()
        if pages is None:
            asked.leased = now
            return False
        asked.held = min(asked.first_page + pages, asked.end_page)
        asked.answered = now
        self._stats.observe("lookup_seconds", now - asked.since)
        return True

    def _hit_life_s(self) -> float:
        """How long after its leases began a hit may be offered.

        At most half of the lease; less where the steps that the worker carries out first take
        longer than the other half.
        """
        lease = self._sidecars.lease_s
        return min(
            lease / 2, lease - min(_TAKE_OVER_S, lease / 4) - self._steps_ahead * self._step_s
        )

    def _note_step(self) -> None:
        """Measure the steps, while there are requests: one that comes after a pause says
        nothing."""
        now, before = self._clock(), self._stepped
        self._stepped = now if self._requests else None
        if before is not None:
            self._step_s = max(min(now - before, _LONGEST_STEP_S), _STEP_DECAY * self._step_s)

    def _drop_lookup(self, state: _Request) -> None:
        asked, state.asked = state.asked, None
        if asked is None:
            return
        self._holding -= 1
        lookups = [lookup for _, lookup in asked.states]
        if asked.lookup is not None:
            lookups.append(asked.lookup)
        for lookup in lookups:
            try:
                lookup.cancel()
            except Exception:  # its lease has a deadline anyway
                self._stats.add("errors")

    def _find_states(self, state: _Request, asked: _Asked, first: int, hit: int) -> int | None:
        """The last page up to hit at whose end all states are held, first if none is; None while
        that is not known."""
        if asked.reached is not None:
            if asked.reached <= first:
                self._cancel_states(asked)
            return max(asked.reached, first)
        while True:
            while asked.states:
                page, lookup = asked.states[0]
                if page <= first:
                    self._cancel_states(asked)
                    break
                pages = lookup.poll()
                if pages is None:
                    return None
                del asked.states[0]
                if pages == len(self._states):
                    self._cancel_states(asked)
                    asked.states.append((page, lookup))
                    asked.reached = page
                    return page
                if pages:
                    lookup.cancel()
            end = hit - asked.states_asked
            count = min(
                asked.states_asked + _STATES_AT_ONCE, _MAX_STATES - asked.states_asked, end - first
            )
            if count <= 0:
                asked.reached = first
                return first
            for page in range(end, end - count, -1):
                (digest,) = self._names(state, page - 1, page)
                names = b"".join(layout.state_names(digest, len(self._states)))
                asked.states.append(
                    (
                        page,
                        self._sidecars.start(page, digest, names, 0, self._prefill_s(page - first)),
                    )
                )
            asked.states_asked += count

    @staticmethod
    def _cancel_states(asked: _Asked) -> None:
        states, asked.states = asked.states, []
        for _, lookup in states:
            lookup.cancel()

    def _state_rows(self, block_ids: Sequence[int]) -> list[int]:
        """The rows of the states at a page's end (layout.py), from the block of each group that
        keeps them."""
        columns = sum(share.kept for share in self._shares)
        rows: list[int] = []
        for number, block_id in enumerate(block_ids):
            row = [0] * (columns + len(self._states))
            row[columns + number] = block_id
            rows += row
        return rows

    # ---- what is handed over ----

    def _expect(self, state: _Request) -> None:
        """Note what a prefiller may have handed over of a new request."""
        request = state.request
        if not self._may_load or getattr(request, "resumable", False):
            return
        promise = handover.read(request)
        if promise is not None and promise.tokens % self._page and self._whole_pages:
            promise = None  # it has layers that these pages lack
        if promise is not None and self._page_name(state, promise.tokens) != promise.digest:
            promise = None
            if not self._warned:
                self._warned = True
                logger.warning(
                    "lookaside: a prefiller names the pages of a prompt otherwise than this "
                    "decoder, which will"
                    " not find them: compare the prompt as the two get it, its adapter's files, "
                    "--block-size,"
                    " --prefix-caching-hash-algo and PYTHONHASHSEED"
                )
        if promise is not None:
            state.promised = -(-promise.tokens // self._page)
            state.patient_until = self._clock() + self._config.handover_timeout_ms / 1e3
        if self._whole_pages:
            return
        # One that only consumes is a decoder, whether its proxy passes promises on or not.
        tokens = (
            promise.tokens
            if promise is not None
            else 0
            if self._may_save
            else request.num_prompt_tokens
        )
        if tokens % self._page:
            state.tail = self._page_name(state, tokens)
            if not state.tail:
                return
        state.handed = tokens

    @staticmethod
    def _falls_short(state: _Request, asked: _Asked) -> bool:
        """Whether an answer is in and less than what was promised."""
        return asked.held is not None and asked.held < min(state.promised, asked.end_page)

    def _may_wait(self, state: _Request, asked: _Asked) -> bool:
        """Whether to ask once more after an answer that falls short of the promise.

        The last time is after the deadline, so that one asked early and answered
        long ago, while the request waited for other things, does not count.
        """
        return asked.since < state.patient_until and self._sidecars.available

    def _hands_over(self, request: Request) -> bool:
        """Whether a request is computed here for another instance to go on with."""
        if not self._may_save or getattr(request, "resumable", False):
            return False
        return handover.is_asked(request) or (not self._may_load and request.max_tokens == 1)

    def _tail(self, state: _Request) -> bytes:
        """The name of a prompt's incomplete last page, if that is to be stored.

        With one token in it there is nothing to win: the decoder computes that anyway.
        """
        tokens = state.request.num_prompt_tokens
        if tokens % self._page < 2 or self._whole_pages or not self._hands_over(state.request):
            return b""
        return self._page_name(state, tokens)

    def _promise(self, state: _Request) -> dict[str, Any] | None:
        """What the answer of a request that is handed over says is stored."""
        request = state.request
        if not self._hands_over(request) or not self._sidecars.available:
            return None
        tokens = request.num_prompt_tokens
        if not state.saved_tail:
            tokens = min(state.saved, tokens // self._page) * self._page
        digest = self._page_name(state, tokens)
        return handover.write(handover.Promise(tokens, digest)) if digest else None

    # ---- load or recompute ----

    def _recompute_us(self) -> int:
        """What computing a page takes, in microseconds; 0 while it is not known."""
        us = self._prefill.seconds_per_token * self._page * 1e6
        return min(max(1, round(us)), _MAX_RECOMPUTE_US) if us else 0

    def _prefill_s(self, pages: int) -> float:
        """What computing so many pages takes, in seconds; 0 while it is not known."""
        return self._prefill.seconds_per_token * self._page * pages

    def _time_forward(self, output: SchedulerOutput, meta: LookasideMetadata) -> None:
        """Have the step timed if it mostly computes prompts."""
        prompt_tokens = 0
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            request = state.request
            left = request.num_tokens - request.num_computed_tokens
            if left > 1:  # one that generates computes only its last token, and drafts
                prompt_tokens += min(scheduled, left)
        if PrefillRate.tells(prompt_tokens, output.total_num_scheduled_tokens):
            meta.timed = self._next_timed
            self._next_timed += 1
            self._timed[meta.timed] = prompt_tokens
            if len(self._timed) > _MAX_TIMED:
                del self._timed[next(iter(self._timed))]

    def _note_forwards(self, seconds: dict[int, float]) -> None:
        for step, took in seconds.items():
            self._prefill.add(self._timed.pop(step, 0), took)
        if seconds and self._prefill.seconds_per_token:
            self._stats.set(
                "prefill_tokens_per_second", round(1 / self._prefill.seconds_per_token, 1)
            )

    # ---- saves ----

    def build_connector_meta(self, output: SchedulerOutput) -> LookasideMetadata:
        """This step's work. The loads go first: a lost load would park its request."""
        self._note_step()
        meta = LookasideMetadata(
            loads=self._new_loads, saves=self._last_saves, aborted=self._aborted
        )
        self._new_loads, self._last_saves, self._aborted = [], [], []
        meta.idle = not output.total_num_scheduled_tokens and not self._computes()
        try:
            if self._may_load:
                self._time_forward(output, meta)
            self._add_saves(output, meta)
        except Exception:
            self._stats.add("errors")
            logger.exception("lookaside: a step's pages are not saved")
        return meta

    def _computes(self) -> bool:
        """Whether vLLM has begun to compute a request: with several batches at a time, its step may
        be under way."""
        return any(state.request.status == self._running for state in self._requests.values())

    def _add_saves(self, output: SchedulerOutput, meta: LookasideMetadata) -> None:
        if not self._may_save or self._pool is None:
            return
        block_state = output.kv_connector_block_state
        if block_state is None or not self._sidecars.available:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.stale:
                continue
            self._reset_if_preempted(state)
            request = state.request
            before = request.num_computed_tokens
            # Beyond num_tokens lie drafts and placeholders.
            after = min(before + scheduled, request.num_tokens)
            ends_prompt = before < request.num_prompt_tokens <= after
            if (after // self._page <= state.saved and not ends_prompt) or not self._may_name(
                state
            ):
                continue
            tail = self._tail(state) if ends_prompt else b""
            pages = self._final_pages(state, after)
            if self._drafts and after > request.num_prompt_tokens:
                pages -= 1
            if not ends_prompt:
                pages -= pages % self._chunk
            if pages != request.num_prompt_tokens // self._page:
                tail = b""  # a resumed request may be past it
            if pages <= state.saved and not tail:
                continue
            meta.saves += self._save(
                state, pages, block_state.get_block_ids(request_id) or (), tail
            )
        if self._states:
            for request_id, offers in block_state.boundary_state_offloads.items():
                state = self._requests.get(request_id)
                if state is None or request_id in (output.preempted_req_ids or ()):
                    continue
                self._reset_if_preempted(state)
                if not state.stale and self._may_name(state):
                    meta.saves += self._save_states(state, offers)

    def _save_states(
        self, state: _Request, offers: Sequence[tuple[int, int, int]]
    ) -> list[SaveSpec]:
        """Specs for the states that vLLM hands out, (group, block, tokens), where a page ends and
        no group lacks it."""
        ends: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            ends.setdefault(tokens, {})[group] = block_id
        specs: list[SaveSpec] = []
        for tokens, blocks in ends.items():
            page = tokens // self._page
            block_ids = [blocks.get(group, 0) for group in self._states]
            if (
                tokens % self._page
                or not page
                or 0 in block_ids
                or self._final_pages(state, tokens) < page
            ):
                continue
            (digest,) = self._names(state, page - 1, page)
            names = layout.state_names(digest, len(self._states))
            specs.append(
                SaveSpec(
                    self._next_save,
                    state.request.request_id,
                    first_page=page,
                    prev=digest,
                    hashes=b"".join(names),
                    block_ids=self._state_rows(block_ids),
                    new_from=page,
                    divided=self._sidecars.divided,
                )
            )
            self._pin(specs[-1])
        return specs

    def _pin(self, spec: SaveSpec) -> None:
        """Keep a new save's blocks until every rank is done with it."""
        assert self._pool is not None
        self._next_save += 1
        blocks = [self._pool.blocks[i] for i in spec.block_ids if i]
        self._pool.touch(blocks)
        self._pins[spec.save_id] = _Pin(blocks, self._ranks, self._clock())
        self._stats.add("saves")

    def _final_pages(self, state: _Request, valid_tokens: int) -> int:
        """Whole pages within the valid tokens that may be saved and have hashes."""
        request = state.request
        if not self._config.save_decode:
            valid_tokens = min(valid_tokens, request.num_prompt_tokens)
        known = len(request.block_hashes) // self._hashes_per_page
        # A streaming session takes back hashes when its next turn begins.
        if state.saved and (
            state.saved > known
            or self._names(state, state.saved - 1, state.saved)[0] != state.saved_digest
        ):
            state.saved = 0
        return min(valid_tokens // self._page, known)

    def _save(
        self, state: _Request, end_page: int, tables: Sequence[list[int]], tail: bytes = b""
    ) -> list[SaveSpec]:
        """Specs for pages [state.saved, end_page), their blocks pinned.

        With a tail, which names the prompt's incomplete page, for that too: it is
        the one after end_page, and not counted in state.saved.
        """
        request = state.request
        at, whole = state.saved, end_page
        end_page = min(end_page + bool(tail), self._pages_of(tables))
        specs: list[SaveSpec] = []
        divided = self._sidecars.divided
        while at < end_page:
            first = at - at % self._chunk
            end = min(end_page, first + self._save_pages)
            block_ids = self._rows(tables, first, end)
            if 0 in block_ids and self._hybrid:
                self._fill(request, block_ids, first)
            elif 0 in block_ids:  # vLLM's null block: this page's bytes are gone
                break
            names = self._names(state, first, min(end, whole))
            if end > whole:
                names = [*names, tail]
            prev = self._names(state, first - 1, first)[0] if first else b""
            spec = SaveSpec(
                save_id=self._next_save,
                request_id=request.request_id,
                first_page=first,
                prev=prev,
                hashes=b"".join(names),
                block_ids=block_ids,
                new_from=at,
                divided=divided,
            )
            self._pin(spec)
            specs.append(spec)
            at = end
            if min(end, whole) > state.saved:
                self._note_event_pages(state, state.saved, min(end, whole))
                state.saved = min(end, whole)
                state.saved_digest = names[state.saved - first - 1]
            state.saved_tail = state.saved_tail or end > whole
        return specs

    def _pages_of(self, tables: Sequence[list[int]]) -> int:
        """The pages that all groups' tables have blocks for, in part at least for the last one."""
        if len(tables) != len(self._shares):
            return 0
        return min(
            len(table) // share.blocks for table, share in zip(tables, self._shares, strict=True)
        )

    def _rows(self, tables: Sequence[list[int]], first: int, end: int) -> list[int]:
        """The blocks of pages [first, end), page by page, as far as pages have them
        (layout.Share)."""
        if all(share.blocks == 1 for share in self._shares) and not self._states:
            if len(tables) == 1:
                return list(tables[0][first:end])
            return [
                block
                for row in zip(*(table[first:end] for table in tables), strict=False)
                for block in row
            ]
        rows: list[int] = []
        for page in range(first + 1, end + 1):
            for table, share in zip(tables, self._shares, strict=True):
                rows += table[page * share.blocks - share.kept : page * share.blocks]
            rows += [0] * len(self._states)
        return rows

    def _fill(self, request: Request, rows: list[int], first: int) -> None:
        """Put the blocks that windows have left behind into rows of pages from first on, where vLLM
        still has them.

        Its own cache has them, by their hash, until it needs the room; it would take them itself
        for a hit that ends there.
        """
        assert self._pool is not None
        columns = [
            (group, share.blocks, index)
            for group, share in enumerate(self._shares)
            for index in range(share.blocks - share.kept, share.blocks)
        ]
        width = len(columns) + len(self._states)
        for at, block_id in enumerate(rows):
            page, column = divmod(at, width)
            if block_id or column >= len(columns):
                continue
            group, blocks, index = columns[column]
            hashes = self._hashes_per_page // blocks  # of a block
            block = (first + page) * blocks + index
            if hashes and (block + 1) * hashes <= len(request.block_hashes):
                cached = self._pool.get_cached_block(
                    request.block_hashes[(block + 1) * hashes - 1], [group]
                )
                if cached:
                    rows[at] = cached[0].block_id

    def _is_loadable(self, tables: Sequence[list[int]], first: int, end: int) -> bool:
        """Whether vLLM's tables have a block for all that a hit up to page end needs, and for
        nothing that pages lack.

        What lies below page first it has itself.
        """
        if self._pages_of(tables) < end:
            return False
        for table, share in zip(tables, self._shares, strict=True):
            begin, stop = first * share.blocks, end * share.blocks
            if 0 in table[max(begin, stop - share.reach) if share.reach else begin : stop]:
                return False
            if share.state:
                continue
            if any(
                table[i] for i in range(begin, stop) if i % share.blocks < share.blocks - share.kept
            ):
                return False
        return True

    def _note_saved(self, state: _Request, page: int) -> None:
        """Pages below page are held by every rank, as far as they are whole."""
        page = min(page, len(state.request.block_hashes) // self._hashes_per_page)
        if state.saved < page and not state.stale and state.identity is not None:
            state.saved = page
            state.saved_digest = self._names(state, page - 1, page)[0]

    # ---- the ends of things ----

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Unpin what all ranks are done with; note loads that ended and failed."""
        meta = output.kv_connector_worker_meta
        failed: set[str] = set(getattr(output, "failed_recving", None) or ())
        if isinstance(meta, LookasideWorkerMetadata):
            failed.update(meta.loads_failed)
            self._note_forwards(meta.forward_seconds)
            for save_id, ranks in meta.saves_done.items():
                pin = self._pins.get(save_id)
                if pin is None:
                    continue
                pin.ranks_left -= ranks
                if pin.ranks_left <= 0:
                    del self._pins[save_id]
                    if self._events is not None:
                        self._events.hurry()
                    assert self._pool is not None
                    # vLLM's order: the last pages are evicted first.
                    self._pool.free_blocks(reversed(pin.blocks))
        if output.invalid_block_ids:
            failed.update(
                request_id
                for request_id, block_ids in self._loads.items()
                if not block_ids.isdisjoint(output.invalid_block_ids)
            )
        for request_id in failed & self._loads.keys():
            state = self._requests.get(request_id)
            if state is not None:
                state.denied = True
                state.saved = 0
            if (prefill := self._prefills.get(request_id)) is not None:
                prefill.loaded = 0
        for request_id in output.finished_recving or ():
            self._loads.pop(request_id, None)
            if self._loaded is not None and request_id in self._requests:  # it was not aborted
                self._loaded.add(request_id)
            if (prefill := self._prefills.pop(request_id, None)) is not None:
                self._sidecars.tell_prefilled(prefill.tokens, prefill.found, prefill.loaded)
        if self._clear_waits:
            self._clear_when_quiet(0.0)

    def request_finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> dict[str, Any] | None:
        """The request ends, for any reason: save what is left of it. tables: its blocks, of each
        group.

        Answers the kv_transfer_params for whoever goes on with it, if anybody shall.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return None
        self._reset_if_preempted(state)
        del self._requests[request.request_id]
        self._identities.drop(request.request_id)
        if self._loaded:
            self._loaded.discard(request.request_id)
        if not self._requests:
            self._stepped = None
        self._drop_lookup(state)
        if request.request_id in self._loads:
            # Its blocks stay with vLLM until the workers report it.
            self._aborted.append(request.request_id)
            self._prefills.pop(request.request_id, None)  # neither computed nor of use
            return None
        if not (self._may_save and any(tables) and state.admitted) or state.stale:
            return None
        if self._pool is None or not self._sidecars.available or not self._may_name(state):
            return None
        # The last sampled token was never computed; tokens in flight may not
        # have been, and are of no use if the request was aborted.
        in_flight = getattr(request, "num_in_flight_tokens", None)
        if in_flight is not None:
            valid = min(
                max(request.num_prompt_tokens, request.num_tokens - 1),
                request.num_computed_tokens - in_flight,
            )
            self._last_saves += self._save(state, self._final_pages(state, valid), tables)
        return self._promise(state)

    # ---- events ----

    def _note_event_pages(self, state: _Request, first_page: int, end_page: int) -> None:
        """Pages [first_page, end_page) are being saved, or are held: announce them once all ranks
        hold them."""
        if self._events is None or end_page <= first_page:
            return
        request = state.request
        parent = self._hashes(request, first_page - 1, first_page)[0] if first_page else None
        hashes = self._hashes(request, first_page, end_page)
        self._events.note(
            request, first_page, self._names(state, first_page, end_page), hashes, parent
        )

    def take_events(self) -> list[Any]:
        """What all ranks hold of what this engine knows, and hold no more, since the last call; see
        events.py."""
        return [] if self._events is None else self._events.take()

    def has_pending_push_work(self) -> bool:
        """Whether saves are out that end by themselves if the engine steps on."""
        if self._last_saves or (self._events is not None and self._events.has_pending()):
            return True
        if not self._pins:
            return False
        oldest = next(iter(self._pins.values())).since
        return self._clock() - oldest < _SAVE_PATIENCE_S

    def has_pending_block_frees(self) -> bool:
        """Whether some block is held by nothing but our pins."""
        return any(block.ref_cnt == 1 for pin in self._pins.values() for block in pin.blocks)

    def reset_cache(self) -> bool:
        """Make void all that the sidecars hold, and have them clear it. Never fails.

        From now on nothing from before is hit, whether the sidecars can be reached or not: nothing
        is asked of them before they have confirmed the clear. This waits for that within the
        deadline. The clear itself comes after the saves and loads that are under way: what such a
        save commits must not stay behind, and such a load is good, as what a running request has
        computed is. Requests that run on keep what they have from before, so it is not saved.
        """
        self._sidecars.void()
        for spec in self._last_saves:
            pin = self._pins.pop(spec.save_id)
            assert self._pool is not None
            self._pool.free_blocks(reversed(pin.blocks))
        self._last_saves = []
        if self._pool is None or not len(self._pool.cached_block_hash_to_block):
            self._identities.forget()  # vLLM has reset its own cache, too
        for state in self._requests.values():
            self._reset_if_preempted(state)
            self._drop_lookup(state)
            self._forget_identity(state)
            state.saved = 0
            state.stale = (
                state.request.num_computed_tokens > 0 or state.request.request_id in self._loads
            )
        if self._events is not None:
            self._events.void()
        self._clear_waits = True
        self._saves_before, self._loads_before = self._next_save, set(self._loads)
        self._clear_when_quiet(self._config.reset_timeout_ms / 1e3)
        return True

    def _clear_when_quiet(self, timeout_s: float) -> None:
        """Have the sidecars clear what a reset made void, if what was under way then has ended."""
        self._loads_before &= self._loads.keys()
        if self._loads_before or next(iter(self._pins), self._saves_before) < self._saves_before:
            return
        self._clear_waits = False
        if not self._sidecars.clear(timeout_s) and timeout_s:
            logger.warning(
                "lookaside: the cache is reset, but not every sidecar has cleared its space;"
                " nothing is loaded or stored until all have"
            )

    def shutdown(self) -> None:
        """End the sessions, which frees all that they hold. Safe to call again."""
        self._sidecars.close()
        self._identities.close()

    # ---- state ----

    def _state(self, request: Request) -> _Request:
        state = self._requests.get(request.request_id)
        if state is None:
            state = _Request(request, request.num_preemptions)
            self._requests[request.request_id] = state
            self._identify(state)
        self._reset_if_preempted(state)
        return state

    def _reset_if_preempted(self, state: _Request) -> None:
        """Start over with a request that has lost its blocks since last seen.

        vLLM lists preempted requests only in the step after, when the request
        may have been looked up and admitted again; its own count is never late.
        """
        if state.request.num_preemptions == state.preemptions:
            return
        state.preemptions = state.request.num_preemptions
        self._drop_lookup(state)
        self._forget_identity(state)
        state.admitted = state.stale = state.saved_tail = state.expired = False
        state.saved = 0

    # ---- names ----

    def _identify(self, state: _Request) -> bool:
        """Whether it is known what a request's pages are named by."""
        known = state.identity
        if known is not None and known.features == len(state.request.mm_features or ()):
            return True
        if state.unshared:
            return False
        found = self._identities.of(state.request)
        if not isinstance(found, Identity):
            state.unshared = found is UNKNOWN
            return False
        state.identity = found
        if known is None:
            self._expect(state)
        return True

    def _waits_for_identity(self, state: _Request) -> bool:
        """Whether vLLM had better ask again for a request whose identity is not known."""
        if state.unshared or state.request.skip_reading_prefix_cache:
            return False
        now = self._clock()
        if state.patient_since is None:
            state.patient_since = now
        return now - state.patient_since < _IDENTITY_PATIENCE_S

    def _forget_identity(self, state: _Request) -> None:
        """An adapter may have been loaded anew before the request is computed again."""
        if state.unshared or (state.identity is not None and state.identity.adapter is not None):
            state.identity, state.unshared, state.patient_since = None, False, None

    def _may_name(self, state: _Request) -> bool:
        """Whether what is computed of a request now may be saved under its names."""
        if not self._identify(state):
            return False
        assert state.identity is not None
        if not self._identities.hold(state.identity):
            state.stale = True
        return not state.stale

    def _names(self, state: _Request, first_page: int, end_page: int) -> list[bytes]:
        """The names of pages [first_page, end_page) of a request with an identity."""
        hashes = self._hashes(state.request, first_page, end_page)
        identity = state.identity
        assert identity is not None
        if not identity.keys:
            return hashes
        ends = range((first_page + 1) * self._page, (end_page + 1) * self._page, self._page)
        return [identity.name(each, end) for each, end in zip(hashes, ends, strict=True)]

    def _page_name(self, state: _Request, tokens: int) -> bytes:
        """The name of the page that a prefix ends in, perhaps in its middle; empty if it has
        none."""
        assert state.identity is not None
        digest = self._ends.digest(state.request, tokens)
        return digest and state.identity.name(digest, tokens)

    def _hashes(self, request: Request, first_page: int, end_page: int) -> list[Any]:
        """vLLM's hashes of pages [first_page, end_page): each page's last one."""
        step = self._hashes_per_page
        if step == 1:
            return request.block_hashes[first_page:end_page]
        return request.block_hashes[(first_page + 1) * step - 1 : end_page * step : step]
