"""The class that vLLM loads: ``LookasideConnector``.

A facade: it holds one scheduler or one worker object and delegates every call to it. It adds that
no exception leaves it, because any exception in a connector kills the engine. A failing call is
logged once per kind and counted, and returns what costs least (no hit, not saved, load failed).

vLLM imports this module in its API process too, for statistics. Importing it connects to nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from lookaside import interface

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
except ImportError as error:
    try:
        from vllm import __version__ as _found
    except ImportError:
        _found = "none"
    raise ImportError(
        f"lookaside needs vLLM {interface.TESTED[0]} to {interface.TESTED[1]}; found vLLM {_found},"
        f" which does not do: {error}"
    ) from error

from lookaside import config as settings
from lookaside import sleeping, space
from lookaside.calltimes import CallTimes
from lookaside.metadata import LookasideHandshake, LookasideMetadata
from lookaside.places import Place
from lookaside.stats import Collector, LookasidePromMetrics, LookasideStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lookaside.scheduler import SchedulerConnector
    from lookaside.scheduler.epochs import Epochs
    from lookaside.worker import WorkerConnector

logger = logging.getLogger("vllm.lookaside")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _contained(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Let no exception out of a method; return default() instead."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: LookasideConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._contain(method.__name__, error)
                return default()

        return call  # type: ignore[return-value]

    return decorate


def _timed(default: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """As _contained, for a call that vLLM makes within its steps: record how long it takes."""

    def decorate(method: _Method) -> _Method:
        contained = _contained(default)(method)

        @functools.wraps(method)
        def call(self: LookasideConnector, *args: Any, **kwargs: Any) -> Any:
            times = self._call_times
            begin = times.clock()
            try:
                return contained(self, *args, **kwargs)
            finally:
                times.add(method.__name__, times.clock() - begin)

        return call  # type: ignore[return-value]

    return decorate


def _nothing() -> None:
    return None


def _is_vllms_command() -> bool:
    """Report whether this process is vLLM's own command.

    An error's message then says more to its user than its traceback.
    """
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return (spec is not None and spec.name.startswith("vllm.")) or os.path.basename(
        sys.argv[0]
    ) == "vllm"


class LookasideConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares every prefix of a model through the sidecars of its ranks.

    Set in ``--kv-transfer-config`` as ``kv_connector`` with
    ``kv_connector_module_path`` "lookaside.connector" and ``kv_role`` "kv_both", or
    "kv_producer" and "kv_consumer" for an instance that only stores or only loads.
    """

    unknown_methods: frozenset[str]
    """Abstract methods of vLLM's base class that are not implemented here."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raise config.ConfigError for settings that cannot be used.

        Nothing about the sidecar raises here: the role connects to it in the background.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        self._seen: set[tuple[str, str]] = set()
        self._seen_lock = threading.Lock()
        self._stats = Collector()
        self._call_times = CallTimes(
            "scheduler" if role == KVConnectorRole.SCHEDULER else "worker", self._stats
        )
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None

        config = settings.parse(self._kv_transfer_config.kv_connector_extra_config)
        is_scheduler = role == KVConnectorRole.SCHEDULER
        idle = interface.idle_reason(type(self)) or space.idle_reason(vllm_config, kv_cache_config)
        if idle is not None:
            if is_scheduler:
                logger.warning("lookaside: idle, nothing is stored or loaded: %s", idle)
            return
        self._recompute_failed_loads(is_scheduler)
        if is_scheduler:
            self._warn(config, vllm_config, kv_cache_config)
            from lookaside.scheduler import SchedulerConnector
            from lookaside.sidecars import RankSidecars

            sidecars = RankSidecars(config, vllm_config, kv_cache_config, self._stats)
            self._scheduler = SchedulerConnector(
                config, vllm_config, kv_cache_config, sidecars, self._stats
            )
            sidecars.connect()
        else:
            from lookaside.worker import WorkerConnector

            self._worker = WorkerConnector(config, vllm_config, kv_cache_config, self._stats)
            sleeping.follow(vllm_config)

    def _warn(
        self, config: settings.Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        """Log once what the user should know or change, in one of the roles."""
        for note in interface.notes():
            logger.info("lookaside: %s", note)
        _, adjusted = space.geometry(config, vllm_config, kv_cache_config)
        for warning in (adjusted, space.hash_warning(vllm_config)):
            if warning is not None:
                logger.warning("lookaside: %s", warning)

    def _recompute_failed_loads(self, told: bool) -> None:
        """Make vLLM compute what fails to load. Log it if told is true.

        Its default is to end such a request with an error, which no cache may cause. vLLM's
        scheduler reads the policy from this very object after it has made the connector. Under
        MultiConnector the policy is everybody's, and the user's to set. The child's own policy has
        no effect then; it is set to everybody's, which the sidecar is told (about.py).
        """
        transfer = self._kv_transfer_config
        multi = _multi_connectors_transfer()
        if multi is not None and hasattr(multi, _POLICY):
            setattr(transfer, _POLICY, getattr(multi, _POLICY))
        if getattr(transfer if multi is None else multi, _POLICY, "recompute") == "recompute":
            return
        if multi is None:
            setattr(transfer, _POLICY, "recompute")
            if told:
                logger.info("lookaside: what fails to load is computed (%s: recompute)", _POLICY)
            return
        if not told:
            return
        logger.warning(
            "lookaside: %s=%s makes vLLM fail a request whose load failed; add"
            ' "%s": "recompute" beside "kv_connector": "MultiConnector" in --kv-transfer-config so'
            " that it is computed instead",
            _POLICY,
            getattr(multi, _POLICY),
            _POLICY,
        )

    def _contain(self, method: str, error: Exception) -> None:
        """Count an exception, and log the first of its kind."""
        kind = (method, type(error).__name__)
        self._stats.add("errors")
        with self._seen_lock:
            if kind in self._seen:
                return
            self._seen.add(kind)
        logger.error(
            "lookaside: %s failed; vLLM goes on without it (logged once per kind)",
            method,
            exc_info=error,
        )

    @property
    def lookaside_epochs(self) -> Epochs | None:
        """What is to be told of calls that may change weights (enginecalls.py)."""
        return None if self._scheduler is None else self._scheduler.epochs

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss, no more."""
        return False

    # ---- scheduler role ----

    @_contained(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self._scheduler is not None:
            self._scheduler.bind_gpu_block_pool(gpu_block_pool)

    @_timed(_nothing)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    @_timed(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    @_timed(_nothing)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    @_timed(LookasideMetadata)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._scheduler is None:
            return LookasideMetadata()
        self._call_times.end_step(scheduler_output.total_num_scheduled_tokens > 0)
        return self._scheduler.build_connector_meta(scheduler_output)

    @_timed(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @_timed(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Never True: blocks being saved are pinned, and vLLM itself holds those being loaded.
        return False, None if self._scheduler is None else self._scheduler.request_finished(
            request, block_ids
        )

    @_contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_push_work()

    @_contained(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_block_frees()

    @_contained(lambda: False)
    def reset_cache(self) -> bool | None:
        # An idle connector holds nothing, so that it is reset already.
        return True if self._scheduler is None else self._scheduler.reset_cache()

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Return that all hits come from host memory. Called by vLLM 0.32 and later."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @_contained(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        """Learn from the workers where their sidecars are. Under MultiConnector the metadata may be
        another connector's."""
        if self._scheduler is None:
            return
        places: dict[int, Place] = {}
        for each in metadata.values():
            if isinstance(each, LookasideHandshake):
                places.update(each.places)
        self._scheduler.learn(places)

    # ---- worker role ----

    @_contained(_nothing)
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return where this rank's sidecar is, if ranks may be on several hosts.

        MultiConnector passes the first metadata of its connectors to all of them, and others would
        take ours for their own. There the scheduler learns it with the first step.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        if self._worker is None or get_kv_transfer_group() is not self:
            return None
        places = self._worker.places()
        return LookasideHandshake(places) if places else None

    @_contained(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._worker.register_kv_caches(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: no copy touches the KV cache between unregister_kv_caches and restore_kv_caches,
        and addresses are the same after them. Called by vLLM 0.33 and later."""
        return True

    def unregister_kv_caches(self) -> None:
        """End all copies, because vLLM takes the KV cache's memory away. Safe to call again.

        Called by vLLM 0.33 and later, and before that by sleeping.py. If it raises, vLLM does not
        go to sleep. That is better than a copy to memory that is gone.
        """
        if self._worker is not None:
            self._worker.quiesce()

    @_contained(_nothing)
    def restore_kv_caches(self) -> None:
        """Let copies begin again: the KV cache is back. Called as unregister_kv_caches is."""
        if self._worker is not None:
            self._worker.resume()

    @_timed(_nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            self._worker.handle_preemptions(kv_connector_metadata)

    @_timed(_nothing)
    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.bind_connector_metadata(connector_metadata)

    @_timed(_nothing)
    def clear_connector_metadata(self) -> None:
        metadata = self._connector_metadata
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.clear_connector_metadata()
            self._call_times.end_step(isinstance(metadata, LookasideMetadata) and not metadata.idle)

    @_timed(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, and whole before their request runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages are saved whole, after the forward."""

    @_timed(_nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.wait_for_save()

    @_timed(lambda: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return self._worker.get_finished(finished_req_ids)

    @_timed(lambda: base.KVConnectorTransferResults())
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what get_finished does, and which loads failed as a whole.

        Called by vLLM 0.30 and later, in place of get_finished.
        """
        results = base.KVConnectorTransferResults()
        if self._worker is not None:
            _, received = self._worker.get_finished(finished_req_ids)
            results.finished_recving = received or set()
            results.failed_recving = self._worker.failed_requests(results.finished_recving)
        return results

    @_timed(lambda: set())
    def get_block_ids_with_load_errors(self) -> set[int]:
        if self._worker is None:
            return set()
        return self._worker.get_block_ids_with_load_errors()

    @_timed(_nothing)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.build_connector_worker_meta()

    # ---- both roles ----

    @_contained(_nothing)
    def shutdown(self) -> None:
        """End the sessions; the sidecars free what was held. Safe to call again."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @_contained(_nothing)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._stats.take()

    @_timed(tuple)
    def take_events(self) -> Iterable[Any]:
        """Return events of blocks that the sidecars of all ranks hold, or hold no more (medium
        CPU)."""
        return () if self._scheduler is None else self._scheduler.take_events()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: nothing is copied layer by layer. Refuses settings that cannot be used."""
        try:
            settings.parse(extra_config)
        except settings.ConfigError as error:
            if _is_vllms_command():
                raise SystemExit(f"lookaside: {error}") from None
            raise
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return LookasideStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return LookasidePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# Methods that a newer vLLM wants every connector to have, and this one lacks. Python would refuse
# to make the connector, and vLLM would not start. It is made and stays idle instead (interface.py).
LookasideConnector.unknown_methods = LookasideConnector.__abstractmethods__
LookasideConnector.__abstractmethods__ = frozenset()


_POLICY = "kv_load_failure_policy"


def _multi_connectors_transfer() -> Any:
    """Return the configuration of the MultiConnector that is making this connector, or None.

    It gives its children configurations of their own. vLLM reads the policy from that one.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith(".multi_connector"):
            config = frame.f_locals.get("vllm_config")
            if config is not None:
                return config.kv_transfer_config
        frame = frame.f_back
    return None


def _check_early() -> None:
    """Refuse bad settings while vLLM still validates its configuration, before it loads a model.

    vLLM shows a connector its settings at that time only where it captures whole CUDA graphs
    (requires_piecewise_for_cudagraph). But it always imports this module then, from its factory,
    which has the settings in a local variable. Where that variable is missing, the settings are
    checked when the connector is made, as vLLM means it. A bad one then ends under "Engine core
    initialization failed", minutes later.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == KVConnectorFactory.__module__:
            transfer = frame.f_locals.get("kv_transfer_config")
            if transfer is not None:
                LookasideConnector.requires_piecewise_for_cudagraph(
                    transfer.kv_connector_extra_config
                )
                return
        frame = frame.f_back


_check_early()

# Under MultiConnector the front end finds a child's statistics by the name of
# its class alone, without the module path that the child was loaded from.
if LookasideConnector.__name__ not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(
        LookasideConnector.__name__, __name__, LookasideConnector.__name__
    )
