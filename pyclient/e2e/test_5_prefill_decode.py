"""A kv_producer and a kv_consumer behind the example's proxy: the answers of one server, also when
the prefiller dies.

The tests build on each other: the last one kills the prefiller.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.prefill_decode import __main__ as prefill_decode
from examples.stand import client, model
from examples.stand.processes import Proxy, Server, Sidecar, eventually

from .conftest import PAGE, Stands, ask, computed, configured, counted, sessions, together
from .test_2_sidecar_faults import Asking

# The small model's tokenizer has no template of its own.
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass
class Apart:
    """A prefiller, a decoder and the proxy before them, on one sidecar."""

    sidecar: Sidecar
    prefiller: Server
    decoder: Server
    proxy: Proxy


@pytest.fixture(scope="module")
def apart(small_model: Path, stands: Stands) -> Iterator[Apart]:
    with stands(small_model) as stand:
        sidecar = stand.sidecar()
        chat = ["--chat-template", TEMPLATE]
        prefiller = stand.server(
            "prefiller",
            connector=configured(stand.endpoint(), role="kv_producer"),
            arguments=[*chat, "--max-num-batched-tokens", "700"],
        )
        decoder = stand.server(
            "decoder",
            connector=configured(stand.endpoint(), role="kv_consumer", handover_timeout_ms=60_000),
            arguments=chat,
        )
        for server in (prefiller, decoder):
            server.wait_ready()
        eventually(lambda: sessions(sidecar) == 4, "four sessions")
        yield Apart(sidecar, prefiller, decoder, stand.proxy(prefiller, decoder))


def handed_over(tokens: int) -> int:
    """The tokens of a prompt that the decoder loads: all, but for a last page with one token."""
    return tokens - (tokens % PAGE == 1)


@pytest.mark.parametrize("tokens", [5, PAGE - 1, PAGE, PAGE + 1, PAGE + 2, 700, 2 * PAGE, 1537])
def test_the_decoder_goes_on_where_the_prefiller_ended(apart: Apart, tokens: int) -> None:
    prompt = model.prompt(tokens, 70_000 + tokens)
    truth = computed(apart.decoder, prompt, 24)
    answer = ask(apart.proxy, prompt, 24)
    assert answer.tokens == truth.tokens
    assert answer.cached_tokens == handed_over(tokens)


def test_prompts_that_share_their_beginning_and_come_at_once(apart: Apart) -> None:
    shared = model.prompt(900, 71_000)
    prompts = [
        model.prompt(tokens, 71_000 + tokens, shared[:800]) for tokens in (810, 900, 1000, 1300)
    ]
    truths = [computed(apart.decoder, prompt, 12) for prompt in prompts]
    answers = together(apart.proxy, prompts, 12)
    assert [answer.tokens for answer in answers] == [truth.tokens for truth in truths]
    assert all(
        answer.cached_tokens >= handed_over(len(prompt))
        for answer, prompt in zip(answers, prompts, strict=True)
    )


def test_chat_streamed_and_whole(apart: Apart) -> None:
    body: dict[str, Any] = {
        "model": "small",
        "messages": [{"role": "user", "content": "tell me what lies aside " * 60}],
        "max_completion_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
    }

    def post(base_url: str, **more: Any) -> httpx.Response:
        url = f"{base_url}/v1/chat/completions"
        return httpx.post(
            url, json={**body, **more}, timeout=120, trust_env=False
        ).raise_for_status()

    truth = post(apart.decoder.base_url, cache_salt="alone").json()["choices"][0]["message"][
        "content"
    ]
    whole = post(apart.proxy.base_url).json()
    assert whole["choices"][0]["message"]["content"] == truth and truth
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == handed_over(
        whole["usage"]["prompt_tokens"]
    )
    streamed = post(apart.proxy.base_url, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]" and len(lines) > 6
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == truth


def test_what_the_example_measures_and_prints(apart: Apart) -> None:
    """examples/prefill_decode on these servers: a row of its JSON, and its table."""
    row = prefill_decode.measure(apart.proxy, apart.decoder, 1000, rounds=1, seed=77)
    assert (row.prompt_tokens, row.hit_tokens, row.outputs_equal) == (1000, 1000, True)
    assert min(row.alone_ttft_s, row.prefill_s, row.decoder_ttft_s) > 0
    assert prefill_decode.COLUMNS.line(row).endswith(" equal")


def test_each_has_its_role(apart: Apart) -> None:
    """The prefiller has asked for nothing and the decoder stored nothing."""
    for server, absent, present in (
        (apart.prefiller, ("lookups", "loads"), ("saves", "save_bytes")),
        (
            apart.decoder,
            ("saves", "save_bytes", "promises_broken", "errors"),
            ("loads", "load_bytes"),
        ),
    ):
        assert [counted(server, f"vllm:lookaside_{name}_total") for name in absent] == [0] * len(
            absent
        )
        assert all(
            client.metric(server.base_url, f"vllm:lookaside_{name}_total") > 0 for name in present
        )


def test_mistakes_are_answered_by_the_decoder(apart: Apart) -> None:
    url = f"{apart.proxy.base_url}/v1/completions"
    answer = httpx.post(url, json={"model": "other", "prompt": "x"}, timeout=120, trust_env=False)
    assert answer.status_code == 404 and "other" in answer.text
    assert httpx.post(url, content=b"[1", timeout=120, trust_env=False).status_code == 400
    assert (
        httpx.get(f"{apart.proxy.base_url}/v1/models", timeout=120, trust_env=False).json()["data"][
            0
        ]["id"]
        == "small"
    )


def test_clients_that_leave(apart: Apart) -> None:
    for number, timeout_s in enumerate((0.05, 0.2, 0.4)):
        with contextlib.suppress(httpx.TimeoutException):
            client.complete(
                apart.proxy.base_url, model.prompt(2000, 72_000 + number), timeout_s=timeout_s
            )
    eventually(lambda: apart.sidecar.status()["leases"] == 0, "no leases")
    prompt = model.prompt(300, 72_500)
    assert ask(apart.proxy, prompt).tokens == computed(apart.decoder, prompt).tokens


def test_a_prefiller_that_is_killed_in_the_middle(apart: Apart) -> None:
    """What it had stored by then may be used; the decoder computes the rest, and the requests after
    it."""
    prompt, after = model.prompt(4000, 73_000), model.prompt(500, 73_001)
    truth, want = computed(apart.decoder, prompt), computed(apart.decoder, after)
    asking = Asking(apart.proxy, prompt)
    running = lambda: client.metric(apart.prefiller.base_url, "vllm:num_requests_running") > 0  # noqa: E731
    with contextlib.suppress(httpx.HTTPError):
        eventually(lambda: running() or not asking.is_alive(), "the prefill to begin")
    time.sleep(0.1)
    apart.prefiller.end(patience_s=0)
    assert asking.answer().tokens == truth.tokens
    answer = ask(apart.proxy, after)
    assert (answer.tokens, answer.cached_tokens) == (want.tokens, 0)
    assert "the prefiller failed" in apart.proxy.log.read_text()
    eventually(lambda: apart.sidecar.status()["leases"] == 0, "no leases")
