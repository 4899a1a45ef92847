"""Weights that change: what is hit, stored and cleared then. vLLM's real Scheduler, and the calls
of its real EngineCore that change weights or pause."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lookaside import enginecalls, weights
from scheduling import (
    BLOCK,
    Stand,
    full_attention,
    make_config,
    make_kv_config,
    needs_whole_failures,
    sliding_window,
    tokens,
)
from vllm.v1.engine.core import EngineCore

PAGES = 8
PROMPT = tokens(PAGES * BLOCK + 1)


class Executor:
    """vLLM's executor, whose workers have weights by name."""

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = ranks
        self.weights: str | None = "first"  # None: they cannot be read
        self.is_sleeping = False
        self.looks = 0
        self.fails = False
        self.clock: Callable[[], None] = lambda: None  # lets time pass while they are looked at

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        if method is weights.digest_of:
            assert not self.is_sleeping, "looked at what is not in memory"
            self.looks += 1
            self.clock()
            if self.fails:
                raise RuntimeError("a worker fails")
            return [self.weights and f"{self.weights} {rank}" for rank in range(self.ranks)]
        if method == "reload_weights":
            self.weights = self.weights and kwargs["weights_path"]
        return [None] * self.ranks

    def sleep(self, level: int) -> None:
        self.is_sleeping = True
        if level == 2:
            self.weights = "garbage"

    def wake_up(self, tags: Any) -> None:
        self.is_sleeping = tags is not None and "kv_cache" not in tags

    def reset_mm_cache(self) -> None: ...

    def reset_encoder_cache(self) -> None: ...

    def get_kv_connector_handshake_metadata(self) -> None: ...


class Engine(EngineCore):
    """vLLM's engine, without processes and a model: its own pause, sleep and collective_rpc."""

    def __init__(self, config: Any, specs: Any = None, executor: Executor | None = None) -> None:
        self.model_executor: Any = executor or Executor()
        self.vllm_config = config
        self.batch_queue = None
        self.mm_receiver_cache = None
        kv_config = None if specs is None else make_kv_config(200, specs)
        self.stand = Stand(config, kv_config=kv_config)  # makes the Scheduler, as EngineCore does
        self.scheduler = self.stand.scheduler
        self.sidecars = self.stand.sidecars
        self.sidecars.epoch = config.kv_transfer_config.kv_connector_extra_config.get(
            "lookaside.weights_epoch", ""
        )

    @property
    def executor(self) -> Executor:
        return self.model_executor

    def load(self, name: str) -> None:
        """Load weights, as RL loops do; vLLM's own cache is not emptied by that."""
        self.collective_rpc("reload_weights", kwargs={"weights_path": name})

    def ask(self, prompt: list[int] = PROMPT, max_tokens: int = 4) -> int:
        """Serve a request that vLLM's own cache has nothing of; return how many pages it loads."""
        self.stand.forget_local()
        return self.ask_on(prompt, max_tokens)

    def ask_on(self, prompt: list[int] = PROMPT, max_tokens: int = 4) -> int:
        """The same with what vLLM's own cache has."""
        before = len(self.stand.workers.loads)
        self.stand.add(prompt, max_tokens=max_tokens)
        self.stand.run()
        return sum(len(load.block_ids) for load in self.stand.workers.loads[before:])

    def epochs(self) -> Any:
        return self.stand.role.epochs


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """EngineCore as vLLM has it after the test."""
    for name in ("collective_rpc", "_reset_caches"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))
    yield


@pytest.fixture
def engine(model: Path) -> Engine:
    return Engine(make_config(model))


def test_weights_that_come_back_find_what_they_stored(engine: Engine) -> None:
    assert engine.ask() == 0 and engine.ask() == PAGES
    engine.load("second")
    assert engine.ask() == 0, "stale"
    assert engine.ask() == PAGES, "stored in the new epoch"
    second = engine.sidecars.epoch
    assert second.startswith("digest:")
    for name, epoch in (("first", ""), ("second", second)) * 2:
        engine.load(name)
        assert engine.ask() == PAGES and engine.sidecars.epoch == epoch
    assert not engine.sidecars.clears


def test_engines_with_the_same_weights_agree_on_their_name(model: Path) -> None:
    names = []
    for _ in range(2):
        engine = Engine(make_config(model))
        engine.load("second")
        engine.ask()
        names.append(engine.sidecars.epoch)
    assert names[0] == names[1] != ""


def test_the_workers_are_told_the_epoch_in_every_step(engine: Engine) -> None:
    engine.load("second")
    engine.stand.add(PROMPT)
    batch = engine.stand.schedule()
    assert batch.meta.epoch == engine.sidecars.epoch != ""


@pytest.mark.parametrize("how", ["pause", "keep", "sleep 1", "rpc", "same"])
def test_what_leaves_the_weights_as_they_are_keeps_the_cache(engine: Engine, how: str) -> None:
    engine.ask()
    what, _, level = how.partition(" ")
    if what == "sleep":
        engine.sleep(int(level))
        assert not engine.sidecars.available and engine.executor.is_sleeping
        engine.wake_up(["weights"])
        assert engine.executor.is_sleeping, "waking one part is not waking"
        engine.wake_up(["kv_cache"])
    elif what in ("pause", "keep"):
        engine.pause_scheduler("keep" if what == "keep" else "abort")
        engine.resume_scheduler()
    elif what == "rpc":
        engine.collective_rpc("a_method_of_an_extension")
    else:
        engine.load("first")
    assert not engine.sidecars.available, "nothing is asked before the weights are known"
    assert engine.ask() == PAGES
    assert not engine.sidecars.clears and engine.sidecars.epoch == ""


def test_sleep_that_drops_the_weights(engine: Engine) -> None:
    """What was stored is found once the weights are back, and garbage finds nothing."""
    engine.ask()
    engine.sleep(2)
    engine.wake_up()
    assert engine.ask() == 0, "vLLM computes with whatever is in memory"
    engine.load("first")
    assert engine.ask() == PAGES
    assert not engine.sidecars.clears


def test_calls_that_cannot_change_weights_cost_nothing(engine: Engine) -> None:
    looks = engine.executor.looks
    for method in ("profile", "save_sharded_state", "list_loras"):
        engine.collective_rpc(method)
    assert engine.sidecars.available and engine.executor.looks == looks


def test_many_calls_take_one_digest_at_the_end(engine: Engine) -> None:
    engine.ask()
    looks = engine.executor.looks
    for number in range(100):
        engine.load(f"bucket {number}")
    assert engine.executor.looks == looks + 1, "before the first"
    engine.ask()
    assert engine.executor.looks == looks + 2


def test_digests_take_a_bounded_share_of_the_time(engine: Engine) -> None:
    """Weights that change between any two steps are not looked at in each."""

    def pass_time() -> None:
        engine.stand.clock += 1.0

    engine.executor.clock = pass_time
    engine.load("second")
    engine.ask()
    looks = engine.executor.looks
    for number in range(5):
        engine.load(f"other {number}")
        assert engine.ask(tokens(99, seed=number)) == 0
    assert engine.executor.looks <= looks + 2 and not engine.sidecars.available
    engine.stand.clock += 10.0
    engine.ask()
    assert engine.sidecars.available


def test_a_reset_clears_and_looks(engine: Engine) -> None:
    """Whoever resets the cache may have changed the weights in a way that nobody sees."""
    engine.ask()
    engine.executor.weights = "second"
    assert engine.reset_prefix_cache(reset_connector=True)
    assert engine.sidecars.clears == 1 and not engine.sidecars.held
    assert engine.ask() == 0 and engine.sidecars.epoch.startswith("digest:")


@pytest.mark.parametrize("how", ["pause", "rpc"])
def test_weights_that_changed_unseen_clear_what_was_stored_since(engine: Engine, how: str) -> None:
    engine.ask()
    engine.executor.weights = "second"  # as by a trainer in the same process
    if how == "pause":
        engine.pause_scheduler()
        engine.resume_scheduler()
    else:
        engine.load("third")
    assert engine.sidecars.clears == 1
    assert engine.ask() == 0
    engine.load("first")
    assert engine.ask() == 0, "it was stored with nobody knows which weights"


@pytest.mark.parametrize("reason", ["unreadable", "failing", "a rank is missing"])
def test_weights_that_cannot_be_compared(model: Path, reason: str) -> None:
    """A pause clears; a call of the workers begins an epoch that does not come back."""
    executor = Executor(2 if reason == "a rank is missing" else 1)
    if reason == "unreadable":
        executor.weights = None
    executor.fails = reason == "failing"
    engine = Engine(make_config(model), executor=executor)
    engine.ask()
    engine.pause_scheduler()
    engine.resume_scheduler()
    assert engine.sidecars.clears == 1 and engine.ask() == 0
    seen = set()
    for _ in range(3):
        engine.load("first")
        assert engine.ask() == 0
        seen.add(engine.sidecars.epoch)
    assert len(seen) == 3


def test_weights_that_are_not_watched(model: Path) -> None:
    engine = Engine(make_config(model, {"lookaside.watch_weights": False}))
    engine.ask()
    engine.collective_rpc("reload_weights", kwargs={"weights_path": "second"})
    assert not engine.executor.looks
    engine.pause_scheduler()
    engine.resume_scheduler()
    assert engine.sidecars.clears == 1 and engine.ask() == 0 and engine.sidecars.epoch == ""


def test_a_vllm_whose_engine_cannot_be_followed(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(enginecalls, "_NEEDED", ("a_method_of_another_vllm",))
    engine = Engine(make_config(model))
    assert "cannot be followed" in caplog.text
    engine.ask()
    engine.pause_scheduler()
    engine.resume_scheduler()
    assert engine.sidecars.clears == 1 and not engine.executor.looks and engine.ask() == 0


def test_an_operator_names_weights(engine: Engine) -> None:
    engine.ask()
    engine.sidecars.named = "step-17"
    assert engine.ask() == 0 and engine.sidecars.epoch == "step-17"
    assert engine.ask() == PAGES
    engine.sidecars.named = ""
    assert engine.ask() == PAGES and engine.sidecars.epoch == ""


def test_a_name_stands_for_the_weights_that_have_it(engine: Engine) -> None:
    """Named before the engine goes on; weights that come back have their name again."""
    engine.ask()
    engine.load("second")
    engine.sidecars.named = "two"
    assert engine.ask() == 0 and engine.sidecars.epoch == "two"
    engine.load("first")
    assert engine.ask() == PAGES and engine.sidecars.epoch == ""
    engine.load("second")
    assert engine.ask() == PAGES and engine.sidecars.epoch == "two"


def test_the_first_epoch_may_have_a_name(model: Path) -> None:
    engine = Engine(make_config(model, {"lookaside.weights_epoch": "base"}))
    engine.ask()
    engine.load("second")
    engine.ask()
    engine.load("first")
    assert engine.ask() == PAGES and engine.sidecars.epoch == "base"


def running(engine: Engine) -> str:
    """A request that decodes, of which chunks were stored."""
    request_id = engine.stand.add(PROMPT, max_tokens=12 * BLOCK)
    for _ in range(3 * BLOCK):
        engine.stand.step()
    assert engine.sidecars.held
    return request_id


def test_what_mixed_weights_compute_is_stored_in_neither_epoch(engine: Engine) -> None:
    running(engine)
    old = dict(engine.sidecars.held)
    engine.load("second")
    engine.stand.add(tokens(BLOCK + 1, seed=5))  # has the weights looked at
    engine.stand.run()
    mixed = {
        digest for digest in engine.sidecars.held if digest not in engine_names(engine, seed=5)
    }
    assert engine.sidecars.epoch and not mixed
    assert engine.sidecars.others[""] == old


def engine_names(engine: Engine, seed: int) -> set[bytes]:
    """The names of the pages of a request with this prompt."""
    prompt = tokens(BLOCK + 1, seed=seed)
    return {
        bytes(digest)
        for request in engine.stand.requests.values()
        if list(request.prompt_token_ids or ())[: BLOCK + 1] == prompt
        for digest in request.block_hashes
    }


def test_a_false_alarm_goes_on_with_what_is_running(engine: Engine) -> None:
    running(engine)
    had = len(engine.sidecars.held)
    engine.collective_rpc("a_method_of_an_extension")
    engine.stand.add(tokens(BLOCK + 1, seed=5))
    engine.stand.run()
    assert len(engine.sidecars.held) > had + 4, "the rest was stored"


@pytest.mark.parametrize("windows", [False, pytest.param(True, marks=needs_whole_failures)])
def test_what_vllm_kept_of_old_weights_is_not_stored(model: Path, windows: bool) -> None:
    """vLLM's own cache still has blocks of the old weights, and requests build on them."""
    specs = [full_attention(), sliding_window(40)] if windows else [full_attention()]
    engine = Engine(make_config(model), specs)
    engine.ask()
    engine.load("second")
    assert engine.ask_on(PROMPT + tokens(6 * BLOCK, seed=7)) == 0
    assert not engine.sidecars.held and engine.sidecars.epoch
    assert engine.ask() == 0, "emptied"
    assert engine.sidecars.held, "what begins anew is stored"


def test_requests_wait_a_moment_for_sessions_that_move(engine: Engine) -> None:
    """And no longer: a sidecar may be away."""
    engine.ask()
    engine.load("second")
    engine.sidecars.reachable = False
    engine.stand.add(PROMPT)
    engine.stand.step()
    assert not engine.scheduler.running, "it waits"
    engine.stand.clock += 600.0
    engine.stand.run()
    engine.load("first")
    engine.stand.forget_local()
    engine.stand.add(PROMPT)
    engine.stand.step()
    assert not engine.scheduler.running
    engine.sidecars.reachable = True
    before = len(engine.stand.workers.loads)
    engine.stand.run()
    assert len(engine.stand.workers.loads) > before, "a hit at once"


def test_an_engine_that_is_not_vllms_is_left_alone(model: Path) -> None:
    stand = Stand(make_config(model))
    assert EngineCore.collective_rpc(  # type: ignore[arg-type]
        SimpleNamespace(model_executor=Executor(), scheduler=stand.scheduler), "reload_weights",
        None, (), {"weights_path": "x"},
    ) == [None]  # fmt: skip


# ---- digests ----


class Linear(torch.nn.Module):
    """A linear layer as vLLM has it on a CPU: packed, with an empty parameter."""

    def __init__(self, weight: torch.Tensor, packed: bool = True) -> None:
        super().__init__()
        self.input_size_per_partition = weight.shape[1]
        self.kept = lambda: weight  # not a tensor that torch sees
        if packed:
            self.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, weight, bias)
        self.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)


def network(seed: int = 0, packed: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A model with parameters, a buffer and a packed layer."""
    generator = torch.Generator().manual_seed(seed)
    norm = torch.nn.LayerNorm(96)
    norm.register_buffer("scale", torch.ones(3))
    weight = torch.randn(33, 300, generator=generator).to(dtype)
    table = torch.randn(64, 96, generator=generator).to(dtype)
    return torch.nn.Sequential(
        torch.nn.Embedding.from_pretrained(table), norm, Linear(weight, packed)
    )


def digest_of(model: Any, draft: Any = None) -> str | None:
    worker = SimpleNamespace(get_model=lambda: model, get_draft_model=lambda: draft)
    return weights.digest_of(worker)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_is_of_all_that_a_model_computes_with(dtype: torch.dtype) -> None:
    model = network(dtype=dtype)
    before = digest_of(model)
    assert before == digest_of(copy.deepcopy(model)) == digest_of(network(dtype=dtype))
    assert isinstance(before, str) and before != digest_of(network(1, dtype=dtype))
    seen = {before, digest_of(model, draft=network(2)), digest_of(model, draft=network(3))}
    changes: list[Callable[[Any], torch.Tensor]] = [
        lambda m: m[0].weight.data[3, 4:5],
        lambda m: m[1].scale,
        lambda m: m[1].bias.data,
        lambda m: m[2].kept()[32, 299:],
    ]
    for change in changes:
        other = network(dtype=dtype)
        change(other).add_(2.0**-5)
        seen.add(digest_of(other))
    assert len(seen) == 3 + len(changes)


def test_a_transposed_matrix_is_told_apart() -> None:
    def of(tensor: torch.Tensor) -> str:
        return weights.digest(iter([("w", tensor)]))

    matrix = torch.arange(12.0).view(3, 4)
    transposed = torch.arange(12.0).view(4, 3).t()
    assert of(transposed) != of(matrix) and of(transposed) == of(transposed.clone())
    assert of(matrix[:, ::2]) == of(matrix[:, ::2].clone()), "with gaps"


def test_a_weight_that_cannot_be_read_has_no_digest() -> None:
    assert digest_of(network(packed=False)) is None


def test_matrices_that_vllm_derives_count() -> None:
    model = network()
    model[1].W_UV = torch.ones(4, 4)
    one = digest_of(model)
    model[1].W_UV[2, 2] = 2.0
    assert digest_of(model) != one


def test_sums_on_a_device_tell_bytes_and_places_apart() -> None:
    def sums(data: torch.Tensor) -> tuple[int, ...]:
        return tuple(int(each) for each in weights._device_sums(data))

    data = torch.arange(-(1 << 12), 0, dtype=torch.int64).view(torch.uint8)
    seen = {sums(data), sums(data[:-1]), sums(data[8:]), sums(data.flip(0))}
    for at in (0, 7, 9, len(data) - 1):
        for bit in (1, 128):
            other = data.clone()
            other[at] ^= bit
            seen.add(sums(other))
    swapped = data.view(torch.int64).clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    seen.add(sums(swapped.view(torch.uint8)))
    assert len(seen) == 4 + 8 + 1
    assert sums(data[8:]) == sums(data[8:].clone()), "wherever it lies"
    assert sums(data[3:]) == sums(data[3:].clone())


def test_sums_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.frombuffer(bytearray(hashlib.shake_128(b"x").digest(1 << 14)), dtype=torch.uint8)
    whole = [int(each) for each in weights._device_sums(data)]
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1 << 10)
    assert [int(each) for each in weights._device_sums(data)] == whole
