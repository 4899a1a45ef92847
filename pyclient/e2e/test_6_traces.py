"""A request's trace: vLLM's own span and the connector's, as a collector gets them of a real server
that is told no more than vLLM's --otlp-traces-endpoint."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.processes import eventually

from .collector import Collector, attributes, collecting
from .conftest import PAGE, Stands, ask, configured, hits_of, sessions
from .test_4_tiers import Machine

pytestmark = pytest.mark.timeout(900)

PROMPT = model.prompt(5 * PAGE + 20, 80_000)
TOKENS = hits_of(len(PROMPT))


@dataclass
class Traced:
    """A machine with a disk, and the collector of its server's traces."""

    machine: Machine
    collector: Collector

    def ask(self, *spans: str) -> tuple[Answer, dict[str, Span]]:
        """An answer for which vLLM's own cache has nothing, and these spans of its trace, by
        name."""
        client.reset_prefix_cache(self.machine.server.base_url)
        trace, parent = secrets.token_hex(16), secrets.token_hex(8)
        before = time.time_ns()
        headers = {"traceparent": f"00-{trace}-{parent}-01"}
        answer = ask(self.machine.server, PROMPT, headers=headers)
        got: dict[str, Span] = {}
        deadline = time.monotonic() + 120
        while set(spans) - set(got):
            try:
                span = self.collector.spans.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"of {spans} only {sorted(got)} have come") from None
            if span.trace_id.hex() == trace:
                assert span.name not in got
                got[span.name] = span
        assert set(got) == set(spans)
        request = got["llm_request"]
        for name, span in got.items():
            assert before <= span.start_time_unix_nano <= span.end_time_unix_nano, name
            assert span.end_time_unix_nano <= time.time_ns(), name
            above = got["lookaside.lookup"].span_id.hex() if "promote" in name else parent
            assert span.parent_span_id.hex() == above, name
            if name in ("lookaside.lookup", "lookaside.load"):
                # The engine's own id has a random end.
                id = attributes(request)["gen_ai.request.id"]
                assert attributes(span)["gen_ai.request.id"].startswith(id)
        return answer, got

    @property
    def page_bytes(self) -> int:
        (space,) = self.machine.sidecar.status()["spaces"]
        return space["page_bytes"]


@pytest.fixture(scope="module")
def traced(
    stands: Stands, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Traced]:
    disk = tmp_path_factory.mktemp("disk") / "store"
    with collecting("grpc") as collector, stands(small_model) as stand:
        settings = {"arena_limit": "256M", "disk": f"{disk}:1G"}
        machine = Machine(stand, "traced", settings, disk)
        machine.start_sidecar()
        machine.server = stand.server(
            "traced",
            connector=configured(stand.endpoint("traced")),
            arguments=["--otlp-traces-endpoint", collector.endpoint],
        )
        machine.server.wait_ready()
        eventually(lambda: sessions(machine.sidecar) == 2, "both roles' sessions")
        yield Traced(machine, collector)


def test_a_miss_a_promotion_and_a_hit_in_the_trace_of_the_request(traced: Traced) -> None:
    miss, spans = traced.ask("llm_request", "lookaside.lookup")
    assert miss.cached_tokens == 0
    lookup = attributes(spans["lookaside.lookup"])
    assert lookup["lookaside.asked_tokens"] == TOKENS
    assert lookup["lookaside.found_tokens"] == lookup["lookaside.found_bytes"] == 0
    assert lookup["lookaside.tiers"] == []
    assert lookup["lookaside.reason"] == "never_stored"

    # A sidecar with an empty arena finds it on the disk.
    traced.machine.stored(TOKENS // PAGE)
    traced.machine.sidecar.end()
    traced.machine.start_sidecar()
    eventually(lambda: sessions(traced.machine.sidecar) == 2, "both roles' sessions")
    hit, spans = traced.ask(
        "llm_request", "lookaside.lookup", "lookaside.promote", "lookaside.load"
    )
    assert (hit.tokens, hit.cached_tokens) == (miss.tokens, TOKENS)
    size = TOKENS // PAGE * traced.page_bytes
    lookup, promote, load = (
        attributes(spans[f"lookaside.{name}"]) for name in ("lookup", "promote", "load")
    )
    assert lookup["lookaside.asked_tokens"] == lookup["lookaside.found_tokens"] == TOKENS
    assert lookup["lookaside.found_bytes"] == size
    assert lookup["lookaside.reason"] == "end"
    assert promote["lookaside.tiers"] == ["disk"] == lookup["lookaside.tiers"]
    assert promote["lookaside.pages.disk"] == TOKENS // PAGE
    assert promote["lookaside.promoted_tokens"] == TOKENS
    assert promote["lookaside.promoted_bytes"] == size
    assert load["lookaside.loaded_tokens"] == TOKENS
    assert load["lookaside.loaded_bytes"] == size
    assert load["lookaside.reason"] == "end"
    order = [spans[f"lookaside.{name}"] for name in ("lookup", "promote", "load")]
    starts = [span.start_time_unix_nano for span in order]
    assert starts == sorted(starts)
    assert spans["lookaside.lookup"].end_time_unix_nano <= starts[2]
    assert spans["lookaside.load"].end_time_unix_nano <= spans["llm_request"].end_time_unix_nano

    # Now it is in the arena: nothing is promoted.
    again, spans = traced.ask("llm_request", "lookaside.lookup", "lookaside.load")
    assert (again.tokens, again.cached_tokens) == (miss.tokens, TOKENS)
    assert attributes(spans["lookaside.lookup"])["lookaside.tiers"] == ["arena"]


def test_a_request_without_a_trace_has_no_spans(traced: Traced) -> None:
    client.reset_prefix_cache(traced.machine.server.base_url)
    ask(traced.machine.server, PROMPT)
    traced.ask("llm_request", "lookaside.lookup", "lookaside.load")
    others = [traced.collector.spans.get() for _ in range(traced.collector.spans.qsize())]
    assert not [span.name for span in others if span.name.startswith("lookaside.")]
