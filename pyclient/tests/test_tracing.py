"""Spans, as an OTLP receiver in this process takes them from the SDK's exporter."""

from __future__ import annotations

import http.server
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from scheduling import BLOCK, Stand, make_config, tokens, write_model

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, queue.Queue[Any]]]:
    """A collector: its URL, and the spans that it gets."""
    spans: queue.Queue[Any] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        spans.put(span)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    server.shutdown()
    thread.join()
    server.server_close()


def stand_of(model: Any, endpoint: str) -> Stand:
    config = make_config(model)
    config.observability_config.otlp_traces_endpoint = endpoint
    return Stand(config)


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_spans_of_a_lookup_and_a_load(model, receiver):
    endpoint, spans = receiver
    stand = stand_of(model, endpoint)
    prompt = tokens(6 * BLOCK + 1)
    stand.add(prompt, max_tokens=1)  # without a trace: no spans
    stand.run()
    stand.forget_local()
    stand.sidecars.hold_answers = True
    before = time.time_ns()
    request = stand.add(prompt, trace_headers=HEADERS)
    (lookup,) = [each for each in stand.sidecars.lookups if each.request == request]
    lookup.took_us, lookup.began_us, lookup.sources = 700, 300, "arena 2, near disk 4"
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
        "lookaside.reason": "end",
        "lookaside.sidecar_us": 700,
    }
    assert attributes(promoted) == {"lookaside.pages.arena": 2, "lookaside.pages.near disk": 4}
    assert attributes(load)["lookaside.loaded_tokens"] == 6 * BLOCK
    assert attributes(load)["lookaside.reason"] == "end"


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
