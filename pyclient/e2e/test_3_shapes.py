"""Servers of other shapes: two ranks, ranks that hold the same bytes, next to no room, behind
MultiConnector, with MLA, with adapters, with speculation.

Each class has one or two servers of its own, which start at once, and ends them: all of them, with
those of ``pair``, would not fit into 24 GiB.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.stand import client, model
from examples.stand.processes import BINARY, Server, Sidecar, Stand, eventually

from .conftest import (
    PAGE,
    Pair,
    Stands,
    ask,
    computed,
    configured,
    counted,
    hits_again,
    hits_of,
    sessions,
    together,
)

LITTLE = {"arena_limit": "512M"}


@dataclass
class Shape:
    """A server, and the sidecars that were started for it, by rank."""

    stand: Stand
    server: Server
    sidecars: tuple[Sidecar, ...] = ()


def start_two_ranks(stand: Stand) -> Shape:
    """Two tensor-parallel ranks, a core and a sidecar each."""
    cores = sorted(os.sched_getaffinity(0))
    sidecars = (stand.sidecar(0, "tp", settings=LITTLE), stand.sidecar(1, "tp", settings=LITTLE))
    server = stand.server(
        "tp",
        connector=configured(stand.endpoint("tp")),
        arguments=["--tensor-parallel-size", "2"],
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )
    return Shape(stand, server, sidecars)


def start_one_head(stand: Stand) -> Shape:
    """Two tensor-parallel ranks of a model with one KV head, which both have, and one sidecar for
    the two."""
    cores = sorted(os.sched_getaffinity(0))
    sidecar = stand.sidecar(0, "all", settings=LITTLE)
    server = stand.server(
        "mqa",
        connector=configured(stand.endpoint("all").format(rank=0)),
        model=model.ensure("thin-mqa"),
        arguments=["--tensor-parallel-size", "2"],
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
    )
    return Shape(stand, server, (sidecar,))


def start_no_room(stand: Stand) -> Shape:
    """Twelve blocks; vLLM starts the sidecar itself, on the endpoint "auto"."""
    server = stand.server(
        "tight",
        connector=configured(
            stand.endpoint("auto"), autostart=True, arena_limit="512M", binary=str(BINARY)
        ),
        arguments=["--num-gpu-blocks-override", "12"],
        max_model_len=1024,
    )
    return Shape(stand, server)


def start_on(stand: Stand, endpoint: str) -> Shape:
    """Has the sidecar of another stand, which is there."""
    return Shape(stand, stand.server("next", connector=configured(endpoint)))


def status_of(endpoint: Path) -> dict[str, Any]:
    """What the sidecar with this directory says of itself, whoever started it."""
    address = (endpoint / "admin.addr").read_text().strip()
    return httpx.get(f"http://{address}/v1/status", timeout=30.0, trust_env=False).json()


def start_multi(stand: Stand) -> Shape:
    """Lookaside first, vLLM's ExampleConnector second."""
    sidecar = stand.sidecar(0, "multi", settings=LITTLE)
    example: dict[str, Any] = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(stand.directory / "example")},
    }
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [configured(stand.endpoint("multi")), example]},
    }
    return Shape(stand, stand.server("multi", connector=connector), (sidecar,))


def start_mla(stand: Stand) -> Shape:
    """A model with multi-head latent attention."""
    sidecar = stand.sidecar(0, "mla", settings=LITTLE)
    server = stand.server(
        "mla",
        connector=configured(stand.endpoint("mla")),
        model=model.ensure("mla"),
        arguments=["--dtype", "bfloat16"],  # where the CPU has AMX, vLLM has no MLA in float32
    )
    return Shape(stand, server, (sidecar,))


def write_adapter(base: Path, directory: Path, seed: int) -> Path:
    """A LoRA adapter of a model, with random weights that are large enough to change its
    answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    queries = config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(queries, 8, generator=generator)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    return directory


def start_with_adapter(seed: int) -> Callable[[Stand], Shape]:
    """A server whose adapter "l" has the weights of this seed."""

    def start(stand: Stand) -> Shape:
        adapter = write_adapter(stand.model, stand.directory / f"adapter-{seed}", seed)
        server = stand.server(
            f"lora-{seed}",
            connector=configured(stand.endpoint("lora")),
            arguments=["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"l={adapter}"],
        )
        return Shape(stand, server)

    return start


def start_speculating(
    name: str, speculation: dict[str, Any], of: str = "thin"
) -> Callable[[Stand], Shape]:
    """A server that drafts three tokens at a time, with a model of this kind."""

    def start(stand: Stand) -> Shape:
        given = json.dumps({"num_speculative_tokens": 3, **speculation})
        server = stand.server(
            name,
            connector=configured(stand.endpoint("drafts")),
            model=model.ensure(of),
            arguments=["--speculative-config", given],
        )
        return Shape(stand, server)

    return start


@contextmanager
def started(stand: Stand, *start: Callable[[Stand], Shape]) -> Iterator[list[Shape]]:
    """Servers of some shapes, started at once."""
    with stand:
        shapes = [each(stand) for each in start]
        for shape in shapes:
            shape.server.wait_ready()
        yield shapes


@pytest.fixture(scope="class")
def ranks_and_room(small_model: Path, stands: Stands, logs: Path | None) -> Iterator[list[Shape]]:
    # The one without room as a user's command starts it: its engine and worker are spawned.
    with stands(small_model) as warm, Stand(small_model, logs) as cold:
        room, ranks = start_no_room(cold), start_two_ranks(warm)
        for shape in (ranks, room):
            shape.server.wait_ready()
        yield [ranks, room]


@pytest.fixture
def two_ranks(ranks_and_room: list[Shape]) -> Shape:
    return ranks_and_room[0]


@pytest.fixture
def no_room(ranks_and_room: list[Shape]) -> Shape:
    return ranks_and_room[1]


@pytest.fixture(scope="class")
def one_head(small_model: Path, stands: Stands) -> Iterator[Shape]:
    with started(stands(small_model), start_one_head) as shapes:
        yield shapes[0]


@pytest.fixture(scope="class")
def multi_and_mla(small_model: Path, stands: Stands) -> Iterator[list[Shape]]:
    with started(stands(small_model), start_multi, start_mla) as shapes:
        yield shapes


@pytest.fixture
def multi(multi_and_mla: list[Shape]) -> Shape:
    return multi_and_mla[0]


@pytest.fixture
def mla(multi_and_mla: list[Shape]) -> Shape:
    return multi_and_mla[1]


def counters(sidecar: Sidecar) -> tuple[int, int]:
    """Pages stored and loaded since the sidecar started."""
    lines = [
        line.split()
        for line in sidecar.get("/metrics").text.splitlines()
        if not line.startswith("#")
    ]
    values = {line[0]: float(line[1]) for line in lines if len(line) == 2}
    return int(values["lookaside_stored_pages_total"]), int(values["lookaside_loaded_pages_total"])


def page_of(server: Server, prompt: list[int]) -> int:
    """The server's block in tokens, from what it hits of its own cache."""
    again = ask(server, prompt)
    return max(
        size for size in (16, 32, 64, 128) if hits_of(len(prompt), size) == again.cached_tokens
    )


class TestTwoRanksAndNoRoom:
    def test_every_rank_loads_its_own_half(self, two_ranks: Shape) -> None:
        for tokens in (300, 1500):
            prompt = model.prompt(tokens, 50_000 + tokens)
            truth = computed(two_ranks.server, prompt)
            assert ask(two_ranks.server, prompt).tokens == truth.tokens
            hits_again(two_ranks.server, prompt, truth, "hits in both ranks' sidecars")

    def test_what_one_rank_lacks_is_no_hit(self, two_ranks: Shape) -> None:
        """The second rank's sidecar restarts empty; then both hold it again."""
        prompt = model.prompt(1000, 51_000)
        truth = computed(two_ranks.server, prompt)
        ask(two_ranks.server, prompt)
        second = two_ranks.sidecars[1]
        second.signal(signal.SIGKILL)
        second.wait(30)
        client.reset_prefix_cache(two_ranks.server.base_url)
        without = ask(two_ranks.server, prompt)
        assert (without.tokens, without.cached_tokens) == (truth.tokens, 0)
        (second.endpoint / "directory").unlink()  # or it would find its arena again
        restarted = two_ranks.stand.sidecar(1, "tp", settings=LITTLE)
        eventually(
            lambda: sessions(restarted) == 2, "both roles' sessions with the second rank's sidecar"
        )
        client.reset_prefix_cache(two_ranks.server.base_url)
        empty = ask(two_ranks.server, prompt)
        assert (empty.tokens, empty.cached_tokens) == (truth.tokens, 0)
        hits_again(two_ranks.server, prompt, truth, "hits once both ranks hold it")

    @pytest.mark.parametrize("turn", [0, 1])
    def test_preempted_requests_answer_the_same(
        self, no_room: Shape, pair: Pair, turn: int
    ) -> None:
        """Twelve blocks for four requests that need sixteen: they preempt each other."""
        # The second turn finds the first turn's prompts in the sidecar, and still has no room.
        prompts = [model.prompt(350, 52_000 + number) for number in range(4)]
        truths = [ask(pair.plain, prompt, 60) for prompt in prompts]
        before = client.metric(no_room.server.base_url, "vllm:num_preemptions_total")

        def preempted() -> bool:
            answers = together(no_room.server, prompts, 60)
            assert [answer.tokens for answer in answers] == [truth.tokens for truth in truths]
            return client.metric(no_room.server.base_url, "vllm:num_preemptions_total") > before

        def hit() -> bool:
            client.reset_prefix_cache(no_room.server.base_url)
            return ask(no_room.server, prompts[0]).cached_tokens == hits_of(350)

        if turn == 0:
            eventually(preempted, "four that run at once")
        else:
            preempted()
            eventually(hit, "a hit")

    def test_vllm_finds_the_connector_by_its_name(self, no_room: Shape) -> None:
        """The short form is all that the server was given, by `python -m`, and it hits."""
        command = Path(f"/proc/{no_room.server.popen.pid}/cmdline").read_text()
        assert "LookasideConnector" in command
        assert "kv_connector_module_path" not in command
        prompt = model.prompt(500, 53_001)
        hits_again(no_room.server, prompt, computed(no_room.server, prompt), "a hit")

    def test_the_started_sidecar_is_there_and_restarts(self, no_room: Shape) -> None:
        endpoint = Path(no_room.stand.endpoint("auto").format(rank=0))
        pid = int((endpoint / "lock").read_text().split()[0])
        prompt = model.prompt(500, 53_000)
        truth = computed(no_room.server, prompt)
        os.kill(pid, signal.SIGKILL)
        assert ask(no_room.server, prompt).tokens == truth.tokens

        def another() -> bool:
            text = (endpoint / "lock").read_text().split()
            return bool(text) and int(text[0]) != pid

        eventually(another, "a new sidecar to be started")
        started = int((endpoint / "lock").read_text().split()[0])
        assert os.sched_getaffinity(started) == os.sched_getaffinity(0), "bound to a core of vLLM's"
        hits_again(no_room.server, prompt, truth, "hits in the new sidecar")

    def test_the_started_sidecar_outlives_its_servers(
        self, no_room: Shape, small_model: Path, stands: Stands
    ) -> None:
        """SIGTERM to the server that started it, then to all processes of one that found it. Uses
        no_room up."""
        endpoint = Path(no_room.stand.endpoint("auto").format(rank=0))
        pid = (endpoint / "lock").read_text()
        prompt = model.prompt(700, 53_001)
        truth = computed(no_room.server, prompt)
        ask(no_room.server, prompt)
        hits_again(no_room.server, prompt, truth, "a hit before the server ends")
        no_room.server.signal(signal.SIGTERM)
        no_room.server.wait(120)
        with started(
            stands(small_model), lambda stand: start_on(stand, no_room.stand.endpoint("auto"))
        ) as (following,):
            eventually(
                lambda: len(status_of(endpoint)["sessions"]) == 2,
                "both sessions of the next server",
            )
            found = ask(following.server, prompt)
            assert (found.tokens, found.cached_tokens) == (truth.tokens, hits_of(700))
            os.killpg(following.server.pid, signal.SIGTERM)
            following.server.wait(120)
        eventually(lambda: not status_of(endpoint)["sessions"], "a sidecar that serves nobody")
        assert (endpoint / "lock").read_text() == pid
        assert status_of(endpoint)["slots"]["ready"] > 0


class TestOneHead:
    """Both ranks hold the same bytes: they store them once, and load all of them."""

    def test_pages_are_stored_once_and_loaded_twice(self, one_head: Shape) -> None:
        (sidecar,) = one_head.sidecars
        eventually(
            lambda: sessions(sidecar) == 3,
            "the sessions of two workers and of the scheduler for both",
        )
        least = most = loaded = 0  # pages
        for tokens in (300, 1500):
            prompt = model.prompt(tokens, 56_000 + tokens)
            truth = computed(one_head.server, prompt)
            assert ask(one_head.server, prompt).tokens == truth.tokens
            hits_again(one_head.server, prompt, truth, "a hit")
            least += hits_of(tokens) // PAGE
            most += 2 * (tokens // PAGE)  # with the salt, which nothing waits for, and without
            loaded += 2 * (hits_of(tokens) // PAGE)  # by both ranks
            eventually(lambda want=loaded: counters(sidecar)[1] >= want, f"{loaded} pages loaded")
            assert least <= counters(sidecar)[0] <= most
        status = sidecar.status()
        assert len(status["spaces"]) == 1
        token = model.kv_bytes_per_token(model.model_dir("thin-mqa"))
        assert status["spaces"][0]["page_bytes"] == PAGE * token, "of all KV heads, which are one"


class TestMultiAndMLA:
    def test_winner_and_loser(self, multi: Shape, pair: Pair) -> None:
        prompt = model.prompt(1000, 54_000)
        truth = ask(pair.plain, prompt)
        first = ask(multi.server, prompt)
        client.reset_prefix_cache(multi.server.base_url)
        again = ask(multi.server, prompt)
        assert (first.tokens, again.tokens) == (truth.tokens, truth.tokens)
        assert again.cached_tokens == hits_of(1000)

    def test_hits_are_loaded(self, mla: Shape) -> None:
        """MLA with AMX is not deterministic even with vLLM's own cache alone, so outputs prove
        nothing here."""
        prompt = model.prompt(1000, 55_000)
        ask(mla.server, prompt)
        if "amx_tile" not in Path("/proc/cpuinfo").read_text():
            # Where the CPU has no AMX, vLLM turns prefix caching off for MLA, and with it the
            # connector.
            assert ask(mla.server, prompt).cached_tokens == 0
            assert mla.sidecars[0].status()["sessions"] == []
            return
        page = page_of(mla.server, prompt)
        client.reset_prefix_cache(mla.server.base_url)
        again = ask(mla.server, prompt)
        assert again.cached_tokens == hits_of(1000, page)
        assert page <= PAGE


@pytest.fixture(scope="class")
def adapters(small_model: Path, stands: Stands) -> Iterator[list[Shape]]:
    stand = stands(small_model)
    stand.sidecar(0, "lora", settings=LITTLE)
    with started(stand, start_with_adapter(1), start_with_adapter(2)) as shapes:
        yield shapes


class TestAdapters:
    """Two servers on one sidecar, whose adapters have the same name and other weights."""

    def test_adapters_of_one_name_do_not_share(self, adapters: list[Shape]) -> None:
        one, other = (shape.server for shape in adapters)
        prompt = model.prompt(1000, 57_000)
        truths = [computed(server, prompt, model="l") for server in (one, other)]
        assert truths[0].tokens != truths[1].tokens, "the adapters change nothing"
        assert ask(one, prompt, model="l").tokens == truths[0].tokens
        hits_again(one, prompt, truths[0], "what the first has stored", model="l")
        foreign = ask(other, prompt, model="l")
        assert (foreign.tokens, foreign.cached_tokens) == (truths[1].tokens, 0)
        hits_again(other, prompt, truths[1], "what the second has stored", model="l")
        hits_again(one, prompt, truths[0], "what the first has stored, still", model="l")

    def test_without_an_adapter_all_is_shared(self, adapters: list[Shape]) -> None:
        one, other = (shape.server for shape in adapters)
        prompt = model.prompt(1000, 57_001)
        truth = computed(one, prompt)
        assert ask(one, prompt).tokens == truth.tokens
        hits_again(other, prompt, truth, "what the other has stored")

    def test_another_seed_is_named_in_both_logs(self, adapters: list[Shape]) -> None:
        """A server that shares nothing with those that are there, because its PYTHONHASHSEED
        differs."""
        one, other = adapters
        other.server.end()
        seeded = one.stand.server(
            "seeded", connector=configured(one.stand.endpoint("lora")), env={"PYTHONHASHSEED": "1"}
        )
        seeded.wait_ready()
        fix = "start all with the same PYTHONHASHSEED"
        eventually(lambda: fix in seeded.log.read_text(), "the warning in the new server's log")
        eventually(
            lambda: fix in one.server.log.read_text(),
            "the warning in the log of the one that was there",
        )
        prompt = model.prompt(1000, 57_002)
        truth = computed(one.server, prompt)
        hits_again(one.server, prompt, truth, "what the first has stored")
        first = ask(seeded, prompt)
        assert (first.tokens, first.cached_tokens) == (truth.tokens, 0)


@pytest.fixture(scope="class")
def drafting(small_model: Path, stands: Stands) -> Iterator[list[Shape]]:
    stand = stands(small_model)
    stand.sidecar(0, "drafts", settings=LITTLE)
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4}
    itself = {"method": "draft_model", "model": str(small_model)}
    with started(
        stand, start_speculating("ngram", ngram), start_speculating("draft", itself)
    ) as shapes:
        yield shapes


@pytest.fixture(scope="class")
def eagle(small_model: Path, stands: Stands) -> Iterator[Shape]:
    stand = stands(small_model)
    stand.sidecar(0, "drafts", settings=LITTLE)
    head = {"method": "eagle", "model": str(model.ensure("eagle"))}
    with started(stand, start_speculating("eagle", head, "hybrid")) as shapes:
        yield shapes[0]


def drafts_of(server: Server) -> tuple[float, float]:
    """Tokens drafted so far, and accepted."""
    metrics = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    drafted, accepted = (counted(server, name) for name in metrics)
    return drafted, accepted


class TestSpeculation:
    @pytest.mark.parametrize("which", [0, 1])
    def test_hits_answer_the_same(self, drafting: list[Shape], pair: Pair, which: int) -> None:
        server = drafting[which].server
        before = drafts_of(server)
        for tokens in (300, 1500):
            prompt = model.prompt(100, 58_000) * (tokens // 100)
            prompt[0] += which  # a prefix of its own
            truth = ask(pair.plain, prompt, 40)
            assert ask(server, prompt, 40).tokens == truth.tokens
            client.reset_prefix_cache(server.base_url)
            again = ask(server, prompt, 40)
            assert (again.tokens, again.cached_tokens) == (truth.tokens, hits_of(tokens))
        assert drafts_of(server)[0] > before[0], "nothing was drafted"

    def test_after_a_hit_drafts_are_as_good(self, drafting: list[Shape]) -> None:
        """The model drafts for itself. All its drafts are accepted as long as its own KV is
        there."""
        server = drafting[1].server
        prompt = model.prompt(1500, 58_100)
        for cached in (0, hits_of(1500)):
            drafted, accepted = drafts_of(server)
            answer = ask(server, prompt, 41)
            assert answer.cached_tokens == cached
            client.reset_prefix_cache(server.base_url)
            now = drafts_of(server)
            assert now[0] - drafted == now[1] - accepted == 30

    def test_pages_without_a_draft_model_are_not_hit_with_one(self, drafting: list[Shape]) -> None:
        prompt = model.prompt(1000, 58_200)
        ask(drafting[0].server, prompt)
        assert ask(drafting[1].server, prompt).cached_tokens == 0


class TestEagle:
    """An EAGLE head with random weights, of a model with sliding windows: no draft is right."""

    @pytest.mark.parametrize("tokens", [400, 1500])
    def test_a_hit_ends_one_page_earlier(self, eagle: Shape, tokens: int) -> None:
        server = eagle.server
        prompt = model.prompt(tokens, 59_000 + tokens)
        truth = computed(server, prompt, 16)
        assert ask(server, prompt, 16).tokens == truth.tokens
        own = ask(server, prompt, 16)
        client.reset_prefix_cache(server.base_url)
        again = ask(server, prompt, 16)
        assert again.tokens == own.tokens == truth.tokens
        assert again.cached_tokens == own.cached_tokens == (tokens // PAGE - 1) * PAGE
