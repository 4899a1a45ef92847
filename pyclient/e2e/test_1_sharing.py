"""What one instance has computed, another one and the same one later load instead: with the same
tokens."""

from __future__ import annotations

import contextlib
import json
import subprocess
from typing import Any

import httpx
import pytest

from examples.stand import client
from examples.stand.processes import BINARY, eventually
from examples.two_instances import __main__ as two_instances

from .conftest import (
    HURRIED,
    PAGE,
    Pair,
    ask,
    computed,
    configured,
    counted,
    hit,
    hits_again,
    hits_of,
    missed_again,
    together,
)


@pytest.mark.parametrize("tokens", [129, 256, 257, 700, 1537, 4000])
@missed_again
def test_second_instance_loads_what_the_first_computed(pair: Pair, tokens: int) -> None:
    prompt = pair.prompt(tokens)
    truth = ask(pair.plain, prompt)
    first = ask(pair.a, prompt)
    second = ask(pair.b, prompt)
    assert (first.tokens, second.tokens) == (truth.tokens, truth.tokens)
    assert first.cached_tokens == 0
    hit(second.cached_tokens, hits_of(tokens))


@missed_again
def test_what_the_demo_measures_and_prints(pair: Pair) -> None:
    """examples/two_instances on these servers: the rows that `make demo` prints and writes."""
    cases, seed = ((1000, 1000), (1500, 700)), next(pair.seeds)
    rows = [two_instances.measure(pair.a, pair.b, *case, rounds=1, seed=seed) for case in cases]
    assert [(row.prompt_tokens, row.shared_tokens) for row in rows] == [(1000, 1000), (1500, 700)]
    for row, tokens in zip(rows, (hits_of(1000), 700 // PAGE * PAGE), strict=True):
        assert row.outputs_equal
        hit(row.hit_tokens, tokens)
        assert min(row.cold_ttft_s, row.lookaside_ttft_s, row.local_ttft_s) > 0
    assert all(two_instances.COLUMNS.line(row).endswith(" equal") for row in rows)


def test_less_than_a_page_is_computed(pair: Pair) -> None:
    prompt = pair.prompt(128)
    truth = ask(pair.plain, prompt)
    assert ask(pair.a, prompt).tokens == truth.tokens
    second = ask(pair.b, prompt)
    assert second.tokens == truth.tokens
    assert second.cached_tokens == 0


@pytest.mark.parametrize("shared", [200, 384, 1000])
@missed_again
def test_prompts_that_share_their_beginning(pair: Pair, shared: int) -> None:
    first = pair.prompt(1500)
    ask(pair.a, first)
    prompt = pair.prompt(1400, first[:shared])
    truth = ask(pair.plain, prompt)
    second = ask(pair.b, prompt)
    assert second.tokens == truth.tokens
    hit(second.cached_tokens, shared // PAGE * PAGE)


@missed_again
def test_what_is_computed_after_a_hit_is_stored_too(pair: Pair) -> None:
    first = pair.prompt(700)
    ask(pair.a, first)
    longer = pair.prompt(1800, first)
    ask(pair.b, longer)  # loads five pages, computes and stores the rest
    truth = ask(pair.plain, longer)
    again = ask(pair.a, longer)
    assert again.tokens == truth.tokens
    hit(again.cached_tokens, hits_of(1800))


@missed_again
def test_local_and_remote_hits_add_up(pair: Pair) -> None:
    prompt = pair.prompt(2000)
    ask(pair.b, prompt[:600])  # four pages in b's own cache
    ask(pair.a, prompt)
    truth = ask(pair.plain, prompt)
    second = ask(pair.b, prompt)
    assert second.tokens == truth.tokens
    hit(second.cached_tokens, hits_of(2000))


@missed_again
def test_same_instance_after_its_cache_is_reset(pair: Pair) -> None:
    prompt = pair.prompt(1200)
    truth = ask(pair.a, prompt)
    client.reset_prefix_cache(pair.a.base_url)
    again = ask(pair.a, prompt)
    assert again.tokens == truth.tokens
    hit(again.cached_tokens, hits_of(1200))


@missed_again
def test_generated_tokens_are_stored(pair: Pair) -> None:
    prompt = pair.prompt(300)
    first = ask(pair.a, prompt, max_tokens=100)
    turn = [*prompt, *first.tokens, *pair.prompt(20)]
    truth = ask(pair.plain, turn)
    second = ask(pair.b, turn)
    assert second.tokens == truth.tokens
    # 300 + 100 tokens, of which the last was never computed: three whole pages.
    hit(second.cached_tokens, 3 * PAGE)


@missed_again
def test_salts_do_not_share(pair: Pair) -> None:
    prompt = pair.prompt(900)
    truth = ask(pair.plain, prompt)
    assert ask(pair.a, prompt, cache_salt="alice").cached_tokens == 0
    other = ask(pair.b, prompt, cache_salt="bob")
    none = ask(pair.b, prompt)
    same = ask(pair.b, prompt, cache_salt="alice")
    assert {other.tokens, none.tokens, same.tokens} == {truth.tokens}
    assert (other.cached_tokens, none.cached_tokens) == (0, 0)
    hit(same.cached_tokens, hits_of(900))


@missed_again
def test_many_requests_at_once(pair: Pair) -> None:
    shared = pair.prompt(1000)
    prompts = [pair.prompt(tokens, shared[:900]) for tokens in (950, 1100, 1300, 1900)]
    prompts += [pair.prompt(tokens) for tokens in (100, 260, 800, 1500)]
    truths = [ask(pair.plain, prompt, 16) for prompt in prompts]
    first = together(pair.a, prompts, 16)
    second = together(pair.b, prompts, 16)
    assert [answer.tokens for answer in first] == [truth.tokens for truth in truths]
    assert [answer.tokens for answer in second] == [truth.tokens for truth in truths]
    for answer, prompt in zip(second, prompts, strict=True):
        hit(answer.cached_tokens, hits_of(len(prompt)))


@missed_again
def test_clients_that_leave_at_any_moment(pair: Pair) -> None:
    """Aborted while waiting, loading, prefilling and decoding: the servers go on, nothing stays
    leased."""
    prompt = pair.prompt(3000)
    truth = ask(pair.a, prompt)
    for timeout_s in (0.005, 0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.2):
        client.reset_prefix_cache(pair.b.base_url)
        for start in (prompt, pair.prompt(2000)):
            with contextlib.suppress(httpx.TimeoutException):
                client.complete(pair.b.base_url, start, max_tokens=64, timeout_s=timeout_s)
    client.reset_prefix_cache(pair.b.base_url)
    again = ask(pair.b, prompt)
    assert again.tokens == truth.tokens
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "no leases")
    hit(again.cached_tokens, hits_of(3000))


def test_an_instance_that_dies_and_one_that_starts(pair: Pair) -> None:
    """Killed in the middle of a load: what it held is free within a second. Its successor loads
    what is held."""
    prompt = pair.prompt(4000)
    truth = ask(pair.a, prompt)
    with contextlib.suppress(httpx.TimeoutException):
        client.complete(pair.b.base_url, prompt, timeout_s=0.04)
    pair.b.end(patience_s=0)
    eventually(
        lambda: len(pair.sidecar.status()["sessions"]) == 2, "the dead server's sessions to end"
    )
    eventually(lambda: pair.sidecar.status()["leases"] == 0, "what it held to be free")
    pair.b = pair.stand.server("b2", connector=configured(pair.stand.endpoint(), **HURRIED))
    pair.b.wait_ready()
    pair.connected()
    hits_again(pair.b, prompt, truth, "the successor's hit")


@missed_again
def test_reset_of_the_external_cache_forgets(pair: Pair) -> None:
    prompt = pair.prompt(800)
    truth = ask(pair.a, prompt)
    hit(ask(pair.b, prompt).cached_tokens, hits_of(800))
    client.reset_prefix_cache(pair.b.base_url, external=True)
    again = ask(pair.b, prompt)
    assert again.tokens == truth.tokens
    assert again.cached_tokens == 0


@missed_again
def test_metrics_inside_vllm(pair: Pair) -> None:
    """vLLM's own counters of external hits move, and the connector's metrics are exported."""
    before = counted(pair.b, "vllm:external_prefix_cache_hits_total")
    prompt = pair.prompt(1000)
    computed(pair.plain, prompt)
    ask(pair.a, prompt)
    hit(ask(pair.b, prompt).cached_tokens, hits_of(1000))
    assert counted(pair.b, "vllm:external_prefix_cache_hits_total") - before == hits_of(1000)
    page = httpx.get(f"{pair.b.base_url}/metrics", timeout=60, trust_env=False).text
    assert "lookaside" in page


@missed_again
def test_short_loads_happen_within_the_step(pair: Pair) -> None:
    """With the tokens of an instance without the connector. The first copies are measured."""
    for _ in range(4):
        prompt = pair.prompt(700)
        truth = computed(pair.plain, prompt)
        ask(pair.a, prompt)
        before = counted(pair.b, "vllm:lookaside_loads_in_step_total")
        second = ask(pair.b, prompt)
        assert second.tokens == truth.tokens
        hit(second.cached_tokens, hits_of(700))
        if counted(pair.b, "vllm:lookaside_loads_in_step_total") > before:
            return
    raise AssertionError("no load happened within a step")


@missed_again
def test_status_tells_found_loaded_and_computed_apart(pair: Pair) -> None:
    """A prompt that is computed, one that vLLM has itself, one that is loaded: only that is found,
    and loaded."""
    before = pair.sidecar.status()["counters"]["tokens"]
    prompt, pages = pair.prompt(1000), hits_of(1000)
    ask(pair.a, prompt)
    ask(pair.a, prompt)
    hit(ask(pair.b, prompt).cached_tokens, pages)

    def told() -> dict[str, int]:
        return {
            name: count - before[name]
            for name, count in pair.sidecar.status()["counters"]["tokens"].items()
        }

    eventually(lambda: told()["requests"] == 3, "the sidecar to be told")
    asked = 1000 + (1000 - pages) + 1000
    assert told() == {
        "requests": 3,
        "asked": asked,
        "found": pages,
        "loaded": pages,
        "computed": asked - pages,
        "own": pages,
    }


def test_commands_take_the_prompt_of_a_request(pair: Pair) -> None:
    """What a server was asked, also with a salt, is found, pinned and forgotten by its text."""

    def command(*words: str) -> dict[str, Any]:
        done = subprocess.run(
            [BINARY, *words, "--json", "--runtime-dir", pair.sidecar.endpoint],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def held(*words: str) -> tuple[int, int]:
        """The pages that are held of a prompt, and those that it has."""
        answer = command("lookup", "--timeout=60s", *words)
        return answer["hit_pages"], answer["pages"]

    def request(**body: Any) -> None:
        answer = httpx.post(
            f"{pair.a.base_url}/v1/completions",
            json={"model": "small", "prompt": text, "max_tokens": 1, **body},
            timeout=300,
            trust_env=False,
        )
        answer.raise_for_status()

    text = f"tell me, number {next(pair.seeds)}, what lies aside " * 60
    plain = ("--prompt", text, "--vllm", pair.a.base_url)
    salted = (*plain, "--cache-salt", "other")
    none, pages = held(*plain)
    assert none == 0 and pages >= 2
    request()
    eventually(lambda: held(*plain) == (pages, pages), "all pages of the prompt")
    assert held(*salted) == (0, pages)
    request(cache_salt="other")
    eventually(lambda: held(*salted) == (pages, pages), "all pages of the prompt with a salt")

    assert command("pin", *plain)["pages"] == pages
    command("unpin", "--all")
    command("clear", "--yes", *plain)
    assert held(*plain) == (0, pages)
    assert held(*salted) == (pages, pages), "what was forgotten had no salt"
