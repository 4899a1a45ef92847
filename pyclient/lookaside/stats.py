"""What the connector counts, and how vLLM logs and exports it.

Both roles collect into a ``Collector``. vLLM drains it every step, adds up what the ranks and the
scheduler counted and hands the sum to the front end. That logs ``reduce`` and feeds
``LookasidePromMetrics``. Nothing here connects or waits.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: dict[str, str] = {
    "query_tokens": "Tokens asked for, beyond vLLM's own prefix cache.",
    "hit_tokens": "Tokens that vLLM accepted to load.",
    "lookups": "Lookups sent.",
    "lookup_timeouts": "Lookups without an answer at their deadline, counted as misses.",
    "lookups_promoted": "Lookups that had to wait for a tier below the sidecars' memory.",
    "lookups_unasked": (
        "Lookups that were misses because a rank's sidecar was absent, lost, or did not answer "
        "before."
    ),
    "hits_expired": (
        "Hits not used, because their lease could have ended before the load; counted as misses."
    ),
    "promises_broken": (
        "Requests handed over by a prefiller whose pages were not all there in time."
    ),
    "loads": "Requests whose load finished, once a rank.",
    "loads_in_step": "Those of them that were loaded within the step that computed them.",
    "load_failures": "Requests whose load failed, once a rank; vLLM computes them.",
    "load_bytes": "Bytes copied from the arena into the KV cache.",
    "saves": "Saves handed to the workers, once for all ranks.",
    "save_failures": "Saves that a rank could not carry out.",
    "save_bytes": "Bytes copied from the KV cache into the arena.",
    "shed_pages": "Pages that the sidecar had no room for.",
    "unfit_pages": "Pages that lookaside.compress cannot encode, which are not stored.",
    "regions_mapped": "Regions of the sidecar's arena that a worker mapped, and pinned for a GPU.",
    "regions_kept": "Regions that it had mapped already, in an earlier session.",
    "mapped_bytes": "Bytes of the regions that were mapped.",
    "kept_bytes": "Bytes of the regions that were mapped already.",
    "hints": "Hints that requests had, by their name.",
    "hints_ignored": "Hints that were left out, by the reason.",
    "epochs": "Times that vLLM went on with other weights, in another space.",
    "errors": "Failures inside the connector that were turned into misses.",
}
"""Counter name to its meaning; the names are the keys of the statistics."""

GAUGES: dict[str, str] = {
    "prefill_tokens_per_second": (
        "How fast vLLM computes prompts, as sidecars are told; absent until it is known."
    ),
}
"""Gauge name to its meaning; of several values the newest counts."""

LABELLED: dict[str, str] = {"call_seconds": "call", "hints": "hint", "hints_ignored": "reason"}
"""Counter or histogram name to the label that it has of its own. What is counted or observed is
named NAME:VALUE."""

HISTOGRAMS: dict[str, str] = {
    "lookup_seconds": "Time from sending a lookup to using its answer.",
    "lookup_wait_seconds": "Time that a call of the scheduler waited for a lookup's answer.",
    "load_seconds": "Time that a load took in a worker.",
    "call_seconds": "Time that one of vLLM's calls of the connector took, by its name.",
    "weights_seconds": "Time that it took to compare the weights, while vLLM waited.",
    "save_seconds": "Time that a save took in a worker, waiting for room included.",
}

_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip

# Observations kept between two drains; more are counted but not timed.
_OBSERVATIONS = 1024


@dataclass
class LookasideStats(KVConnectorStats):
    """One interval's counts: name to number, and name to a list of seconds."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the other's counts to these."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = (self.data.get(name, []) + value)[:_OBSERVATIONS]
            elif name in GAUGES:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts, and each time's median and worst in milliseconds."""
        out: dict[str, int | float] = {}
        for name, value in self.data.items():
            if not isinstance(value, list):
                out[name] = value
            elif value:
                ordered = sorted(value)
                base = name.replace("_seconds", "").replace(":", "_")
                out[f"{base}_p50_ms"] = round(ordered[len(ordered) // 2] * 1e3, 3)
                out[f"{base}_max_ms"] = round(ordered[-1] * 1e3, 3)
        return out

    def is_empty(self) -> bool:
        """Report whether nothing was counted."""
        return not self.data


class Collector:
    """Counts between two drains; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int | float] = {}  # guarded by _lock; gauges, too
        self._times: dict[str, list[float]] = {}  # guarded by _lock

    def add(self, name: str, count: int = 1) -> None:
        """Add to a counter of COUNTERS, or to one of its labels: NAME:VALUE."""
        if count:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + count

    def set(self, name: str, value: float) -> None:
        """Set a gauge of GAUGES."""
        with self._lock:
            self._counts[name] = value

    def observe(self, name: str, seconds: float) -> None:
        """Record a time for a histogram of HISTOGRAMS."""
        with self._lock:
            times = self._times.setdefault(name, [])
            if len(times) < _OBSERVATIONS:
                times.append(seconds)

    def take(self) -> LookasideStats | None:
        """Return what was counted since the last call, or None."""
        with self._lock:
            if not self._counts and not self._times:
                return None
            data: dict[str, Any] = {**self._counts, **self._times}
            self._counts, self._times = {}, {}
        return LookasideStats(data=data)


def _own_label(name: str) -> list[str]:
    return [LABELLED[name]] if name in LABELLED else []


class LookasidePromMetrics(KVConnectorPromMetrics):
    """``vllm:lookaside_*`` in vLLM's own Prometheus registry."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        histogram: Any = self._histogram_cls  # typed as if it were any metric
        for name, meaning in COUNTERS.items():
            self._metrics[name] = self._counter_cls(
                name=f"vllm:lookaside_{name}",
                documentation=meaning,
                labelnames=[*labelnames, *_own_label(name)],
            )
        gauge: Any = self._gauge_cls
        for name, meaning in GAUGES.items():
            self._metrics[name] = gauge(
                name=f"vllm:lookaside_{name}",
                documentation=meaning,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
        for name, meaning in HISTOGRAMS.items():
            self._metrics[name] = histogram(
                name=f"vllm:lookaside_{name}",
                documentation=meaning,
                buckets=_BUCKETS,
                labelnames=[*labelnames, *_own_label(name)],
            )
        self._children: dict[tuple[int, str], Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's statistics; unknown names are left out."""
        for name, value in transfer_stats_data.items():
            base, _, own = name.partition(":")
            metric = self._metrics.get(base)
            if metric is None or bool(own) != (base in LABELLED):
                continue
            child = self._children.get((engine_idx, name))
            if child is None:
                values = [*self.per_engine_labelvalues[engine_idx], *([own] if own else [])]
                child = metric.labels(*values)
                self._children[engine_idx, name] = child
            if isinstance(value, list):
                for seconds in value:
                    child.observe(seconds)
            elif name in GAUGES:
                child.set(value)
            else:
                child.inc(value)
