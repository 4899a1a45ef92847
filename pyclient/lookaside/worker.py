"""The worker role: moves pages between this rank's KV cache and the mapped arena.

One step, on the worker's main thread:

1. bind_connector_metadata asks the sidecar for room (PrepareStore) for the
   step's saves and takes over the leases of its loads (PrepareLoad), so that the
   answers travel while the model computes.
2. start_load_kv hands the loads to the loader thread. No block is written before
   this: only now has vLLM finished with what the blocks were before.
3. wait_for_save collects the room, waiting a little for it at most, and copies.
   On a CPU the copy is over when it returns; on CUDA it is queued behind the
   forward, and the scheduler keeps the blocks until build_connector_worker_meta
   names the save.
4. get_finished and the calls after it report what has ended. Where the scheduler
   says that nothing is computed, it first waits a little for a load to end: vLLM does
   nothing but ask again until then, on the very cores that copy. (What start_load_kv is
   given does not tell: the V2 model runner calls it after the forward's context.)

Between 1 and 3 lies the forward. Where the scheduler asks for its time, that is
told in build_connector_worker_meta, of this step or, on CUDA, of a later one: by
events on the stream, so that nothing waits for the device.

What is promised to vLLM, whatever the sidecar does:

- No wait is without a deadline. (An exception is a bug, which the facade contains.)
- Every request that a load was ordered for is reported as received exactly once,
  and not before the last byte has moved: vLLM may free its blocks then.
- Every save is acknowledged exactly once, carried out or not, and not before the
  last byte of its blocks has been read.
- A load counts as good only if, after the copy, the session that leased its pages
  is still there and its sidecar alive. Otherwise its blocks are reported as
  invalid, which makes vLLM compute them; the local prefix before them stays. Where a
  model has a sliding window or several KV-cache groups, an invalid block would end the
  engine, or leave a window that begins too late: the request as a whole is reported
  as failed, and vLLM starts over with it.

A session that is lost while copies run is not replaced before they have ended, for a
few seconds at most. Its socket stays open until the last of them has, however long that
takes: when it closes, the sidecar gives its room to others.

Locks: _lock guards what the threads share, marked so, and is held for
bookkeeping only.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lookaside import space, wire
from lookaside.autostart import Autostart
from lookaside.config import Config
from lookaside.copies import ABSENT, Copies, Ticket, make_copies, use_all_cores
from lookaside.layout import UnsupportedLayout, build_layout
from lookaside.metadata import (
    LoadSpec,
    LookasideMetadata,
    LookasideWorkerMetadata,
    SaveSpec,
)
from lookaside.regions import Hold, RegionError, RegionSet
from lookaside.session import (
    Pending,
    RateLimitedLog,
    Session,
    SessionOptions,
    SessionUnavailable,
)
from lookaside.stats import Collector

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.lookaside")

# How long engine start waits for a sidecar that is there, and for one being started.
_START_PATIENCE_S = 5.0
_AUTOSTART_PATIENCE_S = 20.0
# The sidecar answers PrepareLoad from memory; this is generous for a busy machine.
_GRANT_PATIENCE_S = 0.5
# Copies take milliseconds; this bounds what a stuck device can hold up.
_DRAIN_PATIENCE_S = 5.0
_SHUTDOWN_PATIENCE_S = 2.0
# How long a step without a forward waits for a load; new requests wait as long.
_IDLE_STEP_PATIENCE_S = 0.005
# How often the loader looks at several things that are out at once.
_POLL_S = 0.0005
# Kinds of region that are mapped by pages of 2 MiB, where their pages and the kernel allow it.
_HUGE_KINDS = ("hugetlb", "thp", "devdax", "fsdax")
# The kind whose pages are the page cache's: to write to each of them would have all of the file
# written back.
_FILE_KIND = "file"
# Timed forwards that may be under way on a device; further ones are not timed.
_MAX_FORWARDS = 16


@dataclass(frozen=True, slots=True)
class _Live:
    """The present session, and the mappings that its grants point into."""

    session_id: int
    regions: RegionSet
    max_pages: int


@dataclass(slots=True)
class _Piece:
    """One PrepareStore that is out, for some of a save's pages."""

    asked: range
    pending: Pending


@dataclass(slots=True)
class _Save:
    """One SaveSpec between its order and its acknowledgement. Main thread only."""

    spec: SaveSpec
    live: _Live
    pieces: list[_Piece]
    since: float
    hold: Hold | None = None
    stores: list[tuple[int, list[int]]] = field(default_factory=list)
    """(store, indices of its grants that could not be copied)."""
    pages: int = 0
    """Pages being copied."""
    ticket: Ticket | None = None


@dataclass(slots=True)
class _Load:
    """One LoadSpec between its order and its report.

    Made on the main thread, the loader's from start_load_kv on.
    """

    spec: LoadSpec
    live: _Live
    pending: Pending
    since: float
    grant_deadline: float
    deadline: float
    load: int = 0
    """The sidecar's id of it once granted."""
    hold: Hold | None = None
    sources: list[tuple[int, int]] = field(default_factory=list)
    """[first, last) address of each extent."""
    size: int = 0
    """Bytes being copied."""
    ticket: Ticket | None = None
    error: str | None = None


class _Forward:
    """The time of one step's forward, from here to end(). Main thread only.

    On a device it is taken by two events on the present stream, else by the clock.
    """

    __slots__ = ("_begin", "_end", "_first", "_last", "step")

    def __init__(self, step: int, device: bool) -> None:
        self.step = step
        self._first = self._last = None
        self._begin = self._end = 0.0
        if device:
            self._first, self._last = _event(), _event()
            self._first.record()
        else:
            self._begin = time.monotonic()

    def end(self) -> None:
        """Mark the forward's end, the first time that this is called."""
        if self._end:
            return
        self._end = time.monotonic()
        if self._last is not None:
            self._last.record()

    def seconds(self) -> float | None:
        """How long it took; None if it is not over. Never waits."""
        if not self._end:
            return None
        if self._first is None or self._last is None:
            return self._end - self._begin
        return self._first.elapsed_time(self._last) / 1e3 if self._last.query() else None


class WorkerConnector:
    """See the module's comment. Constructing it opens nothing."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        stats: Collector,
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._log = RateLimitedLog(logger)
        self._stats = stats
        self._rank = 0
        self._page_bytes = 0
        self._column_bytes = np.zeros(1, np.int64)  # of each of a page's blocks
        self._states = 0  # of these, the last, which are alone in their pages
        self._whole_failures = space.is_hybrid(kv_cache_config)
        self._pages_per_chunk = 1
        self._share = (1, 0)  # of how many ranks that hold the same pages this is which
        self._digest_bytes = 32
        self._copies: Copies | None = None
        self._session: Session | None = None
        # Replaced, never changed, by the session's thread.
        self._live: _Live | None = None
        self._shut = False

        # The stream that vLLM computes on, by its handle: torch tells it to the main
        # thread only, and the loader's copies must come after what it was given.
        self._note_stream: Callable[[], int] | None = None
        self._compute_stream = 0

        # The main thread's own.
        self._orders: list[_Save] = []  # asked for in this step
        self._copying: list[_Save] = []  # whose ticket is out
        self._fresh_loads: list[_Load] = []  # not yet handed to the loader
        self._saves_done: dict[int, int] = {}
        self._forwards: deque[_Forward] = deque()  # timed, the newest perhaps not over

        self._loader: threading.Thread | None = None
        self._loads: queue.SimpleQueue[_Load | None] = queue.SimpleQueue()

        self._idle_step = False  # the main thread's own, too: nothing is computed in this step

        self._lock = threading.Lock()
        self._load_ended = threading.Condition(self._lock)
        # Guarded by _lock.
        self._out: dict[str, int] = {}  # request -> loads of it that are out
        self._failed: set[str] = set()  # of these, the ones that cannot succeed any more
        self._aborted: set[str] = set()
        self._received: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._failed_requests: set[str] = set()  # received, but their loads failed as a whole
        self._loads_failed: dict[str, int] = {}

    # ---- life ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the pages lie and connect. Called once, with the engine not yet serving.

        Without a sidecar that answers this takes no longer than with one; the
        session goes on trying in the background.
        """
        if self._session is not None or self._shut:
            return
        reason = space.idle_reason(self._vllm_config, self._kv_cache_config)
        if reason is not None:
            logger.info("nothing is stored or loaded: %s", reason)
            return
        try:
            layout = build_layout(self._kv_cache_config, kv_caches, self._vllm_config)
        except UnsupportedLayout as error:
            logger.warning("nothing is stored or loaded: %s", error.reason)
            return
        world = space.world(self._vllm_config)
        tp_rank, pp_rank = _place(self._vllm_config, world)
        geometry, _ = space.geometry(self._config, self._vllm_config, self._kv_cache_config)
        if layout.page_tokens != geometry.page_tokens:
            logger.warning(
                "nothing is stored or loaded: a page has %d tokens in memory, %d in vLLM's "
                "scheduler",
                layout.page_tokens,
                geometry.page_tokens,
            )
            return
        self._rank = pp_rank * world.tp_size + tp_rank
        self._page_bytes = layout.page_bytes
        self._column_bytes = np.array(layout.column_bytes, np.int64)
        self._states = layout.states
        self._pages_per_chunk = geometry.pages_per_chunk
        self._digest_bytes = geometry.digest_bytes

        transfer: Any = self._vllm_config.kv_transfer_config
        engine_id = str(transfer.engine_id)
        replicas = space.replicas(self._vllm_config, self._kv_cache_config)
        self._share = (replicas, tp_rank % replicas)
        fields = space.space_fields(
            self._vllm_config,
            tp_rank,
            pp_rank,
            replicas=replicas,
            engine_id=engine_id,
            geometry=geometry,
        )
        endpoint = self._config.endpoint_for(self._rank, world.dp_rank)
        device = next(iter(kv_caches.values())).device
        if device.type == "cuda":
            self._note_stream = functools.partial(_current_stream, device)
        self._copies = make_copies(
            layout,
            device,
            threads=self._config.load_threads,
            compute_stream=lambda: self._compute_stream,
        )
        arguments = self._config.sidecar_arguments(self._rank, world.dp_rank)
        autostart = (
            Autostart(self._config.binary, endpoint, arguments) if self._config.autostart else None
        )
        session = Session(
            SessionOptions(
                endpoint=endpoint,
                role="worker",
                engine_id=engine_id,
                rank=self._rank,
                page_tokens=geometry.page_tokens,
                page_bytes=layout.page_bytes,
                pages_per_chunk=geometry.pages_per_chunk,
                digest_bytes=geometry.digest_bytes,
                fields={**layout.description, **fields},
            ),
            on_absent=autostart.ensure if autostart is not None else None,
        )
        session.subscribe(self)
        self._session = session
        self._loader = threading.Thread(
            target=self._load_loop, name="lookaside-loader", daemon=True
        )
        self._loader.start()
        session.start()
        if not session.wait_settled(_START_PATIENCE_S) and autostart is not None:
            deadline = time.monotonic() + _AUTOSTART_PATIENCE_S
            if autostart.wait(_AUTOSTART_PATIENCE_S) and not session.wait_connected(
                max(0.0, deadline - time.monotonic())
            ):
                logger.warning(
                    "lookaside: the sidecar on %s, which autostart starts, does not answer yet; "
                    "serving without it"
                    " until it does",
                    endpoint,
                )

    def shutdown(self) -> None:
        """Finish what is being copied and end the session. Safe to call again."""
        if self._shut:
            return
        self._shut = True
        deadline = time.monotonic() + _SHUTDOWN_PATIENCE_S
        for save in self._copying:
            if save.ticket is not None:
                save.ticket.wait(max(0.0, deadline - time.monotonic()))
        self._finish_saves()
        if self._loader is not None:
            self._loads.put(None)
            self._loader.join(max(0.1, deadline - time.monotonic()))
        if self._session is not None:
            self._session.close(_SHUTDOWN_PATIENCE_S)
        if self._copies is not None:
            self._copies.close()
        # of copies that have ended since: nothing else would let go of their memory
        self._finish_saves()

    # ---- session.Subscriber, on the session's thread ----

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        """A new session: grants of the one before mean nothing any more."""
        pages = min(welcome.max_pages, wire.max_store_pages(self._digest_bytes))
        chunks = max(1, pages // self._pages_per_chunk)
        regions = RegionSet(self._copies, on_unmapped=session.hold())
        self._live = _Live(welcome.session, regions, chunks * self._pages_per_chunk)

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        """Map a region. One that cannot be mapped costs its grants, not the session.

        Another sidecar's is never waited for: the session comes first. The
        sidecar waits with its grants until it hears that a region is ready, but
        for those that it names before the session is connected.
        """
        live = self._live
        if live is None:
            return
        mapped = functools.partial(session.send, wire.RegionMapped(region.region), live.session_id)
        try:
            live.regions.add(
                region.region,
                fd,
                region.size,
                huge=region.kind in _HUGE_KINDS,
                background=session.connected or bool(region.read_only),
                offset=region.offset,
                page_size=region.page_size,
                write=region.kind != _FILE_KIND,
                read_only=bool(region.read_only),
                then=mapped,
            )
        except RegionError as error:
            mapped()
            self._stats.add("errors")
            whose = "another sidecar's arena" if region.read_only else "the arena"
            self._log.warning(
                f"region {region.read_only}", "region %d of %s: %s", region.region, whose, error
            )

    def on_region_removed(self, session: Session, region: int) -> None:
        """Unmap a region once no copy of ours can touch it, and say so."""
        live = self._live
        if live is not None:
            live.regions.remove(
                region,
                functools.partial(session.send, wire.RegionUnmapped(region), live.session_id),
            )

    def on_lost(self, session: Session) -> None:
        """The session is over; wait for copies that use its memory, then unmap it."""
        live, self._live = self._live, None
        if live is not None:
            live.regions.close()
            if not live.regions.wait_unmapped(_DRAIN_PATIENCE_S):
                self._log.warning(
                    "drain", "copies still use the memory of a session that is over; it stays ours"
                )

    # ---- a step, on the main thread ----

    def handle_preemptions(self, argument: object) -> None:
        """Nothing, whether vLLM gives the step's metadata or, as older ones, request ids.

        The blocks of a save are pinned until it is acknowledged, and those of a
        load are held until it is reported: no forward can overwrite either.
        """

    def bind_connector_metadata(self, metadata: object) -> None:
        """Send the step's questions to the sidecar."""
        if not isinstance(metadata, LookasideMetadata):
            return
        with self._lock:
            # All of the step's loads before the first is ordered: one that fails at once must not
            # be taken for the last of its request.
            for spec in metadata.loads:
                self._out[spec.request_id] = self._out.get(spec.request_id, 0) + 1
            self._aborted.update(request for request in metadata.aborted if request in self._out)
        self._idle_step = metadata.idle
        for spec in metadata.loads:
            self._order_load(spec)
        for spec in metadata.saves:
            self._order_save(spec)
        if metadata.timed and len(self._forwards) < _MAX_FORWARDS:
            # Last: what comes now is the forward.
            self._forwards.append(_Forward(metadata.timed, device=self._note_stream is not None))

    def start_load_kv(self) -> None:
        """Let the loader write to the blocks of the step's loads."""
        if self._note_stream is not None:
            self._compute_stream = self._note_stream()
        fresh, self._fresh_loads = self._fresh_loads, []
        for load in fresh:
            self._loads.put(load)

    def wait_for_save(self) -> None:
        """Copy out what the forward has computed."""
        if self._forwards:
            self._forwards[-1].end()
        # Also where vLLM had no reason to start loads: one must never stay behind.
        self.start_load_kv()
        orders, self._orders = self._orders, []
        if not orders:
            return
        deadline = time.monotonic() + self._config.store_timeout_ms / 1000
        for save in orders:
            try:
                self._copy_out(save, deadline)
            except Exception:
                self._stats.add("errors")
                self._log.warning("bug save", "a save failed", exc_info=True)
                self._abandon(save)
        self._finish_saves()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(None, requests whose load has ended since the last call).

        Nothing is ever reported as sent: blocks are kept by pinning instead.
        """
        patience_s = _IDLE_STEP_PATIENCE_S if self._idle_step else 0.0
        self._idle_step = False
        with self._lock:
            if patience_s and self._out:
                self._load_ended.wait_for(lambda: self._received, patience_s)
            received, self._received = self._received, set()
        return None, received or None

    def failed_requests(self, received: set[str]) -> set[str]:
        """Which of the requests that get_finished has just told vLLM shall start over with."""
        with self._lock:
            failed = self._failed_requests & received
            self._failed_requests -= failed
        return failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads should have filled and did not, since the last call."""
        with self._lock:
            invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def build_connector_worker_meta(self) -> LookasideWorkerMetadata | None:
        """The saves and timed forwards that are over and the loads that failed, since the last
        call."""
        self._finish_saves()
        with self._lock:
            failed, self._loads_failed = self._loads_failed, {}
        done, self._saves_done = self._saves_done, {}
        meta = LookasideWorkerMetadata(done, failed, self._timed_forwards())
        return None if meta.is_empty() else meta

    def _timed_forwards(self) -> dict[int, float]:
        """The forwards that are over, by step; each is told once."""
        told: dict[int, float] = {}
        while self._forwards:
            seconds = self._forwards[0].seconds()
            if seconds is None:
                break
            told[self._forwards.popleft().step] = seconds
        return told

    def clear_connector_metadata(self) -> None:
        """The step is over; nothing of it stays behind."""
        self.wait_for_save()

    # ---- saves ----

    def _order_save(self, spec: SaveSpec) -> None:
        """Ask for room. Whatever happens, the save is acknowledged in the end."""
        live, session = self._live, self._session
        pages = len(spec.hashes) // self._digest_bytes
        save: _Save | None = None
        try:
            exact = (
                len(spec.hashes) == pages * self._digest_bytes
                and len(self._rows(spec.block_ids)) == pages
            )
            if not pages or not exact or spec.first_page % self._pages_per_chunk:
                raise ValueError(f"save {spec.save_id} is malformed")
            if live is None or session is None or self._shut:
                raise SessionUnavailable("not connected")
            save = _Save(spec, live, [], time.monotonic())
            every, which = self._share if spec.divided else (1, 0)
            abort = functools.partial(self._abort_late, session, live.session_id)
            for start in range(0, pages, live.max_pages):
                end = min(start + live.max_pages, pages)
                first_chunk, last_chunk = (
                    (spec.first_page + page) // self._pages_per_chunk for page in (start, end - 1)
                )
                if (which - first_chunk) % every > last_chunk - first_chunk:
                    continue  # all of them are other ranks'
                size = self._digest_bytes
                prev = spec.hashes[(start - 1) * size : start * size] if start else spec.prev
                make = functools.partial(
                    _prepare_store,
                    first_page=spec.first_page + start,
                    prev=prev,
                    hashes=spec.hashes[start * size : end * size],
                    every=every,
                    which=which,
                )
                pending = session.submit(make, abort)
                save.pieces.append(
                    _Piece(range(spec.first_page + start, spec.first_page + end), pending)
                )
            if save.pieces:
                self._orders.append(save)
            else:
                self._acknowledge(spec)
        except Exception as error:
            if not isinstance(error, SessionUnavailable):
                self._stats.add("errors")
                self._log.warning("save", "a save could not be ordered: %s", error)
            if save is not None and save.pieces:
                self._orders.append(save)  # what was asked for is answered yet
            else:
                self._stats.add("save_failures")
                self._acknowledge(spec)

    @staticmethod
    def _abort_late(session: Session, session_id: int, reply: object) -> None:
        """Room that came too late is given back."""
        if isinstance(reply, wire.StoreGrant) and reply.store:
            session.send(wire.AbortStore(reply.store), session_id)

    def _copy_out(self, save: _Save, deadline: float) -> None:
        """Start copying one save into the room that it gets by the deadline."""
        blocks: list[np.ndarray] = []
        addresses: list[np.ndarray] = []
        failed = False
        rows = self._rows(save.spec.block_ids)
        # a page that is not held cannot be copied any more: what follows it could not be found
        gone = False
        hold = save.hold = save.live.regions.acquire()
        if hold is None:
            self._abandon(save)
            return
        held = True
        try:
            for piece in save.pieces:
                reply = piece.pending.wait(deadline - time.monotonic())
                if not isinstance(reply, wire.StoreGrant):
                    failed = True
                    if isinstance(reply, wire.Error):
                        self._log.warning(
                            f"store {reply.code}", "a store was refused: %s", reply.message
                        )
                    continue
                self._stats.add("shed_pages", reply.shed)
                if not reply.store:
                    continue
                bad: list[int] = []
                save.stores.append((reply.store, bad))
                for index, grant in enumerate(reply.grants):
                    try:
                        into = self._resolve(hold, piece.asked, grant, 0.0, write=True)
                    except RegionError as error:
                        self._log.warning("grant", "a grant cannot be used: %s", error)
                        bad.append(index)
                        continue
                    at = grant.page - save.spec.first_page
                    granted = rows[at : at + len(into)]
                    gone = gone or not self._are_whole(granted)
                    if gone:
                        bad.append(index)
                        continue
                    blocks.append(
                        np.where(granted == 0, ABSENT, granted) if self._states else granted
                    )
                    addresses.append(into)
                    save.pages += len(into)
            if failed:
                self._stats.add("save_failures")
            if not save.stores:
                self._acknowledge(save.spec)
                return
            if blocks:
                assert self._copies is not None
                save.ticket = self._copies.gather(np.concatenate(blocks), np.concatenate(addresses))
            self._copying.append(save)
            held = False  # _finish_saves releases
        finally:
            if held:
                save.hold = None
                hold.release()

    def _rows(self, block_ids: list[int]) -> np.ndarray:
        """The blocks of each page, [pages, columns]. Raises ValueError unless the pages are
        whole."""
        return np.asarray(block_ids, np.int64).reshape(-1, len(self._column_bytes))

    def _are_whole(self, rows: np.ndarray) -> bool:
        """Whether rows have all blocks of their page: those of attention, or one of a state."""
        if not self._states:
            return bool(rows.all())
        return bool(
            (rows[:, : -self._states].all(axis=1) | rows[:, -self._states :].any(axis=1)).all()
        )

    def _resolve(
        self, hold: Hold, asked: range, extent: wire.Extent, timeout_s: float, write: bool = False
    ) -> np.ndarray:
        """The arena addresses of an extent's pages. Raises RegionError for one that cannot be
        right."""
        page, pages = extent.page, extent.pages
        if pages < 1 or page < asked.start or page + pages > asked.stop:
            raise RegionError(f"pages [{page}, {page + pages}) were not asked for")
        base = hold.locate(extent.region, extent.offset, pages * self._page_bytes, timeout_s, write)
        return np.uint64(base) + np.arange(pages, dtype=np.uint64) * np.uint64(self._page_bytes)

    def _finish_saves(self) -> None:
        """Commit and acknowledge every save whose copy has ended."""
        if not self._copying:
            return
        session = self._session
        still: list[_Save] = []
        for save in self._copying:
            if save.ticket is not None and not save.ticket.done():
                still.append(save)
                continue
            error = save.ticket.error if save.ticket is not None else None
            if save.hold is not None:
                save.hold.release()
            for store, bad in save.stores:
                message = (
                    wire.CommitStore(store, tuple(bad)) if error is None else wire.AbortStore(store)
                )
                if session is not None:
                    session.send(message, save.live.session_id)
            if error is not None:
                self._stats.add("save_failures")
                self._log.warning("gather", "pages could not be copied out: %s", error)
            else:
                self._stats.add("save_bytes", save.pages * self._page_bytes)
                self._stats.observe("save_seconds", time.monotonic() - save.since)
            self._acknowledge(save.spec)
        self._copying = still

    def _abandon(self, save: _Save) -> None:
        """Give a save up before anything of it was copied."""
        for piece in save.pieces:
            reply = piece.pending.wait(0)
            if self._session is not None:
                self._abort_late(self._session, save.live.session_id, reply)
        self._stats.add("save_failures")
        self._acknowledge(save.spec)

    def _acknowledge(self, spec: SaveSpec) -> None:
        self._saves_done[spec.save_id] = 1

    # ---- loads ----

    def _order_load(self, spec: LoadSpec) -> None:
        """Take over the leases of a load counted in _out. Whatever happens, it is reported in the
        end."""
        try:
            live, session = self._live, self._session
            if live is None or session is None or self._shut:
                raise SessionUnavailable("not connected")
            pages = len(self._rows(spec.block_ids))
            if not pages or self._rank >= len(spec.refs):
                raise ValueError("nothing was leased for it")
            ref = spec.refs[self._rank]
            if not ref.session:
                raise ValueError("nothing was leased for it")
            now = time.monotonic()
            pending = session.submit(
                functools.partial(
                    _prepare_load,
                    ref=ref,
                    first_page=spec.first_page,
                    pages=pages,
                    names=spec.names,
                ),
                functools.partial(self._release_late, session, live.session_id),
            )
            timeout_s = self._config.load_timeout_ms / 1000
            self._fresh_loads.append(
                _Load(
                    spec,
                    live,
                    pending,
                    now,
                    grant_deadline=now + min(timeout_s, _GRANT_PATIENCE_S),
                    deadline=now + timeout_s,
                )
            )
        except Exception as error:
            self._report(spec, str(error))

    @staticmethod
    def _release_late(session: Session, session_id: int, reply: object) -> None:
        """Leases that came too late are given back."""
        if isinstance(reply, wire.LoadGrant) and reply.load:
            session.send(wire.Release(reply.load), session_id)

    def _report(self, spec: LoadSpec, error: str | None) -> None:
        """Record how a load ended, once no byte of it moves any more. Any thread."""
        with self._lock:
            aborted = spec.request_id in self._aborted
            if error is not None:
                self._failed.add(spec.request_id)
                if not (aborted or self._whole_failures):
                    # Before the request counts as received, or vLLM would use them.
                    self._invalid_blocks.update(block for block in spec.block_ids if block)
            left = self._out.get(spec.request_id, 1) - 1
            if left:
                self._out[spec.request_id] = left
            else:
                self._out.pop(spec.request_id, None)
                self._aborted.discard(spec.request_id)
                self._received.add(spec.request_id)
                self._load_ended.notify()
                if spec.request_id in self._failed:
                    self._failed.discard(spec.request_id)
                    if not aborted:
                        self._loads_failed[spec.request_id] = 1
                        if self._whole_failures:
                            self._failed_requests.add(spec.request_id)
        if error is None:
            self._stats.add("loads")
        elif not aborted:
            self._stats.add("load_failures")
            self._log.warning("load", "a prefix could not be loaded; vLLM computes it: %s", error)

    # ---- the loader's thread ----

    def _load_loop(self) -> None:
        """Brings loads from their grant to their report, several at a time."""
        use_all_cores()
        asked: list[_Load] = []  # waiting for their grant
        moving: list[_Load] = []  # being copied
        stopping = False
        while not (stopping and not asked and not moving):
            try:
                wait = not asked and not moving
                for load in self._arrived(wait):
                    if load is None:
                        stopping = True
                    else:
                        asked.append(load)
                if asked:
                    # One that is alone gets the thread's whole attention.
                    asked[0].pending.wait_done(_POLL_S if moving else 0.05)
                elif moving and moving[0].ticket is not None:
                    moving[0].ticket.wait(_POLL_S if len(moving) > 1 else 0.005)
                still: list[_Load] = []
                for load in asked:
                    if not load.pending.done and time.monotonic() < load.grant_deadline:
                        still.append(load)
                    elif self._begin(load):
                        moving.append(load)
                asked = still
                still = []
                for load in moving:
                    if load.ticket is not None and not load.ticket.done():
                        still.append(load)
                    else:
                        self._end(load)
                moving = still
            except Exception:
                # _begin and _end catch their own; this is the thread's last line.
                self._stats.add("errors")
                self._log.warning("bug loader", "the loader failed", exc_info=True)
                time.sleep(_POLL_S)

    def _arrived(self, wait: bool) -> list[_Load | None]:
        arrived: list[_Load | None] = []
        try:
            if wait:
                arrived.append(self._loads.get())
            while True:
                arrived.append(self._loads.get_nowait())
        except queue.Empty:
            return arrived

    def _begin(self, load: _Load) -> bool:
        """Start copying a load whose grant is in. False: it has ended, reported."""
        try:
            reply = load.pending.wait(0)
            if isinstance(reply, wire.Error):
                raise RegionError(f"{reply.code}: {reply.message}")
            if not isinstance(reply, wire.LoadGrant):
                raise RegionError("the sidecar did not answer in time")
            load.load = reply.load
            if reply.names != load.spec.names:
                raise RegionError("the sidecar granted other pages than were ordered")
            with self._lock:
                if load.spec.request_id in self._aborted:
                    raise RegionError("aborted")
            load.hold = load.live.regions.acquire()
            if load.hold is None:
                raise RegionError("the session was lost")
            blocks, addresses = self._sources(load, load.hold, reply.extents)
            assert self._copies is not None
            load.ticket = self._copies.scatter(blocks, addresses)
            return True
        except Exception as error:
            if load.hold is not None:
                load.hold.release()
            self._release(load)
            self._report(load.spec, str(error))
            return False

    def _sources(
        self, load: _Load, hold: Hold, extents: tuple[wire.Extent, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and where their bytes are. Raises unless the extents give exactly what was
        asked."""
        spec = load.spec
        rows = self._rows(spec.block_ids)
        pages = len(rows)
        asked = range(spec.first_page, spec.first_page + pages)
        addresses = np.zeros(pages, np.uint64)
        given = 0
        for extent in extents:
            source = self._resolve(hold, asked, extent, load.deadline - time.monotonic())
            load.sources.append((int(source[0]), int(source[-1]) + self._page_bytes))
            at = extent.page - spec.first_page
            if addresses[at : at + len(source)].any():
                raise RegionError("a page was granted twice")
            addresses[at : at + len(source)] = source
            given += len(source)
        if given != pages:
            raise RegionError(f"{given} of {pages} pages were granted")
        load.size = int((rows != 0).sum(axis=0) @ self._column_bytes)
        return np.where(rows == 0, ABSENT, rows), addresses

    def _end(self, load: _Load) -> None:
        """The copy of a load has ended: check, release, report."""
        assert load.ticket is not None and load.hold is not None and self._session is not None
        error = load.ticket.error
        try:
            if error is None and not self._session.is_current(load.live.session_id):
                error = "the session was lost during the copy"
            if error is None and time.monotonic() > load.deadline:
                error = "it took too long"
            load.hold.release()
            self._release(load, load.ticket.faults)
            if error is None:
                self._stats.add("load_bytes", load.size)
                self._stats.observe("load_seconds", time.monotonic() - load.since)
        except Exception as fault:
            error = error or str(fault)
        self._report(load.spec, error)

    def _release(self, load: _Load, faults: Collection[int] = ()) -> None:
        """Give the leases back; what lies at the addresses of faults is bad for good."""
        if load.load and self._session is not None:
            bad = tuple(
                index
                for index, (first, end) in enumerate(load.sources)
                if any(first <= fault < end for fault in faults)
            )
            self._session.send(wire.Release(load.load, bad), load.live.session_id)


def _prepare_store(
    request_id: int, first_page: int, prev: bytes, hashes: bytes, every: int, which: int
) -> wire.PrepareStore:
    return wire.PrepareStore(request_id, first_page, prev, hashes, every, which)


def _prepare_load(
    request_id: int, ref: wire.LeaseRef, first_page: int, pages: int, names: bytes
) -> wire.PrepareLoad:
    return wire.PrepareLoad(
        request_id, ref.session, ref.lookup, ref.ticket, first_page, pages, names
    )


def _place(vllm_config: VllmConfig, world: space.World) -> tuple[int, int]:
    """(tp_rank, pp_rank) of this worker."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pp_group().rank_in_group,
        )
    rank = vllm_config.parallel_config.rank % world.ranks
    return rank % world.tp_size, rank // world.tp_size


def _current_stream(device: torch.device) -> int:
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)
