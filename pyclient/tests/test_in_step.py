"""Loads within the step: vLLM's Scheduler, real workers and a real sidecar, and what can fail."""

from __future__ import annotations

import random
from typing import Any

import pytest
from lookaside import wire
from lookaside.connection import Pending
from lookaside.copies import finished
from lookaside.scheduler import in_step
from scheduling import BLOCK, Batch, make_config, tokens
from test_engine import BINARY, Engine, engines, sidecars

__all__ = ["engines", "sidecars"]

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")

IN_STEP = {"lookaside.load_in_step_ms": 1000, "lookaside.load_in_step_share": 1.0}
PROMPT = tokens(9 * BLOCK + 3)


def prime(engine: Engine) -> None:
    """Have the engine measure long steps and fast copies, so that every load fits its step."""
    engine.role.pace._steps.extend([10.0] * 64)
    engine.role.pace._copies.extend([(1000, 0.001)] * 16)


def primed(engines: Any, extra: dict[str, Any] = IN_STEP, **kwargs: Any) -> Engine:
    """An engine whose sidecar has the prompt, that has measured steps and copies."""
    engine = engines(extra=extra, **kwargs)
    engine.ask(PROMPT)
    engine.forget_local()
    prime(engine)
    return engine


def ordered(batch: Batch) -> list[str]:
    return [load.request_id for load in batch.meta.loads if load.in_step]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("others", [0, 4])
def test_a_short_load_costs_no_step(engines, tp, others):
    engine = primed(engines, tp=tp)
    for seed in range(others):
        engine.add(tokens(20, seed=seed + 5), max_tokens=100)
    for _ in range(3 * bool(others)):
        engine.step()
    late = engine.add(PROMPT)
    batches = []
    while not (batches and late in batches[-1].tables):
        batches.append(engine.step())
    batch = batches[-1]
    assert ordered(batch) == [late] and batch.scheduled.num_scheduled_tokens[late] == 3
    assert len(engine.outputs[late]) == 1, "its first token is of the step that loads"
    engine.run()
    assert not engine.workers.invalid
    engine.settle()


def test_the_first_load_is_asynchronous_as_nothing_was_measured(engines):
    engine = engines(extra=IN_STEP)
    engine.ask(PROMPT)
    engine.forget_local()
    assert engine.ask(PROMPT)[1] == 9 and not engine.workers.loads[-1].in_step
    engine.forget_local()
    assert engine.ask(PROMPT)[1] == 9 and engine.workers.loads[-1].in_step


@pytest.mark.parametrize("why", ["long", "off", "seed", "spent", "steps", "not in memory"])
def test_what_is_loaded_asynchronously(engines, why, monkeypatch):
    engine = primed(engines)
    pace = engine.role.pace
    more = {}
    if why == "long":
        pace._copies.extend([(1, 10.0)] * 16)
    elif why == "off":
        monkeypatch.setattr(engine.role.in_step._pace, "fits_step", lambda *_: False)
    elif why == "seed":
        more["params"] = {"seed": 7}
    elif why == "steps":
        engine.add(tokens(20, seed=5), max_tokens=50)
        engine.step()
        pace._steps.clear()
        pace._steps.extend([1e-4] * 64)
    elif why == "spent":
        note = pace.note_step

        def spent(*arguments: Any) -> None:
            note(*arguments)
            pace._spent_s = 1.0

        monkeypatch.setattr(pace, "note_step", spent)
        engine.step()
    else:
        monkeypatch.setattr("lookaside.lookups.Lookup.in_memory", False)
    engine.add(PROMPT, **more)
    engine.run()
    assert engine.workers.loads and not any(load.in_step for load in engine.workers.loads)
    engine.settle()


def break_load(engine: Engine, rank: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next load within the step fail on a rank."""
    worker = engine.workers.roles[rank]._worker
    loads, link = worker.loads, worker.link
    if how == "no grant":
        monkeypatch.setattr("lookaside.worker.loads._IN_STEP_PATIENCE_S", 0.0)
        # The request is never sent.
        connection = link.session._connection
        monkeypatch.setattr(link.session, "submit", lambda _, late: Pending(connection, late))
    elif how == "refused":
        take: Any = wire.PrepareLoad
        monkeypatch.setattr(
            "lookaside.worker.loads.wire.PrepareLoad",
            lambda *a: take(*a[:3], bytes(16), *a[4:]),
        )
    elif how == "names":
        order = loads.order
        monkeypatch.setattr(
            loads,
            "order",
            lambda spec, after: (setattr(spec, "names", bytes(32)), order(spec, after)),
        )
    elif how == "region":
        monkeypatch.setattr(link.live.regions, "_regions", {})
    elif how == "closed":
        monkeypatch.setattr(link.live.regions, "acquire", lambda: None)
    elif how == "copy":
        monkeypatch.setattr(link.copies, "scatter_now", lambda *_: finished("injected"))
    elif how == "session":
        monkeypatch.setattr(link.session, "is_current", lambda _: False)
    elif how == "not connected":
        monkeypatch.setattr(link, "live", None)
    else:
        assert how == "not called"
        monkeypatch.setattr(worker, "start_load_kv", lambda: None)


HOW = [
    "no grant",
    "refused",
    "names",
    "region",
    "closed",
    "copy",
    "session",
    "not connected",
    "not called",
]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_a_load_that_fails_is_computed_in_the_next_step(engines, how, tp, monkeypatch):
    """The oracle of the engine checks what each step attends to, and what it saves."""
    engine = primed(engines, tp=tp)
    with monkeypatch.context() as patch:
        break_load(engine, tp - 1, how, patch)
        late = engine.add(PROMPT)
        batch = engine.step()
        while not batch.tables:
            batch = engine.step()
        assert ordered(batch) == [late] and engine.workers.invalid in (9, 9 * tp)
        assert not [save for save in batch.meta.saves if save.request_id == late]
        assert not engine.outputs[late], "what it computed does not count"
    batch = engine.step()
    assert batch.scheduled.num_scheduled_tokens[late] == len(PROMPT) and not batch.meta.loads
    engine.run()
    assert len(engine.outputs[late]) == 4 and engine.workers.invalid <= 9 * tp
    engine.forget_local()
    assert engine.ask(PROMPT)[1] == 9, "what the sidecar has is still right"
    engine.settle()


def test_no_load_within_the_step_is_waited_for_longer_than_load_timeout_ms(engines, monkeypatch):
    engine = primed(engines, {**IN_STEP, "lookaside.load_timeout_ms": 5000})
    monkeypatch.setattr("lookaside.worker.loads._GRANT_PATIENCE_S", 60.0)
    monkeypatch.setattr("lookaside.worker.loads._IN_STEP_PATIENCE_S", 60.0)
    loads = engine.workers.roles[0]._worker.loads
    load_now, wait, waits = loads.load_now, Pending.wait, []

    def watched() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Pending, "wait", lambda self, s: (waits.append(s), wait(self, s))[1])
            load_now()

    monkeypatch.setattr(loads, "load_now", watched)
    assert engine.ask(PROMPT)[1] == 9 and engine.workers.loads[-1].in_step
    assert 0 < max(waits) <= 5
    engine.settle()


def test_a_request_that_ends_in_the_step_whose_load_fails(engines, monkeypatch):
    """Neither vLLM's cache nor the sidecar's keeps what it computed."""
    engine = primed(engines)
    longer = PROMPT + tokens(5 * BLOCK, seed=9)
    with monkeypatch.context() as patch:
        break_load(engine, 0, "copy", patch)
        late = engine.add(longer)
        batch = engine.schedule()
        while not batch.tables:
            engine.complete(batch)
            batch = engine.schedule()
        assert ordered(batch) == [late]
        engine.abort(late)
        engine.complete(batch)
    again = engine.add(longer)
    engine.run()
    assert len(engine.outputs[again]) == 4
    engine.settle()


def test_nobody_shares_what_is_loaded_in_the_step(engines, monkeypatch):
    engine = primed(engines)
    with monkeypatch.context() as patch:
        break_load(engine, 0, "copy", patch)
        both = [engine.add(PROMPT), engine.add(PROMPT + tokens(40, seed=3))]
        batch = engine.step()
        while not batch.tables:
            batch = engine.step()
        assert len(ordered(batch)) == 1 and list(batch.tables) == ordered(batch)
    engine.run()
    assert [len(engine.outputs[each]) for each in both] == [4, 4]
    engine.settle()


def test_preempted_and_chunked(engines):
    """A request that was loaded in the step starts over, and one whose rest takes several steps."""
    engine = primed(engines, batched_tokens=32)
    longer = PROMPT + tokens(100, seed=9)
    late = engine.add(longer, max_tokens=20)
    batch = engine.step()
    while not batch.tables:
        batch = engine.step()
    assert ordered(batch) == [late] and batch.scheduled.num_scheduled_tokens[late] == 32
    for _ in range(5):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert len(engine.outputs[late]) == 20 and not engine.workers.invalid
    assert engine.ask(longer[:-1])[1] >= 0
    engine.settle()


@pytest.mark.parametrize("seed", range(4))
def test_history(engines, seed, monkeypatch):
    """Random prompts that share prefixes, with loads that fail now and then, and aborts."""
    rng = random.Random(seed)
    engine = primed(engines, batched_tokens=64)
    copies = engine.workers.roles[0]._worker.link.copies
    scatter_now = copies.scatter_now
    monkeypatch.setattr(
        copies,
        "scatter_now",
        lambda *a: finished("injected") if rng.random() < 0.4 else scatter_now(*a),
    )
    for _ in range(120):
        if rng.random() < 0.4 and len(engine.requests) - len(engine.finish_reasons) < 6:
            prompt = tokens(BLOCK * rng.randrange(1, 9)) + tokens(40, seed=rng.randrange(1, 3))
            engine.add(prompt, max_tokens=rng.randrange(1, 30))
        if rng.random() < 0.05 and engine.scheduler.running:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        if rng.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        engine.step()
    engine.run()
    assert any(load.in_step for load in engine.workers.loads)
    engine.settle()


def test_only_where_vllm_recovers(model):
    config = make_config(model)
    assert in_step.recovers(config)
    assert not in_step.recovers(make_config(model, async_scheduling=True))
    assert not in_step.recovers(make_config(model, pp=2))
    config.speculative_config = object()  # type: ignore[assignment]
    assert not in_step.recovers(config)


def test_not_with_the_v2_runner(model, monkeypatch):
    config = make_config(model)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert not in_step.recovers(config)
