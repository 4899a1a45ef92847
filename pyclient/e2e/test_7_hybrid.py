"""A model whose layers attend to a sliding window, but for every third: three KV-cache groups, real
hits.

One server with the connector, and one without, whose answers are the truth.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from examples.stand import client, model
from examples.stand.client import Answer
from examples.stand.processes import Server, Sidecar, Stand, eventually

from .conftest import (
    HURRIED,
    Stands,
    ask,
    configured,
    counted,
    hit,
    hits_of,
    missed_again,
    sessions,
    together,
)

pytestmark = pytest.mark.timeout(900)

seeds = itertools.count(60_000)


@dataclass
class Hybrid:
    """The two servers, and the sidecar, which tests may kill and restart."""

    stand: Stand
    sidecar: Sidecar
    plain: Server
    server: Server

    def connected(self) -> None:
        eventually(lambda: sessions(self.sidecar) == 2, "both roles' sessions")

    def restart_sidecar(self) -> None:
        self.sidecar.signal(signal.SIGKILL)
        self.sidecar.wait(30)
        self.sidecar.end()
        self.sidecar = self.stand.sidecar()
        self.connected()

    def store(self, prompt: list[int], truth: Answer) -> None:
        """Asks until the whole prompt hits: what a busy sidecar has no time for is not stored, or
        found, at once."""

        def hit() -> bool:
            again = ask(self.server, prompt)
            client.reset_prefix_cache(self.server.base_url)
            other = ask(self.server, prompt)
            assert again.tokens == other.tokens == truth.tokens
            return other.cached_tokens == hits_of(len(prompt))

        eventually(hit, "hits")


@pytest.fixture(scope="module")
def hybrid(stands: Stands) -> Iterator[Hybrid]:
    with stands(model.ensure("hybrid")) as stand:
        sidecar = stand.sidecar()
        chunked = [
            "--max-num-batched-tokens",
            "700",
        ]  # no page boundary, nor the window, divides a step
        plain = stand.server("hybrid-plain", connector=None, arguments=chunked)
        server = stand.server(
            "hybrid", connector=configured(stand.endpoint(), **HURRIED), arguments=chunked
        )
        for each in (plain, server):
            each.wait_ready(480)
        out = Hybrid(stand, sidecar, plain, server)
        out.connected()
        yield out


@pytest.mark.parametrize("tokens", [200, 400, 1500, 3000])
@missed_again
def test_hits_answer_the_same(hybrid: Hybrid, tokens: int) -> None:
    """Shorter than the window, a little longer, and so long that most of its blocks are never
    loaded."""
    prompt = model.prompt(tokens, next(seeds))
    truth = ask(hybrid.plain, prompt, 16)
    cold = ask(hybrid.server, prompt, 16)
    assert (cold.tokens, cold.cached_tokens) == (truth.tokens, 0)
    client.reset_prefix_cache(hybrid.server.base_url)
    again = ask(hybrid.server, prompt, 16)
    assert again.tokens == truth.tokens
    hit(again.cached_tokens, hits_of(tokens))


@missed_again
def test_a_conversation(hybrid: Hybrid) -> None:
    """The next turn hits the answer's pages too, and a turn that leaves it in the middle what they
    share."""
    prompt = model.prompt(830, next(seeds))
    first = ask(hybrid.server, prompt, 100)  # ends a page
    whole = prompt + list(first.tokens)
    client.reset_prefix_cache(hybrid.server.base_url)
    for turn in (
        whole + model.prompt(200, next(seeds)),
        whole[:700] + model.prompt(500, next(seeds)),
    ):
        truth = ask(hybrid.plain, turn, 16)
        answer = ask(hybrid.server, turn, 16)
        assert answer.tokens == truth.tokens
        shared = len(whole) - 1 if turn[:900] == whole[:900] else 700
        hit(answer.cached_tokens, shared // 128 * 128)


@missed_again
def test_several_at_once(hybrid: Hybrid) -> None:
    shared = model.prompt(800, next(seeds))
    prompts = [model.prompt(tokens, next(seeds), shared) for tokens in (1000, 1300, 1600, 2000)]
    truths = [ask(hybrid.plain, prompt) for prompt in prompts]
    for _ in range(2):
        assert [each.tokens for each in together(hybrid.server, prompts)] == [
            truth.tokens for truth in truths
        ]
        client.reset_prefix_cache(hybrid.server.base_url)
    hit(ask(hybrid.server, prompts[3]).cached_tokens, hits_of(2000))


@pytest.mark.parametrize("delay_s", [0.01, 0.03])
def test_the_sidecar_killed_during_a_load(hybrid: Hybrid, delay_s: float) -> None:
    """The request starts over; what vLLM then has itself is stored again."""
    prompt = model.prompt(3000, 63_000)
    truth = ask(hybrid.plain, prompt)
    ask(hybrid.server, prompt)
    client.reset_prefix_cache(hybrid.server.base_url)
    killer = threading.Thread(
        target=lambda: (time.sleep(delay_s), hybrid.sidecar.signal(signal.SIGKILL))
    )
    killer.start()
    answer = ask(hybrid.server, prompt)
    killer.join()
    assert answer.tokens == truth.tokens
    hybrid.restart_sidecar()
    hybrid.store(prompt, truth)


def test_a_load_that_fails_is_computed(hybrid: Hybrid) -> None:
    """The sidecar hangs between its answer and the load: vLLM starts over with the request, and
    goes on."""
    server = hybrid.server.base_url
    prompt = model.prompt(3000, 64_000)
    truth = ask(hybrid.plain, prompt)
    hybrid.store(prompt, truth)
    failures = "vllm:lookaside_load_failures_total"

    def hung() -> bool:
        """Whether the sidecar was stopped between the two, while another's prefill took all of
        every step.

        A busy machine may let the load begin before, the lookup come too late, or the other's
        prefill be over.
        """
        client.reset_prefix_cache(server)
        eventually(lambda: hybrid.sidecar.status()["lookups"]["in_flight"] == 0, "no lookups")
        before = counted(hybrid.server, failures)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(ask, hybrid.server, model.prompt(6000, next(seeds)))
            running = lambda: client.metric(server, "vllm:num_requests_running") == 1  # noqa: E731
            eventually(lambda: running() or first.done(), "the other to run")
            second = pool.submit(ask, hybrid.server, prompt)
            answered = False
            while not answered and not second.done():
                time.sleep(0.01)
                answered = hybrid.sidecar.status()["lookups"]["in_flight"] == 1
            if answered:
                hybrid.sidecar.signal(signal.SIGSTOP)
            try:
                first.result()
                assert second.result().tokens == truth.tokens
            finally:
                hybrid.sidecar.signal(signal.SIGCONT)
        now = counted(hybrid.server, failures)
        assert now <= before + 1
        return answered and now == before + 1

    eventually(hung, "a load that fails")
    hybrid.connected()
