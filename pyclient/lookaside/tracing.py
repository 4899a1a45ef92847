"""Spans of lookups and loads, joined to vLLM's trace of the request.

vLLM passes on the trace context of a client's request (the headers traceparent and tracestate) if
it exports traces itself (--otlp-traces-endpoint). Then spans go to the same endpoint, by the SDK of
OpenTelemetry: ``lookaside.lookup`` from the question to the answer, ``lookaside.promote`` below it
where a sidecar brought pages up from tiers or peers, and ``lookaside.load`` from the order to the
end of the copies. Times are the scheduler's, but those of a promotion, which the sidecar told.

Without an endpoint nothing is imported and nothing is done; a request without a context costs one
comparison. Spans are exported by a thread of the SDK's, from a bounded queue: what a dead or slow
collector does not take is dropped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from lookaside import wire

logger = logging.getLogger(__name__)

_QUEUE = 2048  # spans that wait for the collector
_TIMEOUT_S = 2.0


class Answered(Protocol):
    """What a lookup's span tells; see lookups.Lookup."""

    reason: int
    took_us: int
    began_us: int
    sources: str
    late: bool
    page_bytes: int


class Tracer:
    """Makes spans. For the scheduler's thread alone; no method blocks or raises."""

    def __init__(self, endpoint: str, page_tokens: int) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        exporter: Any
        # As vLLM's own exporter: it takes no other variable for this, and no other protocol.
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
        if protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
        elif protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
                OTLPSpanExporter as GrpcExporter,
            )

            exporter = GrpcExporter(endpoint=endpoint, insecure=True, timeout=_TIMEOUT_S)
        else:
            raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL={protocol} is not known")
        # A provider of its own: vLLM's global one stays as it is.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "lookaside"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE, schedule_delay_millis=1000)
        )
        self._tracer = self._provider.get_tracer("lookaside")
        self._extract = TraceContextTextMapPropagator().extract
        self._page = page_tokens

    def lookup(
        self,
        request_id: str,
        headers: Mapping[str, str],
        lookup: Answered,
        age_s: float,
        asked: int,
        found: int,
    ) -> None:
        """Note a lookup that was begun age_s ago and has just been answered. asked and found count
        pages."""
        try:
            sources = _pages_by_source(lookup.sources) or ({"arena": found} if found else {})
            attributes: dict[str, Any] = {
                "gen_ai.request.id": request_id,
                "lookaside.asked_tokens": asked * self._page,
                "lookaside.found_tokens": found * self._page,
                "lookaside.found_bytes": found * lookup.page_bytes,
                "lookaside.tiers": list(sources),
                "lookaside.reason": "late" if lookup.late else wire.REASONS[lookup.reason],
                "lookaside.sidecar_us": lookup.took_us,
            }
            context = self._extract(dict(headers))
            end = time.time_ns()
            begin = end - int(age_s * 1e9)
            span = self._tracer.start_span(
                "lookaside.lookup", context, start_time=begin, attributes=attributes
            )
            if lookup.began_us:
                from opentelemetry.trace import set_span_in_context

                promoted = sum(pages for tier, pages in sources.items() if tier != "arena")
                child = self._tracer.start_span(
                    "lookaside.promote",
                    set_span_in_context(span, context),
                    start_time=begin + lookup.began_us * 1000,
                    attributes={
                        "lookaside.promoted_tokens": promoted * self._page,
                        "lookaside.promoted_bytes": promoted * lookup.page_bytes,
                        "lookaside.tiers": [tier for tier in sources if tier != "arena"],
                        **{f"lookaside.pages.{tier}": pages for tier, pages in sources.items()},
                    },
                )
                child.end(begin + lookup.took_us * 1000)
            span.end(end)
        except Exception:
            logger.debug("lookaside: a span was lost", exc_info=True)

    def load(
        self,
        request_id: str,
        headers: Mapping[str, str],
        age_s: float,
        tokens: int,
        size: int,
        reason: int,
    ) -> None:
        """Note a load of tokens that was ordered age_s ago and has just ended.

        size is in bytes, as the pages lie in the arenas. reason is a number in wire.REASONS, not 0
        if it failed.
        """
        try:
            end = time.time_ns()
            span = self._tracer.start_span(
                "lookaside.load",
                self._extract(dict(headers)),
                start_time=end - int(age_s * 1e9),
                attributes={
                    "gen_ai.request.id": request_id,
                    "lookaside.loaded_tokens": tokens,
                    "lookaside.loaded_bytes": size,
                    "lookaside.reason": wire.REASONS[reason],
                },
            )
            span.end(end)
        except Exception:
            logger.debug("lookaside: a span was lost", exc_info=True)

    def close(self) -> None:
        """Export what is left, for a moment at most, and end the thread."""
        try:
            self._provider.force_flush(1000)
            self._provider.shutdown()
        except Exception:
            logger.debug("lookaside: spans were lost", exc_info=True)


def _pages_by_source(sources: str) -> dict[str, int]:
    """Read what wire.LookupResult.sources says, such as "arena 16, disk 48"."""
    parts = (part.rpartition(" ") for part in sources.split(", ") if part)
    return {source: int(pages) for source, _, pages in parts}


def begin(vllm_config: Any, page_tokens: int) -> Tracer | None:
    """Return what makes spans if vLLM exports traces, else None. Never raises."""
    observability = getattr(vllm_config, "observability_config", None)
    endpoint = getattr(observability, "otlp_traces_endpoint", None)
    if not endpoint:
        return None
    try:
        return Tracer(endpoint, page_tokens)
    except Exception as error:
        logger.warning("lookaside: no traces: %s", error)
        return None
