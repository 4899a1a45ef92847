"""Servers whose pages are encoded in the arena: they hit, their tokens are right, and they never
meet those of another encoding, whatever is restarted between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.stand import client, model
from examples.stand.processes import Server, Sidecar, Stand, eventually

from .conftest import Stands, ask, computed, configured, hits_of, sessions

PAGE_BYTES = 128 * 8 * 2 * 4 * 64 * 4  # tokens, layers, K and V, heads, their dimension, float32


@dataclass
class Encoded:
    stand: Stand
    settings: dict[str, str]
    sidecar: Sidecar
    lossless: Server
    int8: Server

    def restart_sidecar(self) -> None:
        """Another sidecar, which finds on the disk what was in the arena."""
        self.sidecar.end()
        self.sidecar = self.stand.sidecar(settings=self.settings)
        eventually(lambda: sessions(self.sidecar) == 4, "four sessions")


@pytest.fixture(scope="module")
def encoded(small_model: Path, stands: Stands) -> Iterator[Encoded]:
    with stands(small_model) as stand:
        settings = {"arena_limit": "512M", "disk": f"{stand.directory}/disk:512M"}
        sidecar = stand.sidecar(settings=settings)
        lossless, int8 = (
            stand.server(name, connector=configured(stand.endpoint(), compress=name))
            for name in ("lossless", "int8")
        )
        for server in (lossless, int8):
            server.wait_ready()
            ask(server, model.prompt(300, 1))
        yield Encoded(stand, settings, sidecar, lossless, int8)


def loaded(server: Server, prompt: list[int]) -> tuple[int, ...]:
    """The tokens when all that can be of the prompt comes from the sidecar."""
    client.reset_prefix_cache(server.base_url)
    answer = ask(server, prompt)
    assert answer.cached_tokens == hits_of(len(prompt))
    return answer.tokens


def test_lossless_pages_give_the_same_tokens(encoded: Encoded) -> None:
    for seed, tokens in enumerate((257, 700, 3000)):
        prompt = model.prompt(tokens, 5000 + seed)
        truth = computed(encoded.lossless, prompt)
        assert ask(encoded.lossless, prompt).cached_tokens == 0
        assert loaded(encoded.lossless, prompt) == truth.tokens


def test_pages_of_different_encodings_never_meet(encoded: Encoded) -> None:
    prompt = model.prompt(1000, 5100)
    truth = ask(encoded.lossless, prompt)
    first = ask(encoded.int8, prompt)
    assert (truth.cached_tokens, first.cached_tokens) == (0, 0)
    assert first.tokens == truth.tokens  # both have computed it
    loaded(encoded.int8, prompt)
    assert loaded(encoded.lossless, prompt) == truth.tokens


def test_pages_are_as_small_as_is_said(encoded: Encoded) -> None:
    sizes = sorted(space["page_bytes"] for space in encoded.sidecar.status()["spaces"])
    elements = PAGE_BYTES // 4
    assert sizes == [elements * 132 // 128, elements * (4 * 128 - 128 + 64 + 3) // 128]


def test_rounded_pages_mostly_give_the_same_tokens(encoded: Encoded) -> None:
    """On random weights, whose next tokens are close calls. bench/agreement.py has the figures."""
    same = total = 0
    for seed in range(8):
        prompt = model.prompt(600, 5200 + seed)
        truth = ask(encoded.int8, prompt)
        assert truth.cached_tokens == 0
        after = loaded(encoded.int8, prompt)
        total += len(after)
        same += sum(a == b for a, b in zip(truth.tokens, after, strict=True))
    assert same >= total / 2, f"{same} of {total} tokens are those that were computed"


def test_encoded_pages_outlive_the_sidecar(encoded: Encoded) -> None:
    prompt = model.prompt(1500, 5300)
    truth = ask(encoded.lossless, prompt)
    ask(encoded.int8, prompt)
    before = loaded(encoded.int8, prompt)
    encoded.sidecar.wait_kept()
    encoded.restart_sidecar()

    def found() -> bool:
        client.reset_prefix_cache(encoded.lossless.base_url)
        again = ask(encoded.lossless, prompt)
        assert again.tokens == truth.tokens
        return again.cached_tokens == hits_of(len(prompt))

    eventually(found, "lossless pages from the disk")
    client.reset_prefix_cache(encoded.int8.base_url)
    again = ask(encoded.int8, prompt)
    assert again.cached_tokens == hits_of(len(prompt)) and again.tokens == before
