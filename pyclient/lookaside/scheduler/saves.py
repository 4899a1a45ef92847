"""Pages that are handed to the workers, and the blocks pinned for them.

Saves go out as chunks fill, for the rest of the prompt when its prefill ends, and for what is left
when the request ends. The very next step may free a block and rewrite it. So every block of a save
is pinned with the block pool until every rank has acknowledged the save. Ranks that hold the same
pages divide a save's chunks among them; a rank that has none of them acknowledges at once.

A request's saved pages are a high-water mark that only counts pages handed to the workers. It is
void when the request is preempted or its hashes change under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lookaside.metadata import SaveSpec
from lookaside.scheduler.announcements import Announcements
from lookaside.scheduler.identification import Identification
from lookaside.scheduler.names import Names
from lookaside.scheduler.promises import Promises
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.rows import Rows
from lookaside.scheduler.setup import Setup
from lookaside.scheduler.states import States
from lookaside.scheduler.tables import Tables

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

# Pages of one save.
_MAX_SAVE_PAGES = 4096
# A save that no worker has acknowledged for this long no longer keeps the engine awake.
_SAVE_PATIENCE_S = 60.0


@dataclass(slots=True)
class _Pin:
    blocks: list[KVCacheBlock]
    ranks_left: int
    since: float


class Saves:
    """Decides what to save, and keeps its blocks until it is saved."""

    def __init__(
        self,
        setup: Setup,
        rows: Rows,
        tables: Tables,
        names: Names,
        identification: Identification,
        promises: Promises,
        states: States,
        announcements: Announcements,
    ) -> None:
        self._setup = setup
        self._rows = rows
        self._tables = tables
        self._names = names
        self._identification = identification
        self._promises = promises
        self._states = states
        self._announcements = announcements
        self._hashes_per_page = setup.hashes_per_page
        self._save_pages = max(1, _MAX_SAVE_PAGES // setup.chunk) * setup.chunk
        self.pool: BlockPool | None = None
        """The pool to pin blocks with; without one nothing is saved."""
        self.pins: dict[int, _Pin] = {}
        """By rising save id."""
        self.is_mixed: Callable[[], bool] = lambda: False
        """Whether vLLM's own cache may have blocks that other weights computed."""
        self.next_id = 1
        self.of_ended: list[SaveSpec] = []
        """Saves of requests that have ended, for the next step's metadata."""

    # ---- what to save ----

    def collect(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, RequestState],
        refresh: Callable[[RequestState], None],
        specs: list[SaveSpec],
    ) -> None:
        """Append to specs what a step's requests have filled; specs is valid after an exception.

        refresh takes note of preemptions.
        """
        if not self._setup.may_save or self.pool is None:
            return
        if output.kv_connector_block_state is None or not self._setup.sidecars.available:
            return
        self._collect_pages(output, requests, refresh, specs)
        if self._states.groups:
            self._collect_states(output, requests, refresh, specs)

    def _collect_pages(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, RequestState],
        refresh: Callable[[RequestState], None],
        specs: list[SaveSpec],
    ) -> None:
        """Append specs of pages of tokens; see collect."""
        page = self._setup.page
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = requests.get(request_id)
            if state is None or state.stale or not state.hints.store:
                continue
            refresh(state)
            request = state.request
            before = request.num_computed_tokens
            # Beyond num_tokens lie drafts and placeholders.
            after = min(before + scheduled, request.num_tokens)
            ends_prompt = after >= request.num_prompt_tokens and (
                before < request.num_prompt_tokens or state.owes_prompt
            )
            state.owes_prompt = state.owes_prompt and not ends_prompt
            if (after - self._setup.draft_lag) // page <= state.saved and not ends_prompt:
                continue
            if not self._identification.may_save(state):
                continue
            pages, tail = self._filled(state, after, ends_prompt)
            if pages > state.saved or tail:
                specs += self._save(state, pages, self._tables.of(request_id), tail)

    def _collect_states(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, RequestState],
        refresh: Callable[[RequestState], None],
        specs: list[SaveSpec],
    ) -> None:
        """Append specs of the states that vLLM hands out; see collect."""
        block_state = output.kv_connector_block_state
        assert block_state is not None
        for request_id, offers in block_state.boundary_state_offloads.items():
            state = requests.get(request_id)
            if state is None or request_id in (output.preempted_req_ids or ()):
                continue
            refresh(state)
            wanted = state.hints.store and not state.stale
            if wanted and self._identification.may_save(state):
                specs += self._save_states(state, offers)

    def finish(self, state: RequestState, tables: Sequence[list[int]]) -> bool:
        """Save what is left of a request that ends; return whether it can be saved at all.

        tables are its blocks, of each group.
        """
        setup, request = self._setup, state.request
        if not (setup.may_save and any(tables) and state.admitted) or state.stale:
            return False
        if not state.hints.store:
            return False
        if self.pool is None or not setup.sidecars.available:
            return False
        if not self._identification.may_save(state):
            return False
        # The last sampled token was never computed; tokens in flight may not have been, and are of
        # no use if the request was aborted.
        valid = min(
            max(request.num_prompt_tokens, request.num_tokens - 1),
            request.num_computed_tokens - request.num_in_flight_tokens,
        )
        self.of_ended += self._save(
            state, self._final_pages(state, valid - setup.draft_lag), tables
        )
        return True

    def note_held(self, state: RequestState, page: int) -> None:
        """Note that pages below page are held by every rank, as far as they are whole."""
        page = min(page, self._names.known(state.request))
        if state.saved < page and not state.stale and state.identity is not None:
            state.saved = page
            state.saved_digest = self._names.before(state, page)

    def _filled(self, state: RequestState, valid: int, ends_prompt: bool) -> tuple[int, bytes]:
        """Return the pages to save of the first valid tokens, and the name of the prompt's tail.

        That name is empty if the prompt's incomplete last page is not to be saved.
        """
        prompt_tokens = state.request.num_prompt_tokens
        tail = self._promises.tail(state) if ends_prompt else b""
        pages = self._final_pages(state, valid - self._setup.draft_lag)
        if not ends_prompt:
            pages -= pages % self._setup.chunk
        if pages != prompt_tokens // self._setup.page:
            tail = b""  # a resumed request may be past it
        return pages, tail

    def _final_pages(self, state: RequestState, valid_tokens: int) -> int:
        """Return how many whole pages of the valid tokens may be saved and have hashes."""
        request = state.request
        if not self._setup.config.save_decode:
            valid_tokens = min(valid_tokens, request.num_prompt_tokens)
        # Called for each request of most steps, so without names.known and names.before.
        known, saved = len(request.block_hashes) // self._hashes_per_page, state.saved
        # A streaming session takes back hashes when its next turn begins.
        if saved and (
            saved > known or self._names.of(state, saved - 1, saved)[0] != state.saved_digest
        ):
            state.saved = 0
        return min(valid_tokens // self._setup.page, known)

    # ---- specs ----

    def _save(
        self, state: RequestState, end_page: int, tables: Sequence[list[int]], tail: bytes = b""
    ) -> list[SaveSpec]:
        """Return specs for pages [state.saved, end_page), their blocks pinned.

        A tail names the prompt's incomplete page, which is saved as well: it is the page after
        end_page, and not counted in state.saved.
        """
        request, chunk = state.request, self._setup.chunk
        at, whole = state.saved, end_page
        end_page = min(end_page + bool(tail), self._rows.pages_of(tables))
        specs: list[SaveSpec] = []
        divided, hints = self._setup.sidecars.divided, state.hints.of_store()
        while at < end_page:
            # A chunk that is extended may have to be written anew from its first page.
            first = at - at % chunk
            end = min(end_page, first + self._save_pages)
            block_ids = self._rows.of(tables, first, end)
            if 0 in block_ids and self._setup.hybrid:
                if not self.is_mixed():
                    self._fill(request, block_ids, first)
            elif 0 in block_ids:  # vLLM's null block: this page's bytes are gone
                break
            names = self._names.of(state, first, min(end, whole))
            if end > whole:
                names = [*names, tail]
            spec = SaveSpec(
                save_id=self.next_id,
                request_id=request.request_id,
                first_page=first,
                prev=self._names.before(state, first),
                hashes=b"".join(names),
                block_ids=block_ids,
                divided=divided,
                hints=hints,
            )
            self._pin(spec)
            specs.append(spec)
            at = end
            if min(end, whole) > state.saved:
                self._announcements.note(state, state.saved, min(end, whole))
                state.saved = min(end, whole)
                state.saved_digest = names[state.saved - first - 1]
            state.saved_tail = state.saved_tail or end > whole
        return specs

    def _save_states(
        self, state: RequestState, offers: Sequence[tuple[int, int, int]]
    ) -> list[SaveSpec]:
        """Return specs for the states that vLLM hands out, their blocks pinned."""
        specs: list[SaveSpec] = []
        for page, block_ids in self._states.offered(offers):
            if self._final_pages(state, page * self._setup.page) >= page and self._are_named(
                state.request, page, block_ids
            ):
                specs.append(self._states.save(state, self.next_id, page, block_ids))
                self._pin(specs[-1])
        return specs

    def _are_named(self, request: Request, page: int, block_ids: Sequence[int]) -> bool:
        """Report whether vLLM still names the blocks of states after the end of this page.

        vLLM 0.33 hands out states when a step's drafts were accepted, and may give their blocks to
        another request before the next step is scheduled.
        """
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        assert self.pool is not None
        end = request.block_hashes[page * self._hashes_per_page - 1]
        return all(
            self.pool.blocks[block_id].block_hash == make_block_hash_with_group_id(end, group)
            for group, block_id in zip(self._states.groups, block_ids, strict=True)
        )

    def _fill(self, request: Request, rows: list[int], first: int) -> None:
        """Put blocks that windows have left behind into rows of pages from first on, where vLLM
        still has them.

        Its own cache finds them by their hash until it needs the room. It would use them itself for
        a hit that ends there.
        """
        assert self.pool is not None
        columns, width = self._rows.columns, self._rows.width
        for at, block_id in enumerate(rows):
            page, column = divmod(at, width)
            if block_id or column >= len(columns):
                continue
            group, blocks, index = columns[column]
            hashes = self._setup.hashes_per_page // blocks  # of a block
            block = (first + page) * blocks + index
            if hashes and (block + 1) * hashes <= len(request.block_hashes):
                cached = self.pool.get_cached_block(
                    request.block_hashes[(block + 1) * hashes - 1], [group]
                )
                if cached:
                    rows[at] = cached[0].block_id

    # ---- pins ----

    def _pin(self, spec: SaveSpec) -> None:
        """Keep a new save's blocks until every rank is done with it."""
        assert self.pool is not None
        self.next_id += 1
        blocks = [self.pool.blocks[i] for i in spec.block_ids if i]
        self.pool.touch(blocks)
        self.pins[spec.save_id] = _Pin(blocks, self._setup.ranks, self._setup.clock())
        self._setup.stats.add("saves")

    def _unpin(self, save_id: int) -> None:
        assert self.pool is not None
        # vLLM's order: the last pages are evicted first.
        self.pool.free_blocks(reversed(self.pins.pop(save_id).blocks))

    def acknowledge(self, saves_done: Mapping[int, int]) -> None:
        """Take in how many ranks are done with each save; unpin what all are done with."""
        for save_id, ranks in saves_done.items():
            pin = self.pins.get(save_id)
            if pin is None:
                continue
            pin.ranks_left -= ranks
            if pin.ranks_left <= 0:
                self._announcements.hurry()
                self._unpin(save_id)

    def withdraw(self) -> None:
        """Unpin the saves of ended requests that no worker has been told of."""
        for spec in self.of_ended:
            self._unpin(spec.save_id)
        self.of_ended = []

    def has_pending(self) -> bool:
        """Report whether saves are out that end by themselves if the engine steps on."""
        if self.of_ended:
            return True
        if not self.pins:
            return False
        oldest = next(iter(self.pins.values())).since
        return self._setup.clock() - oldest < _SAVE_PATIENCE_S

    def has_last_blocks(self) -> bool:
        """Report whether some block is held by nothing but a pin."""
        return any(block.ref_cnt == 1 for pin in self.pins.values() for block in pin.blocks)
