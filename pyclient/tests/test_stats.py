"""Statistics on their way through vLLM, and the metadata that ranks fold."""

from __future__ import annotations

import threading

from lookaside.connector import LookasideConnector
from lookaside.metadata import LookasideMetadata, LookasideWorkerMetadata
from lookaside.stats import COUNTERS, GAUGES, HISTOGRAMS, Collector, LookasideStats
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from scheduling import make_config


def test_collector_is_drained_and_fresh():
    collector = Collector()
    assert collector.take() is None
    collector.add("saves", 0)
    assert collector.take() is None
    collector.add("saves")
    collector.add("saves", 2)
    collector.observe("lookup_seconds", 0.002)
    stats = collector.take()
    assert stats is not None and stats.data == {"saves": 3, "lookup_seconds": [0.002]}
    assert collector.take() is None


def test_collector_counts_for_several_threads():
    collector = Collector()

    def count():
        for _ in range(2000):
            collector.add("loads")
            collector.observe("load_seconds", 0.1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = collector.take()
    assert stats is not None and stats.data["loads"] == 8000
    assert len(stats.data["load_seconds"]) == 1024, "bounded"


def test_the_newest_value_of_a_gauge_counts(model):
    collector = Collector()
    collector.set("prefill_tokens_per_second", 100.0)
    collector.set("prefill_tokens_per_second", 200.0)
    stats = collector.take()
    assert stats is not None and stats.data == {"prefill_tokens_per_second": 200.0}
    total = stats.aggregate(LookasideStats(data={"prefill_tokens_per_second": 150.0, "saves": 1}))
    assert total.aggregate(LookasideStats(data={"saves": 1})).reduce() == {
        "prefill_tokens_per_second": 150.0,
        "saves": 2,
    }
    assert collector.take() is None


def test_ranks_and_intervals_add_up():
    one = LookasideStats(data={"saves": 1, "save_seconds": [0.001, 0.009]})
    other = LookasideStats(data={"saves": 2, "loads": 1, "save_seconds": [0.003]})
    total = one.aggregate(other)
    assert total.reduce() == {"saves": 3, "loads": 1, "save_p50_ms": 3.0, "save_max_ms": 9.0}
    assert other.data == {"saves": 2, "loads": 1, "save_seconds": [0.003]}
    assert not total.is_empty() and LookasideStats().is_empty()
    total.reset()
    assert total.is_empty()


def test_the_front_end_rebuilds_them():
    rebuilt = LookasideConnector.build_kv_connector_stats({"hit_tokens": 5})
    assert isinstance(rebuilt, LookasideStats) and rebuilt.reduce() == {"hit_tokens": 5}
    empty = LookasideConnector.build_kv_connector_stats()
    assert empty is not None and empty.is_empty()


def test_prometheus(model):
    registry = CollectorRegistry()

    def registered(kind):
        return lambda **kwargs: kind(registry=registry, **kwargs)

    prom = LookasideConnector.build_prom_metrics(
        make_config(model),
        {Counter: registered(Counter), Gauge: registered(Gauge), Histogram: registered(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    assert prom is not None
    prom.observe({"hit_tokens": 7, "lookup_seconds": [0.001, 0.3], "of a later version": 1}, 1)
    prom.observe({"hit_tokens": 3}, 1)
    prom.observe({"call_seconds:wait_for_save": [0.01, 0.02], "call_seconds": [9.0]})
    prom.observe({"errors": 1, "prefill_tokens_per_second": 5000.0})
    prom.observe({"prefill_tokens_per_second": 4000.0})

    def value(name, engine):
        return registry.get_sample_value(name, {"model_name": "m", "engine": engine})

    assert value("vllm:lookaside_hit_tokens_total", "1") == 10
    assert value("vllm:lookaside_lookup_seconds_count", "1") == 2
    assert value("vllm:lookaside_errors_total", "0") == 1
    labels = {"model_name": "m", "engine": "0", "call": "wait_for_save"}
    assert registry.get_sample_value("vllm:lookaside_call_seconds_count", labels) == 2
    assert value("vllm:lookaside_prefill_tokens_per_second", "0") == 4000
    families = {family.name for family in registry.collect()}
    assert families == {f"vllm:lookaside_{name}" for name in [*COUNTERS, *GAUGES, *HISTOGRAMS]}


def test_worker_metadata_adds_up():
    one = LookasideWorkerMetadata({1: 1, 2: 1}, {"a": 1}, {7: 0.1, 8: 0.3})
    other = LookasideWorkerMetadata({2: 1, 3: 1}, {"b": 1}, {8: 0.2, 9: 0.4})
    both = LookasideWorkerMetadata({1: 1, 2: 2, 3: 1}, {"a": 1, "b": 1}, {7: 0.1, 8: 0.3, 9: 0.4})
    assert one.aggregate(other) == other.aggregate(one) == both, "the slowest rank's forward counts"
    assert one == LookasideWorkerMetadata({1: 1, 2: 1}, {"a": 1}, {7: 0.1, 8: 0.3})
    assert not LookasideWorkerMetadata(forward_seconds={1: 0.1}).is_empty()
    assert LookasideWorkerMetadata().is_empty() and not one.is_empty()
    assert LookasideMetadata().is_empty() and not LookasideMetadata(aborted=["a"]).is_empty()
