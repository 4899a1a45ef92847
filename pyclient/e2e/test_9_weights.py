"""Weights that change under a running vLLM, and pauses in which they could."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.stand import client, model
from examples.stand.processes import BINARY, Server, Sidecar, eventually

from .conftest import Stands, ask, configured, hits_again, hits_of, sessions

TOKENS = 900


def write_weights(base: Path, directory: Path, seed: int) -> Path:
    """The model at base with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, directory)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            weights[name] = torch.randn(tensor.shape, generator=generator) * tensor.std()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass
class Changing:
    """A server whose weights change, and one without the connector that has the other weights."""

    sidecar: Sidecar
    server: Server
    other: Server
    weights: Path
    other_weights: Path

    def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        answer = httpx.post(
            f"{self.server.base_url}{path}", json=body, params=query, timeout=120.0, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return answer

    def rpc(self, method: str, **arguments: str) -> None:
        """Call a method of vLLM's workers."""
        self.post("/collective_rpc", {"method": method, "kwargs": arguments})

    def load(self, weights: Path) -> None:
        """What RL loops do: load weights into the running engine, and empty vLLM's own cache."""
        self.rpc("reload_weights", weights_path=str(weights))
        client.reset_prefix_cache(self.server.base_url)

    def again(self, prompt: list[int]) -> Any:
        """The answer when vLLM's own cache has nothing."""
        client.reset_prefix_cache(self.server.base_url)
        return ask(self.server, prompt)

    def lookaside(self, *words: str) -> str:
        """What a command of the sidecar's program prints."""
        return subprocess.run(
            [BINARY, *words, "--runtime-dir", str(self.sidecar.endpoint)],
            check=True, capture_output=True, text=True, timeout=60,
        ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def changing(
    stands: Stands, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Changing]:
    other = write_weights(small_model, tmp_path_factory.mktemp("weights") / "other", 1)
    with stands(small_model) as stand:
        sidecar = stand.sidecar()
        server = stand.server("changing", connector=configured(stand.endpoint()))
        plain = stand.server("other", connector=None, model=other)
        for each in (server, plain):
            each.wait_ready()
        for each in (server, plain):
            ask(each, model.prompt(300, 1))
        eventually(lambda: sessions(sidecar) == 2, "two sessions")
        yield Changing(sidecar, server, plain, small_model, other)


def test_new_weights_hit_nothing_of_the_old_ones(changing: Changing) -> None:
    """And find again what they stored before, when they come back."""
    prompt = model.prompt(TOKENS, 11)
    old, new = ask(changing.server, prompt), ask(changing.other, prompt)
    assert old.tokens != new.tokens
    hits_again(changing.server, prompt, old, "the old weights' pages to be stored")

    changing.load(changing.other_weights)
    first = ask(changing.server, prompt)
    assert (first.tokens, first.cached_tokens) == (new.tokens, 0)
    hits_again(changing.server, prompt, new, "the new weights' pages to be stored")

    for weights, truth in ((changing.weights, old), (changing.other_weights, new)) * 2:
        changing.load(weights)
        back = ask(changing.server, prompt)
        assert (back.tokens, back.cached_tokens) == (truth.tokens, hits_of(TOKENS))
    changing.load(changing.weights)
    assert client.metric(changing.server.base_url, "vllm:lookaside_epochs_total") >= 5


@pytest.mark.parametrize("how", ["pause", "sleep 1", "sleep 2", "same weights"])
def test_a_pause_without_new_weights_keeps_the_cache(changing: Changing, how: str) -> None:
    prompt = model.prompt(TOKENS, 12)
    truth = ask(changing.server, prompt)
    hits_again(changing.server, prompt, truth, "all to be stored")
    what, _, level = how.partition(" ")
    if what == "pause":
        changing.post("/pause")
        changing.post("/resume")
    elif what == "sleep":
        changing.post("/sleep", level=level)
        changing.post("/wake_up")
    else:
        changing.load(changing.weights)
    kept = ask(changing.server, prompt)
    assert (kept.tokens, kept.cached_tokens) == (truth.tokens, hits_of(TOKENS))


def test_a_reset_clears_all_the_same(changing: Changing) -> None:
    prompt = model.prompt(TOKENS, 13)
    truth = ask(changing.server, prompt)
    hits_again(changing.server, prompt, truth, "all to be stored")
    client.reset_prefix_cache(changing.server.base_url, external=True)
    missed = ask(changing.server, prompt)
    assert (missed.tokens, missed.cached_tokens) == (truth.tokens, 0)


def test_an_operator_names_weights(changing: Changing) -> None:
    prompt = model.prompt(TOKENS, 14)
    truth = ask(changing.server, prompt)
    hits_again(changing.server, prompt, truth, "all to be stored")
    assert "named step-17" in changing.lookaside("weights", "step-17")
    assert changing.again(prompt).cached_tokens == 0
    hits_again(changing.server, prompt, truth, "all to be stored in the named epoch")
    (engine,) = json.loads(changing.lookaside("weights", "--json"))["engines"]
    assert engine["epoch"] == "step-17"
    changing.lookaside("weights", "")
    back = changing.again(prompt)
    assert (back.tokens, back.cached_tokens) == (truth.tokens, hits_of(TOKENS))
