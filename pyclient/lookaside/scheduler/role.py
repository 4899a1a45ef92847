"""The calls that vLLM makes of the scheduler role; the package's comment names the parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lookaside import enginecalls, interface, kvgroups, space, tracing
from lookaside.config import Config
from lookaside.events import EventBook
from lookaside.hints import HintReader
from lookaside.identity import Identities
from lookaside.metadata import LookasideMetadata, LookasideWorkerMetadata
from lookaside.places import Place
from lookaside.scheduler.advice import Advice
from lookaside.scheduler.announcements import Announcements
from lookaside.scheduler.contract import Sidecars
from lookaside.scheduler.epochs import Epochs
from lookaside.scheduler.hits import Hits
from lookaside.scheduler.identification import Identification
from lookaside.scheduler.in_step import InStep, recovers
from lookaside.scheduler.loads import Loads
from lookaside.scheduler.names import Names
from lookaside.scheduler.pace import Pace
from lookaside.scheduler.promises import Promises
from lookaside.scheduler.requests import RequestState
from lookaside.scheduler.resets import Resets
from lookaside.scheduler.rows import Rows
from lookaside.scheduler.saves import Saves
from lookaside.scheduler.setup import Setup
from lookaside.scheduler.states import States
from lookaside.scheduler.tables import Tables
from lookaside.scheduler.waiting import Waiting
from lookaside.stats import Collector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SchedulerConnector:
    """Wires the parts of the scheduler role together. For the scheduler's thread alone."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        sidecars: Sidecars,
        stats: Collector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        geometry, _ = space.geometry(config, vllm_config, kv_cache_config)
        setup = self.setup = Setup(
            config=config,
            sidecars=sidecars,
            stats=stats,
            clock=clock,
            ranks=space.world(vllm_config).ranks,
            steps_ahead=max(1, getattr(vllm_config, "max_concurrent_batches", 1)) - 1,
            may_load=transfer is None or transfer.is_kv_consumer,
            may_save=transfer is None or transfer.is_kv_producer,
            page=geometry.page_tokens,
            chunk=geometry.pages_per_chunk,
            hashes_per_page=geometry.hashes_per_page,
            lookahead=space.lookahead_tokens(vllm_config),
            drafts=space.uses_drafts(vllm_config, kv_cache_config),
            draft_lag=space.draft_lag(vllm_config),
            in_step=recovers(vllm_config),
            hybrid=space.is_hybrid(kv_cache_config),
            tracer=tracing.begin(vllm_config, geometry.page_tokens),
        )
        events = getattr(vllm_config, "kv_events_config", None)
        book: EventBook | None = None
        if events is not None and events.enable_kv_cache_events and not interface.lacks("events"):
            book = EventBook(
                sidecars.feeds(), setup.page, geometry.digest_bytes, clock, setup.lookahead
            )

        self.requests: dict[str, RequestState] = {}
        self.identities = Identities(vllm_config)
        dcp = kvgroups.dcp_size(vllm_config)
        self.rows = Rows(kvgroups.shares(kv_cache_config.kv_cache_groups, setup.page, dcp))
        self.tables = Tables()
        self.names = Names(setup, vllm_config)
        self.pace = Pace(setup)
        self.promises = Promises(setup, self.names)
        self.identification = Identification(setup, self.identities, self.promises)
        self.announcements = Announcements(book, self.names)
        self.waiting = Waiting(setup)
        self.states = States(setup, self.rows, self.names, self.pace, self.waiting)
        self.hits = Hits(
            setup,
            self.names,
            self.identification,
            self.promises,
            self.states,
            self.pace,
            self.waiting,
        )
        self.in_step = InStep(setup, self.pace, self.promises)
        self.loads = Loads(setup, self.rows, self.hits, self.states, self.in_step)
        self.saves = Saves(
            setup,
            self.rows,
            self.tables,
            self.names,
            self.identification,
            self.promises,
            self.states,
            self.announcements,
        )
        self.hints = HintReader(config.tenant, stats.add)
        self.advice = Advice(setup, self.names, self.identification, geometry.digest_bytes)
        self.resets = Resets(setup, self.saves, self.loads)
        self.epochs = Epochs(setup, self.requests, self._let_go, self._clear)
        self.saves.is_mixed = self.epochs.is_mixed
        engine = enginecalls.follow() if config.watch_weights else None
        if engine is not None:
            self.epochs.watch(engine.model_executor)

        from vllm.v1.request import RequestStatus

        self._running = RequestStatus.RUNNING
        self._cut_short = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)

    def bind_gpu_block_pool(self, pool: BlockPool) -> None:
        """Take the pool to pin blocks with; without one nothing is saved."""
        self.saves.pool = self.in_step.pool = self.epochs.pool = pool

    # ---- a request ----

    def on_new_request(self, request: Request) -> None:
        """Start the lookup of the whole prefix."""
        state = self._state(request)
        self.hits.begin(state)
        self.advice.begin(state)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded beyond vLLM's own hit; None: ask again."""
        self.epochs.settle()
        state = self._state(request)
        state.local_page = num_computed_tokens // self.setup.page
        state.in_step = False
        if num_computed_tokens and self.epochs.is_mixed():
            state.stale = True
        if self.setup.may_load and self.epochs.is_moving():
            return None, False
        if self.in_step.is_shared(request, state.local_page):
            return None, False
        if (
            self.setup.may_load
            and not self.identification.is_known(state)
            and self.identification.may_wait(state)
        ):
            return None, False
        if self.loads.must_wait(request.request_id):
            return None, False
        tokens = self.hits.find(state, num_computed_tokens)
        if not tokens:
            return tokens, False
        alone = not self._computes()
        state.in_step = self.in_step.may_offer(state, num_computed_tokens, tokens, alone)
        return tokens, not state.in_step

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """vLLM has decided: load num_external_tokens into these blocks, or nothing."""
        state = self._state(request)
        asked = state.asked
        self.advice.begin(state)
        if not state.admitted:
            state.admitted = True
            self.loads.note_admission(state, asked, num_external_tokens)
        if asked is not None and asked.held is not None:
            if asked.first_page == 0:
                self.saves.note_held(state, asked.held)
            end = min(asked.held, self.names.known(request))
            self.announcements.note(state, asked.first_page, end)
        if not state.counted:
            state.counted = True
            local = state.local_page * self.setup.page
            self.setup.stats.add("query_tokens", request.num_tokens - local)
            if asked is not None and self.promises.falls_short(state, asked):
                self.setup.stats.add("promises_broken")
        if num_external_tokens <= 0:
            self.loads.go_on(request.request_id)
            self.hits.drop(state)
            return
        end = self.loads.order(state, blocks.get_block_ids(), num_external_tokens)
        self.saves.note_held(state, end)
        self.setup.stats.add("hit_tokens", num_external_tokens)

    def request_finished(
        self, request: Request, tables: Sequence[list[int]]
    ) -> dict[str, Any] | None:
        """A request ends, for any reason: save what is left of it.

        tables are its blocks, of each group. Returns the kv_transfer_params for whoever goes on
        with it, if anybody shall.
        """
        state = self.requests.get(request.request_id)
        if state is None:
            return None
        self._refresh(state)
        self.advice.end(state)
        del self.requests[request.request_id]
        self.identities.drop(request.request_id)
        if not self.requests:
            self.pace.pause()
        self.hits.drop(state)
        if self.loads.is_unsure(request.request_id) and request.status in self._cut_short:
            return None  # what it has computed may be garbage
        if self.loads.abort(request.request_id) or not self.saves.finish(state, tables):
            return None
        return self.promises.write(state)

    # ---- a step ----

    def build_connector_meta(self, output: SchedulerOutput) -> LookasideMetadata:
        """Return this step's work. The loads go first: a lost load would park its request."""
        self.pace.note_step(bool(self.requests), output.total_num_scheduled_tokens > 0)
        self.loads.begin_step()
        self.waiting.begin_step()
        meta = LookasideMetadata(
            loads=self.loads.ordered, saves=self.saves.of_ended, aborted=self.loads.aborted
        )
        self.loads.ordered, self.saves.of_ended, self.loads.aborted = [], [], []
        meta.epoch = self.epochs.name
        meta.idle = not output.total_num_scheduled_tokens and not self._computes()
        try:
            self.tables.begin_step(output)
            sure: Mapping[str, RequestState] = self.requests
            if unsure := self.in_step.blocks:
                sure = {r: state for r, state in sure.items() if r not in unsure}
                for request_id in unsure.keys() & self.requests.keys():
                    self.requests[request_id].owes_prompt = True
            elif self.setup.may_load:
                self.pace.time_forward(output, self.requests, meta)
            self.saves.collect(output, sure, self._refresh, meta.saves)
        except Exception:
            self.setup.stats.add("errors")
            logger.exception("lookaside: a step's pages are not saved")
        finally:
            self.tables.end_step()
        return meta

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Unpin what all ranks are done with; note loads that ended and failed."""
        meta = output.kv_connector_worker_meta
        failed: set[str] = set(getattr(output, "failed_recving", None) or ())
        if isinstance(meta, LookasideWorkerMetadata):
            failed.update(meta.loads_failed)
            self.pace.note_forwards(meta.forward_seconds)
            self.pace.note_copies(meta.copies)
            self.saves.acknowledge(meta.saves_done)
            if meta.places:
                self.learn(meta.places)
        self.loads.end(output, failed, self.requests)
        self.resets.go_on()

    def take_events(self) -> list[Any]:
        """Return what all ranks hold of what this engine knows, and hold no more, since the last
        call; see events.py."""
        return self.announcements.take()

    def has_pending_push_work(self) -> bool:
        """Report whether saves are out that end by themselves if the engine steps on."""
        return self.announcements.has_pending() or self.saves.has_pending()

    def has_pending_block_frees(self) -> bool:
        """Report whether some block is held by nothing but our pins."""
        return self.saves.has_last_blocks()

    # ---- all of it ----

    def learn(self, places: Mapping[int, Place]) -> None:
        """Take in where workers have their sidecars, by rank."""
        self.setup.sidecars.learn(places)

    def reset_cache(self) -> bool:
        """Make void all that the sidecars hold, and have them clear it. Never fails.

        A pause of vLLM resets its caches because weights may change. Where that can be seen
        (epochs.py), nothing is cleared then.

        From now on nothing from before is hit, whether the sidecars can be reached or not: nothing
        is asked of them before they have confirmed the clear. This call waits for that within the
        deadline; resets.py says when the clear comes. Requests that run on keep what they have from
        before, so it is not saved.
        """
        if self.epochs.keeps_cache():
            return True
        self.setup.sidecars.void()
        self.saves.withdraw()
        pool = self.saves.pool
        if pool is None or not len(pool.cached_block_hash_to_block):
            self.identities.forget()  # vLLM has reset its own cache, too
        for state in self.requests.values():
            self._refresh(state)
            self.hits.drop(state)
            self.identification.forget(state)
            state.saved = 0
            state.stale = (
                state.request.num_computed_tokens > 0
                or state.request.request_id in self.loads.blocks
            )
        self.announcements.void()
        self.epochs.note_reset()
        self.resets.begin()
        return True

    def _clear(self) -> None:
        """Have the sidecars forget all of the space, of which nothing is held here any more."""
        self.setup.sidecars.void()
        self.announcements.void()
        self.resets.begin()

    def _let_go(self) -> list[RequestState]:
        """Give back what is leased, and save nothing of what has been computed so far.

        Returns the requests that are stale by it, and were not before.
        """
        self.saves.withdraw()
        stale: list[RequestState] = []
        for state in self.requests.values():
            self._refresh(state)
            self.hits.drop(state)
            state.saved = 0
            begun = state.request.num_computed_tokens > 0
            if not state.stale and (begun or state.request.request_id in self.loads.blocks):
                state.stale = True
                stale.append(state)
        return stale

    def shutdown(self) -> None:
        """End the sessions, which frees all that they hold. Safe to call again."""
        self.setup.sidecars.close()
        self.identities.close()
        if self.setup.tracer is not None:
            self.setup.tracer.close()

    # ---- the requests ----

    def _state(self, request: Request) -> RequestState:
        state = self.requests.get(request.request_id)
        if state is None:
            hints = self.hints.read(request)
            state = RequestState(request, request.num_preemptions, hints)
            if self.setup.tracer is not None:
                state.trace = getattr(request, "trace_headers", None)
            self.requests[request.request_id] = state
            self.identification.is_known(state)
        self._refresh(state)
        return state

    def _refresh(self, state: RequestState) -> None:
        """Start over with a request that has lost its blocks since it was last seen.

        vLLM lists preempted requests only in the step after, when the request may have been looked
        up and admitted again. The request's own count is never late.
        """
        if state.request.num_preemptions == state.preemptions:
            return
        state.preemptions = state.request.num_preemptions
        self.hits.drop(state)
        self.identification.forget(state)
        state.admitted = state.stale = state.saved_tail = state.expired = False
        state.saved = 0

    def _computes(self) -> bool:
        """Report whether vLLM has begun to compute a request.

        With several batches at a time, that request's step may be under way, also if the request
        has been preempted since.
        """
        return any(
            state.request.status == self._running or state.request.num_in_flight_tokens
            for state in self.requests.values()
        )
