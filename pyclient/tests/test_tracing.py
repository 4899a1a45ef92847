"""Spans, as an OTLP receiver in this process takes them from the SDK's exporter."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from lookaside import tracing
from scheduling import BLOCK, Stand, make_config, tokens

from pyclient.e2e.collector import PROTOCOLS, Collector, attributes, collecting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(params=PROTOCOLS)
def collector(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Collector]:
    with collecting(request.param) as collector:
        if request.param == "grpc":  # vLLM's own default
            monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
        else:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", request.param)
        yield collector


def stand_of(model: Any, endpoint: str) -> Stand:
    config = make_config(model)
    config.observability_config.otlp_traces_endpoint = endpoint
    return Stand(config)


def test_spans_of_a_lookup_and_a_load(model, collector):
    spans = collector.spans
    stand = stand_of(model, collector.endpoint)
    prompt = tokens(6 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)  # without a trace: no spans
    stand.run()
    stand.forget_local()
    stand.sidecars.hold_answers = True
    before = time.time_ns()
    request = stand.add(prompt, trace_headers=HEADERS)
    (lookup,) = [each for each in stand.sidecars.lookups if each.request == request]
    lookup.took_us, lookup.began_us, lookup.sources = 700, 300, "arena 2, near disk 4"
    lookup.page_bytes = 1 << 32
    stand.sidecars.answer(lookup)
    stand.run()
    stand.connector.shutdown()
    got: dict[str, Any] = {}
    while len(got) < 3:
        span = spans.get(timeout=60)
        got[span.name] = span
    assert spans.empty()
    assert set(got) == {"lookaside.lookup", "lookaside.promote", "lookaside.load"}
    asked, promoted, load = (got[f"lookaside.{x}"] for x in ("lookup", "promote", "load"))
    for span in got.values():
        assert span.trace_id.hex() == TRACE
        assert before <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert asked.parent_span_id.hex() == load.parent_span_id.hex() == PARENT
    assert promoted.parent_span_id == asked.span_id
    assert promoted.end_time_unix_nano - promoted.start_time_unix_nano == 400_000
    assert attributes(asked) == {
        "gen_ai.request.id": request,
        "lookaside.asked_tokens": 6 * BLOCK,
        "lookaside.found_tokens": 6 * BLOCK,
        "lookaside.found_bytes": 6 << 32,
        "lookaside.tiers": ["arena", "near disk"],
        "lookaside.reason": "end",
        "lookaside.sidecar_us": 700,
    }
    assert attributes(promoted) == {
        "lookaside.promoted_tokens": 4 * BLOCK,
        "lookaside.promoted_bytes": 4 << 32,
        "lookaside.tiers": ["near disk"],
        "lookaside.pages.arena": 2,
        "lookaside.pages.near disk": 4,
    }
    assert attributes(load) == {
        "gen_ai.request.id": request,
        "lookaside.loaded_tokens": 6 * BLOCK,
        "lookaside.loaded_bytes": 6 << 32,
        "lookaside.reason": "end",
    }


def test_a_miss_has_no_tier(model, collector):
    stand = stand_of(model, collector.endpoint)
    stand.add(tokens(2 * BLOCK + 1), max_tokens=1, trace_headers=HEADERS)
    stand.run()
    stand.connector.shutdown()
    missed = attributes(collector.spans.get(timeout=60))
    assert missed["lookaside.found_tokens"] == missed["lookaside.found_bytes"] == 0
    assert missed["lookaside.tiers"] == []
    assert collector.spans.empty()


def test_a_protocol_that_vllm_refuses(model, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    config = make_config(model)
    config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:1"
    assert tracing.begin(config, BLOCK) is None
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json" in caplog.text


def test_a_dead_collector_delays_nothing(model):
    """Nobody reads from the collector's socket. The engine goes on, and ends in time."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        stand = stand_of(model, f"http://127.0.0.1:{dead.getsockname()[1]}")
        prompt = tokens(2 * BLOCK + 1)
        for _ in range(3):
            stand.add(prompt, max_tokens=1, trace_headers=HEADERS)
            stand.run()
        begin = time.monotonic()
        stand.connector.shutdown()
        assert time.monotonic() - begin < 60
    stand.check_idle()


def test_without_an_endpoint_nothing_is_imported():
    code = (
        "import sys; import lookaside.tracing as t\n"
        "assert t.begin(object(), 16) is None\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
