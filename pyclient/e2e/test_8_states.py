"""A model with layers that keep a state beside those that attend: hits where vLLM has handed out
the states.

One server with the connector, and one without, whose answers are the truth: in bfloat16, which is
all that vLLM's CPU build has for such layers. Where a prefill is split changes the last bits, so
that the truth is split alike.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from examples.stand import client, model
from examples.stand.processes import Server, Sidecar, Stand, eventually

from .conftest import Stands, ask, configured, hits_again, hits_of, sessions

pytestmark = pytest.mark.timeout(900)


@dataclass
class States:
    """The two servers, and the sidecar."""

    stand: Stand
    sidecar: Sidecar
    plain: Server
    server: Server


@pytest.fixture(scope="module")
def states(stands: Stands) -> Iterator[States]:
    with stands(model.ensure("states")) as stand:
        sidecar = stand.sidecar()
        # Steps of 640 tokens, whole pages. By default vLLM keeps the states at prompts' ends only.
        arguments = [
            "--dtype",
            "bfloat16",
            "--max-num-batched-tokens",
            "700",
            "--prefix-cache-retention-interval",
            "128",
        ]
        plain = stand.server("states-plain", connector=None, arguments=arguments)
        server = stand.server("states", connector=configured(stand.endpoint()), arguments=arguments)
        for each in (plain, server):
            each.wait_ready(480)
        eventually(lambda: sessions(sidecar) == 2, "both roles' sessions")
        yield States(stand, sidecar, plain, server)


@pytest.mark.parametrize("tokens", [100, 400, 1500, 3000])
def test_a_hit_is_what_was_computed(states: States, tokens: int) -> None:
    prompt = model.prompt(tokens, 70_000 + tokens)
    truth = ask(states.plain, prompt, 16)
    local = ask(states.plain, prompt, 16)
    assert (local.tokens, local.cached_tokens) == (truth.tokens, hits_of(tokens))
    first = ask(states.server, prompt, 16)
    assert (first.tokens, first.cached_tokens) == (truth.tokens, 0)
    client.reset_prefix_cache(states.server.base_url)
    hit = ask(states.server, prompt, 16)
    assert (hit.tokens, hit.cached_tokens) == (truth.tokens, hits_of(tokens))


def test_a_prompt_that_leaves_another_goes_on_from_the_last_state(states: States) -> None:
    """It shares 13 pages; the states nearest below are where a step of the other's prefill ended,
    after 10."""
    one = model.prompt(3000, 71_000)
    ask(states.server, one)
    client.reset_prefix_cache(states.server.base_url)
    other = one[:1700] + model.prompt(500, 71_001)
    truth = ask(states.plain, other, 16)
    assert truth.cached_tokens == 0
    hit = ask(states.server, other, 16)
    assert (hit.tokens, hit.cached_tokens) == (truth.tokens, 1280)


def test_a_conversation(states: States) -> None:
    """The next turn goes on from a state that decoding has left behind, as it does in vLLM's own
    cache."""
    prompt = model.prompt(900, 72_000)
    first = ask(states.plain, prompt, 300)
    assert ask(states.server, prompt, 300).tokens == first.tokens
    client.reset_prefix_cache(states.server.base_url)
    turn = prompt + list(first.tokens) + model.prompt(200, 72_001)
    truth = ask(states.plain, turn, 16)
    answer = ask(states.server, turn, 16)
    assert (answer.tokens, answer.cached_tokens) == (truth.tokens, truth.cached_tokens)
    assert answer.cached_tokens == 1199 // 128 * 128


def test_the_sidecar_killed_during_a_load(states: States) -> None:
    """The request starts over; what vLLM then has itself is stored again."""
    prompt = model.prompt(3000, 73_000)
    truth = ask(states.plain, prompt)
    ask(states.server, prompt)
    client.reset_prefix_cache(states.server.base_url)
    killer = threading.Thread(
        target=lambda: (time.sleep(0.01), states.sidecar.signal(signal.SIGKILL))
    )
    killer.start()
    answer = ask(states.server, prompt)
    killer.join()
    assert answer.tokens == truth.tokens
    states.sidecar.wait(30)
    states.sidecar.end()
    states.sidecar = states.stand.sidecar()
    eventually(lambda: sessions(states.sidecar) == 2, "both roles' sessions")
    hits_again(states.server, prompt, truth, "hits once connected again")
