"""Sends a prompt to a vLLM server and measures the time to its first token by streaming."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

import httpx

from . import model
from .progress import step

PATIENCE_S = (
    300.0  # with a server, which computes for a few seconds at most where nothing else runs
)

_client = httpx.Client(timeout=httpx.Timeout(PATIENCE_S), trust_env=False)


class Answer(NamedTuple):
    """What a server answered to one prompt."""

    ttft_s: float
    total_s: float
    tokens: tuple[int, ...]  # generated token ids
    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were not computed, as vLLM reports them
    finish_reason: str
    # of the total, at a prefiller, as the proxy of examples/prefill_decode reports it; else 0
    prefill_s: float


def complete(
    base_url: str,
    prompt: list[int],
    *,
    max_tokens: int = 8,
    cache_salt: str | None = None,
    timeout_s: float = PATIENCE_S,
    headers: dict[str, str] | None = None,
    **extra: Any,
) -> Answer:
    """Greedy completion of a prompt of token ids. Raises httpx.HTTPError; RuntimeError for an error
    answered."""
    body: dict[str, Any] = {
        "model": "small",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    finish = ""
    first: float | None = None
    started = time.perf_counter()
    with _client.stream(
        "POST", f"{base_url}/v1/completions", json=body, headers=headers, timeout=timeout_s
    ) as response:
        if response.status_code != 200:
            raise RuntimeError(
                f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:500]}"
            )
        prefill_s = float(response.headers.get("X-Prefill-Seconds", 0))
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: ") :])
            if "error" in event:
                raise RuntimeError(f"the server answered: {event['error']}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                if choice.get("token_ids"):
                    if first is None:
                        first = time.perf_counter()
                    tokens.extend(choice["token_ids"])
                finish = choice.get("finish_reason") or finish
    ended = time.perf_counter()
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        ttft_s=(first or ended) - started,
        total_s=ended - started,
        tokens=tuple(tokens),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        finish_reason=finish,
        prefill_s=prefill_s,
    )


def warm_up(*base_urls: str) -> None:
    """Sends each server a short and a long prompt, so that none is timed at its first."""
    with step("warming up"):
        for base_url in base_urls:
            for tokens in (300, 2000):
                complete(base_url, model.prompt(tokens, tokens), max_tokens=4)


def settle() -> None:
    """Waits until the servers that answered last are idle: call it before timing another server.

    A worker of vLLM polls its queue busily for a second after its last step (SpinCondition). On two
    cores the server asked within that second was seen to be up to 0.8 s slower, with the connector
    or without.
    """
    time.sleep(1.3)


def reset_prefix_cache(base_url: str, timeout_s: float = 120.0, external: bool = False) -> None:
    """Empties vLLM's own prefix cache, and all of the sidecars' if ``external``; needs vLLM's dev
    mode.

    Retries while blocks are held. Raises RuntimeError.
    """
    parameters = {"reset_external": external}
    deadline = time.monotonic() + timeout_s
    while True:
        response = _client.post(
            f"{base_url}/reset_prefix_cache", params=parameters, timeout=timeout_s
        )
        response.raise_for_status()
        if response.json().get("success", True):
            return
        if time.monotonic() > deadline:
            raise RuntimeError("vLLM would not reset its cache: blocks are still held")
        time.sleep(0.05)


def metric(base_url: str, name: str) -> float:
    """The sum of a Prometheus metric's samples on a server, 0 where there is none."""
    total = 0.0
    for line in _client.get(f"{base_url}/metrics").text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            total += float(line.rsplit(" ", 1)[1])
    return total
