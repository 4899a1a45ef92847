"""A collector of traces in this process: it takes spans as OTLP, over HTTP or gRPC."""

from __future__ import annotations

import contextlib
import http.server
import queue
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PROTOCOLS = ("grpc", "http/protobuf")


@dataclass
class Collector:
    """Where it is, and what it got."""

    protocol: str
    """One of PROTOCOLS; what OTEL_EXPORTER_OTLP_TRACES_PROTOCOL has to say."""
    endpoint: str = ""
    spans: queue.Queue[Span] = field(default_factory=queue.Queue)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Add what an exporter has sent."""
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put(span)


def attributes(span: Span) -> dict[str, Any]:
    """The attributes of a span; lists have strings alone."""
    found: dict[str, Any] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        assert kind is not None
        value = getattr(each.value, kind)
        found[each.key] = (
            [item.string_value for item in value.values] if kind == "array_value" else value
        )
    return found


@contextlib.contextmanager
def collecting(protocol: str) -> Iterator[Collector]:
    """Runs a collector on a port of its own."""
    collector = Collector(protocol)
    with (_over_grpc if protocol == "grpc" else _over_http)(collector):
        yield collector


@contextlib.contextmanager
def _over_grpc(collector: Collector) -> Iterator[None]:
    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


@contextlib.contextmanager
def _over_http(collector: Collector) -> Iterator[None]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
