"""The calls that vLLM makes of the worker role; the package's comment says what it promises."""

from __future__ import annotations

import functools
import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from lookaside import about, space
from lookaside.autostart import Autostart
from lookaside.config import Config
from lookaside.devices import make_copies
from lookaside.encoding import encode
from lookaside.handshake import SessionOptions
from lookaside.layout import PageLayout, UnsupportedLayout, build_layout
from lookaside.metadata import LoadSpec, LookasideMetadata, LookasideWorkerMetadata
from lookaside.places import Place, Whereabouts
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session
from lookaside.stats import Collector
from lookaside.worker.forwards import Forwards
from lookaside.worker.link import Link
from lookaside.worker.loads import Loads
from lookaside.worker.pages import Pages
from lookaside.worker.quiet import Quiet
from lookaside.worker.reports import Reports
from lookaside.worker.saves import Saves

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.lookaside")

# How long engine start waits for a sidecar that is there, and for one being started.
_START_PATIENCE_S = 5.0
_AUTOSTART_PATIENCE_S = 20.0
_SHUTDOWN_PATIENCE_S = 2.0


class WorkerConnector:
    """Wires the parts of the worker role together. Constructing it opens nothing."""

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
        log = RateLimitedLog(logger)
        self.link = Link(stats, log)
        self.saves = Saves(config, self.link, stats, log)
        self.reports = Reports(stats, log, space.is_hybrid(kv_cache_config))
        self.loads = Loads(config, self.link, stats, log, self.reports)
        self.quiet = Quiet(self.link, self.loads, self.saves, self.reports)
        self.forwards = Forwards()
        self._idle_step = False  # nothing is computed in this step
        self._whereabouts: Whereabouts | None = None  # None: all ranks are on one host
        self._epoch = config.weights_epoch  # of the session's space
        self._fields: dict[str, str] = {}  # of the space, without the epoch

        # The stream that vLLM computes on, by its handle. Torch names it to the main thread only,
        # and the loader's copies must come after what that stream was given.
        self._note_stream: Callable[[], int] | None = None
        self._compute_stream = 0

    # ---- life ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where the pages lie and connect. Called once, with the engine not yet serving.

        Without a sidecar that answers this takes no longer than with one: the session goes on
        trying in the background.
        """
        if self.link.session is not None or self.link.closed:
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
        page_bytes = layout.page_bytes
        layout, reason = encode(layout, self._config.compress, kv_caches)
        if reason is not None:
            logger.warning(
                "lookaside.compress=%s is ignored, and pages are kept as they are: %s",
                self._config.compress,
                reason,
            )
        elif layout.encoding is not None:
            logger.info(
                "pages are kept as %s: %d bytes instead of %d",
                self._config.compress,
                layout.page_bytes,
                page_bytes,
            )
        geometry, _ = space.geometry(self._config, self._vllm_config, self._kv_cache_config)
        if layout.page_tokens != geometry.page_tokens:
            logger.warning(
                "nothing is stored or loaded: a page has %d tokens in memory, %d in vLLM's "
                "scheduler",
                layout.page_tokens,
                geometry.page_tokens,
            )
            return
        world = space.world(self._vllm_config)
        place, pp_rank = _place(self._vllm_config, world)
        rank = self.loads.rank = pp_rank * world.stage_size + place
        self.link.pages = Pages(
            page_bytes=layout.page_bytes,
            column_bytes=np.array(layout.column_bytes, np.int64),
            states=layout.states,
            per_chunk=geometry.pages_per_chunk,
            digest_bytes=geometry.digest_bytes,
        )
        replicas = space.replicas(self._vllm_config, self._kv_cache_config)
        self.saves.share = (replicas, place % replicas)

        device = next(iter(kv_caches.values())).device
        if device.type == "cuda":
            self._note_stream = functools.partial(_current_stream, device)
        self.link.use(
            make_copies(
                layout,
                device,
                threads=self._config.load_threads,
                compute_stream=lambda: self._compute_stream,
            )
        )
        transfer: Any = self._vllm_config.kv_transfer_config
        engine_id = str(transfer.engine_id)
        fields = space.space_fields(
            self._vllm_config,
            place,
            pp_rank,
            heads=space.same_heads(self._vllm_config, self._kv_cache_config),
            engine_id=engine_id,
            geometry=geometry,
        )
        self._connect(layout, geometry, rank, world.dp_rank, engine_id, fields)

    def _connect(
        self,
        layout: PageLayout,
        geometry: space.Geometry,
        rank: int,
        dp_rank: int,
        engine_id: str,
        fields: dict[str, str],
    ) -> None:
        """Start the session, and wait for it a little."""
        endpoint = self._config.endpoint_for(rank, dp_rank)
        self._fields = {**layout.description, **fields}
        autostart: Autostart | None = None
        if self._config.autostart:
            arguments = self._config.sidecar_arguments(rank, dp_rank)
            autostart = Autostart(self._config.binary, endpoint, arguments)
        session = Session(
            SessionOptions(
                endpoint=endpoint,
                role="worker",
                engine_id=engine_id,
                rank=rank,
                page_tokens=geometry.page_tokens,
                page_bytes=layout.page_bytes,
                pages_per_chunk=geometry.pages_per_chunk,
                digest_bytes=geometry.digest_bytes,
                fields=space.with_epoch(self._fields, self._epoch),
                about=about.of_engine(self._config, self._vllm_config, self._kv_cache_config),
            ),
            on_absent=autostart.ensure if autostart is not None else None,
            held=self.link.mappings.held,
        )
        session.subscribe(self.link)
        if space.may_span_hosts(self._vllm_config):
            self._whereabouts = Whereabouts(rank, endpoint, _host())
            session.subscribe(self._whereabouts)
        self.link.session = session
        self.loads.run()
        session.start()
        if session.wait_settled(_START_PATIENCE_S) or autostart is None:
            return
        deadline = time.monotonic() + _AUTOSTART_PATIENCE_S
        if autostart.wait(_AUTOSTART_PATIENCE_S) and not session.wait_connected(
            max(0.0, deadline - time.monotonic())
        ):
            logger.warning(
                "lookaside: the sidecar on %s, which autostart starts, does not answer yet; "
                "serving without it until it does",
                endpoint,
            )

    def shutdown(self) -> None:
        """Finish what is being copied and end the session. Safe to call again."""
        if self.link.closed:
            return
        self.link.closed = True
        deadline = time.monotonic() + _SHUTDOWN_PATIENCE_S
        self.saves.drain(deadline)
        self.loads.stop(deadline)
        if self.link.session is not None:
            self.link.session.close(_SHUTDOWN_PATIENCE_S)
        self.link.close()
        if self.link.copies is not None:
            self.link.copies.close()
        # Copies that have ended since still hold their memory.
        self.saves.finish()

    def quiesce(self) -> None:
        """End all copies: vLLM takes the KV cache's memory away, to sleep. Safe to call again."""
        self.quiet.begin()

    def resume(self) -> None:
        """The KV cache is back where it was; what was in it is gone. Safe to call again."""
        self.quiet.end()

    # ---- a step, on the main thread ----

    def handle_preemptions(self, argument: object) -> None:
        """Nothing, whether vLLM gives the step's metadata or, as older ones, request ids.

        The blocks of a save are pinned until it is acknowledged, and those of a load are held until
        it is reported: no forward can overwrite either.
        """

    def bind_connector_metadata(self, metadata: object) -> None:
        """Begin the step's loads, and send its other questions to the sidecar."""
        if not isinstance(metadata, LookasideMetadata):
            return
        # With speculation vLLM's V1 runner ends the step on the last rank of a pipeline alone.
        self._note_compute_stream()
        self.saves.copy_out()
        if metadata.epoch is not None and metadata.epoch != self._epoch:
            self._move(metadata.epoch)
        self.reports.expect(metadata.loads, metadata.aborted)
        self._idle_step = metadata.idle
        if metadata.loads:
            self._order_loads(metadata.loads)
        for save in metadata.saves:
            self.saves.order(save)
        if metadata.timed:
            # Last: what comes now is the forward.
            self.forwards.begin(metadata.timed, device=self._note_stream is not None)

    def _move(self, epoch: str) -> None:
        """Go on in the space of another epoch of weights. Copies under way are of the old one."""
        self._epoch = epoch
        self.saves.finish()
        if self.link.session is not None:
            self.link.session.move(space.with_epoch(self._fields, epoch))

    def _order_loads(self, specs: list[LoadSpec]) -> None:
        """Begin loads, whose bytes may move from here on; the package's comment says why."""
        self._note_compute_stream()
        copies = self.link.copies
        mark = copies.mark() if copies is not None else None
        for spec in specs:
            self.loads.order(spec, mark)

    def _note_compute_stream(self) -> None:
        if self._note_stream is not None:
            self._compute_stream = self._note_stream()

    def start_load_kv(self) -> None:
        """Carry out the loads that the step's forward needs. The others have begun."""
        self.loads.load_now()

    def wait_for_save(self) -> None:
        """Copy out what the forward has computed."""
        self.forwards.end()
        self.loads.give_up_in_step()
        self._note_compute_stream()
        self.saves.copy_out()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return (None, the requests whose load has ended since the last call).

        Nothing is ever reported as sent: blocks are kept by pinning instead.
        """
        idle, self._idle_step = self._idle_step, False
        return None, self.reports.take_received(idle) or None

    def failed_requests(self, received: set[str]) -> set[str]:
        """Return which of the requests that get_finished has just returned vLLM shall start over
        with."""
        return self.reports.take_failed_requests(received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads should have filled and did not, since the last call."""
        return self.reports.take_invalid_blocks()

    def build_connector_worker_meta(self) -> LookasideWorkerMetadata | None:
        """Return the saves and timed forwards that are over and the loads that failed, since the
        last call."""
        self.saves.finish()
        failures = self.reports.take_failures()
        meta = LookasideWorkerMetadata(
            self.saves.take_done(),
            failures,
            self.forwards.take(),
            self.reports.take_copies(),
            self.places(),
        )
        return None if meta.is_empty() else meta

    def places(self) -> dict[int, Place]:
        """Return where this rank's sidecar is, if ranks may be on several hosts and it is not what
        was returned last."""
        return self._whereabouts.take() if self._whereabouts is not None else {}

    def clear_connector_metadata(self) -> None:
        """End the step; nothing of it stays behind."""
        self.wait_for_save()


def _place(vllm_config: VllmConfig, world: space.World) -> tuple[int, int]:
    """Return (place, pp_rank) of this worker; see space.World."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        pcp_rank = parallel_state.get_pcp_group().rank_in_group if world.pcp_size > 1 else 0
        return (
            pcp_rank * world.tp_size + parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pp_group().rank_in_group,
        )
    rank = vllm_config.parallel_config.rank % world.ranks
    return rank % world.stage_size, rank // world.stage_size


def _host() -> str:
    """Return this host's address, as vLLM has it (VLLM_HOST_IP)."""
    from vllm.utils.network_utils import get_ip

    address = get_ip()
    return socket.gethostname() if address == "0.0.0.0" else address


def _current_stream(device: torch.device) -> int:
    import torch

    return torch.cuda.current_stream(device).cuda_stream
