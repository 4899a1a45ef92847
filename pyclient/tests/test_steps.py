"""What each path costs in steps: vLLM's Scheduler, real workers and real sidecars, step by step.

Steps are those between the one that first asks for a request's hit and the one that computes the
request. docs/in-step.md describes the paths.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_engine
from peer import until
from scheduling import BLOCK, Batch, make_config, tokens
from test_engine import (
    BINARY,
    PATIENT,
    Engine,
    Ranks,
    Sidecar,
    V2Ranks,
    engines,
    sidecars,
)
from test_in_step import IN_STEP, PROMPT, prime
from test_sidecar import status_of
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

__all__ = ["engines", "sidecars"]

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")

# All lookups are waited for in the call, and all hits that may be are loaded within the step. What
# is decoded is not saved: a save would wait for a sidecar that is stopped.
FAST = PATIENT | IN_STEP | {"lookaside.save_decode": False}
# No load happens within the step.
LATER = FAST | {"lookaside.load_in_step_ms": 0}


class Steps:
    """Counts the steps of each request of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.again: dict[str, int] = defaultdict(int)
        """How often vLLM was told to ask again, by request."""
        self.costs: dict[str, list[int]] = defaultdict(list)
        """The steps of each time that a request was asked for and computed."""
        self._asked: dict[str, int] = {}
        """The step that first asked, of requests that are not computed yet."""
        self._scheduled, self._completed = 0, -len(engine.under_way)
        self._ask, engine.role.get_num_new_matched_tokens = (
            engine.role.get_num_new_matched_tokens,
            self._noted_ask,
        )
        schedule, complete = engine.schedule, engine.complete

        def counted_schedule() -> Batch:
            self._scheduled += 1
            return schedule()

        def counted_complete(batch: Batch) -> None:
            complete(batch)
            self._completed += 1  # batches complete in their order
            self._note_computed(batch)

        engine.schedule, engine.complete = counted_schedule, counted_complete  # type: ignore[method-assign]

    def _noted_ask(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self._asked.setdefault(request.request_id, self._scheduled)
        found = self._ask(request, computed)
        self.again[request.request_id] += found[0] is None
        return found

    def _note_computed(self, batch: Batch) -> None:
        for request_id, before in batch.before.items():
            # vLLM takes back what it computed upon a load that failed.
            if self.engine.requests[request_id].num_computed_tokens <= before:
                continue
            if request_id in self._asked:
                self.costs[request_id].append(self._completed - self._asked.pop(request_id))

    def until_computed(self, *requests: str) -> list[int]:
        """Step until each request was asked for and computed once more; return what each cost."""
        before = {each: len(self.costs[each]) for each in requests}
        deadline = time.monotonic() + 120
        while not all(len(self.costs[each]) > count for each, count in before.items()):
            assert time.monotonic() < deadline, "they are never computed"
            if not self.engine.step().tables:
                time.sleep(0.001)
        return [self.costs[each][-1] for each in requests]


def counted(engine: Engine, *prompts: list[int]) -> Steps:
    """Have the sidecars hold the prompts, and vLLM nothing; measure a pace that all loads fit."""
    for prompt in prompts:
        engine.ask(prompt)
    engine.forget_local()
    prime(engine)
    return Steps(engine)


def decode(engine: Engine, requests: int = 1) -> list[str]:
    """Have some requests decode from now on, and return them."""
    found = [engine.add(tokens(20, seed=50 + i), max_tokens=3000) for i in range(requests)]
    until(lambda: engine.step() and all(engine.outputs[each] for each in found))
    prime(engine)
    return found


def finish(engine: Engine, *decoding: str) -> None:
    """End what decodes, then all others."""
    for each in decoding:
        engine.abort(each)
    engine.drain()
    engine.run()
    engine.settle()


def outlast_loads(engine: Engine) -> None:
    """Have each forward of a step that orders loads take longer than they do."""
    forward = engine.workers.forward

    def long_forward(batch: Batch, rank: int) -> None:
        if any(not load.in_step for load in batch.meta.loads):
            until(lambda: engine.workers.roles[rank]._worker.reports._received)
        forward(batch, rank)

    engine.workers.forward = long_forward  # type: ignore[method-assign]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("others", [0, 3])
def test_a_hit_within_the_step_and_a_miss_cost_none(engines, tp, others):
    engine = engines(extra=FAST, tp=tp)
    steps = counted(engine, PROMPT)
    decoding = decode(engine, others)
    hit, miss = engine.add(PROMPT), engine.add(tokens(3 * BLOCK, seed=9))
    assert steps.until_computed(hit, miss) == [0, 0]
    assert [load.in_step for load in engine.workers.loads] == [True]
    assert not steps.again[hit] and not steps.again[miss] and not engine.workers.invalid
    finish(engine, *decoding)


@pytest.mark.parametrize("is_async, cost", [(False, 1), (True, 2)])
@pytest.mark.parametrize("workers", [Ranks, V2Ranks])
def test_an_asynchronous_load_shorter_than_its_step_costs_one(engines, workers, is_async, cost):
    """Two with asynchronous scheduling: vLLM has scheduled a step before it reads the report."""
    engine = engines(extra=LATER, workers=workers, async_scheduling=is_async)
    steps = counted(engine, PROMPT)
    decoding = decode(engine)
    outlast_loads(engine)
    late = engine.add(PROMPT)
    assert steps.until_computed(late) == [cost]
    assert len(engine.workers.loads) == 1 and not steps.again[late]
    finish(engine, *decoding)


def test_an_answer_after_the_call_costs_one(engines, sidecars):
    engine = engines(extra=FAST | {"lookaside.lookup_wait_ms": 10})
    steps = counted(engine, PROMPT)
    decoding = decode(engine)
    sidecars[0].signal(signal.SIGSTOP)
    late = engine.add(PROMPT)
    until(lambda: engine.step() and steps.again[late])
    told, answer = steps.again[late], engine.role.requests[late].asked.lookup
    sidecars[0].signal(signal.SIGCONT)
    until(lambda: answer.poll() is not None)
    assert steps.until_computed(late) == [told]
    assert told == steps.again[late] == 1 and engine.workers.loads[-1].in_step
    finish(engine, *decoding)


def test_who_shares_what_is_loaded_within_the_step_waits_for_one(engines):
    engine = engines(extra=FAST)
    steps = counted(engine, PROMPT)
    both = [engine.add(PROMPT), engine.add(PROMPT)]
    assert steps.until_computed(*both) == [0, 1]
    assert len(engine.workers.loads) == 1, "the second one hits vLLM's own cache"
    finish(engine)


@pytest.mark.parametrize("same", [False, True])
def test_64_requests_at_once(engines, monkeypatch, same):
    """Half of them hit, all of them prefixes of their own or one that they share; one step computes
    all that share nothing."""
    monkeypatch.setattr(test_engine, "BLOCKS", 512)
    engine = engines(extra=FAST, max_seqs=64, batched_tokens=8192)
    hits = [tokens(4 * BLOCK + 1, seed=100 + i * (not same)) for i in range(32)]
    steps = counted(engine, *hits)
    added = [
        engine.add(prompt, max_tokens=2)
        for i, hit in enumerate(hits)
        for prompt in (hit, tokens(2 * BLOCK, seed=200 + i))
    ]
    costs = steps.until_computed(*added)
    assert costs[1::2] == [0] * 32
    assert costs[::2] == ([0] + [1] * 31 if same else [0] * 32)
    assert len(engine.workers.loads) == (1 if same else 32)
    assert not engine.workers.invalid
    finish(engine)


# ---- tiers and peers ----


def with_disk(sidecar: Sidecar, directory: Path) -> None:
    """Start a sidecar anew with a disk tier."""
    sidecar.kill()
    sidecar.arguments = (
        "--disk", f"{directory}:64M:slab=8M:load_timeout=60s:store_timeout=120s",
        "--cascade-partial-delay", "1ms", "--lookup-deadline", "60s",
    )  # fmt: skip
    sidecar.start()
    sidecar.wait_serving()


def forget_memory(sidecar: Sidecar, pages: int) -> None:
    """Wait until a sidecar's disk has so many pages, and start it anew: its memory has none."""
    until(lambda: status_of(sidecar.endpoint)["tiers"][0]["pages"] == pages, 60)
    sidecar.signal(signal.SIGTERM)
    assert sidecar.process is not None and sidecar.process.wait(120) is not None
    sidecar.start()
    sidecar.wait_serving()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_hit_from_a_disk_costs_as_long_as_it_takes_to_come_up(engines, sidecars, tmp_path, tp):
    """Each step of it is one in which vLLM was told to ask again: none is lost after that.

    With two ranks the other one has the pages in its memory, and answers at once.
    """
    with_disk(sidecars[tp - 1], tmp_path / "disk")
    extra = FAST | {"lookaside.promotion_timeout_ms": 60_000}
    first = engines(extra=extra, tp=tp)
    first.ask(PROMPT)
    first.shutdown()
    forget_memory(sidecars[tp - 1], 9)
    engine = engines(extra=extra, tp=tp)
    steps = counted(engine)
    decoding = decode(engine)
    late = engine.add(PROMPT)
    (cost,) = steps.until_computed(late)
    assert cost == steps.again[late]
    assert engine.workers.loads[-1].in_step and len(engine.workers.loads[-1].block_ids) == 9
    finish(engine, *decoding)


def test_a_hit_that_a_peer_lends_costs_what_an_asynchronous_load_does(engines, sidecars):
    owner, engine = (
        engines(extra=FAST | {"lookaside.endpoint": str(each.endpoint)}) for each in sidecars
    )
    steps = counted(engine)
    decoding = decode(engine)
    outlast_loads(engine)
    seeds = itertools.count(100)

    def is_lent() -> bool:
        """Whether a prompt that the other engine stores is loaded: what a peer holds is known a
        little later, and a loan that takes long is a miss."""
        prompt = tokens(9 * BLOCK + 3, seed=next(seeds))
        owner.ask(prompt)
        late = engine.add(prompt)
        (cost,) = steps.until_computed(late)
        loads = [load for load in engine.workers.loads if load.request_id == late]
        assert cost == steps.again[late] + len(loads) and not any(load.in_step for load in loads)
        return any(len(load.block_ids) == 9 for load in loads)

    until(is_lent)
    finish(engine, *decoding)


# ---- sidecars that do not answer ----


def test_a_dead_sidecar_costs_none(engines, sidecars):
    """Before its end is noticed, and after that."""
    engine = engines(extra=FAST)
    steps = counted(engine, PROMPT)
    decoding = decode(engine)
    sidecars[0].kill()
    first = engine.add(PROMPT)
    assert steps.until_computed(first) == [0]
    until(lambda: not engine.role.setup.sidecars.available)
    second = engine.add(tokens(9 * BLOCK, seed=9))
    assert steps.until_computed(second) == [0]
    assert not engine.workers.loads and not steps.again[first] and not steps.again[second]
    finish(engine, *decoding)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("extra", [FAST, LATER])
def test_a_sidecar_that_dies_before_the_load_costs_one(engines, sidecars, extra, tp):
    engine = engines(extra=extra, tp=tp)
    steps = counted(engine, PROMPT)
    decoding = decode(engine)
    outlast_loads(engine)
    take = engine.role.update_state_after_alloc

    def die(*arguments: Any) -> None:
        sidecars[tp - 1].kill()
        take(*arguments)

    engine.role.update_state_after_alloc = die
    late = engine.add(PROMPT)
    assert steps.until_computed(late) == [1]
    (load,) = engine.workers.loads
    assert load.in_step == (extra is FAST) and engine.workers.invalid
    finish(engine, *decoding)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_stopped_sidecar_costs_its_deadline_once(engines, sidecars, tp):
    """vLLM is told to ask again until the deadline, while others decode; then the sidecar is
    suspect, and costs nothing."""
    short = {
        "lookaside.lookup_wait_ms": 10,
        "lookaside.lookup_timeout_ms": 50,
        "lookaside.store_timeout_ms": 15,
    }
    engine = engines(extra=FAST | short, tp=tp)
    steps = counted(engine, PROMPT)
    engine.role.setup.sidecars.sessions[tp - 1].wait_connected(60)
    decoding = decode(engine)
    sidecars[tp - 1].signal(signal.SIGSTOP)
    first = engine.add(PROMPT)
    begun = len(engine.outputs[decoding[0]])
    (cost,) = steps.until_computed(first)
    assert cost == steps.again[first] > 0
    assert len(engine.outputs[decoding[0]]) - begun == cost + 1, "the others go on"
    assert engine.counts["lookup_timeouts"] == 1, "without a further lookup"
    second = engine.add(tokens(9 * BLOCK, seed=9))
    assert steps.until_computed(second) == [0]
    assert not engine.workers.loads
    sidecars[tp - 1].signal(signal.SIGCONT)
    finish(engine, *decoding)


# ---- requests that end, come back or have two connectors ----


def crowd(engine: Engine, free: int) -> str:
    """Have a request compute and keep all but so many blocks."""
    hog = engine.add(tokens((test_engine.BLOCKS - 1 - free) * BLOCK - 8, seed=70), max_tokens=3000)
    until(lambda: engine.step() and engine.outputs[hog])
    prime(engine)
    return hog


@pytest.mark.parametrize("asked", [False, True])
def test_an_abort_between_the_lookup_and_the_load(engines, sidecars, asked):
    """It leaves no lease, and costs the next one nothing; asked: vLLM knows the hit, and has no
    room for it."""
    engine = engines(extra=FAST)
    steps = counted(engine, PROMPT)
    hog = crowd(engine, 2)
    late = engine.add(PROMPT)
    if asked:
        engine.step()
        assert engine.role.requests[late].asked.held == 9
    else:
        answer = engine.role.requests[late].asked.lookup
        until(lambda: answer.poll() is not None)
    assert status_of(sidecars[0].endpoint)["leases"]
    engine.abort(late)
    until(lambda: not status_of(sidecars[0].endpoint)["leases"])
    assert not engine.workers.loads and not steps.costs[late]
    finish(engine, hog)
    prime(engine)
    after = engine.add(PROMPT)
    assert steps.until_computed(after) == [0] and engine.workers.loads[-1].in_step
    finish(engine)


def test_a_preemption_of_what_was_loaded_within_the_step(engines):
    """It comes back as it came: a load within the step again, if vLLM has lost its blocks."""
    engine = engines(extra=FAST)
    steps = counted(engine, PROMPT)
    late = engine.add(PROMPT, max_tokens=20)
    assert steps.until_computed(late) == [0]
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert steps.until_computed(late) == [0]
    assert [load.in_step for load in engine.workers.loads] == [True, True]
    engine.run()
    assert len(engine.outputs[late]) == 20 and not engine.workers.invalid
    finish(engine)


def test_a_preemption_for_want_of_room(engines):
    """vLLM has what is left of its blocks, and it needs no load."""
    engine = engines(extra=FAST)
    steps = counted(engine, PROMPT)
    hog = crowd(engine, 10)
    late = engine.add(PROMPT, max_tokens=100)
    assert steps.until_computed(late) == [0] and engine.workers.loads[-1].in_step
    until(lambda: engine.step() and engine.requests[late].num_preemptions)
    engine.abort(hog)
    assert steps.until_computed(late) == [0]
    engine.run()
    assert len(engine.outputs[late]) == 100 and not engine.workers.invalid
    finish(engine)


class MultiRanks(Ranks):
    """Ranks whose connector is vLLM's MultiConnector."""

    connector = MultiConnector

    def __init__(self, config: Any, requests: dict[str, Any], kv_config: Any) -> None:
        super().__init__(config, requests, kv_config)
        for role in self.roles:
            (role._worker,) = filter(None, (getattr(c, "_worker", None) for c in role._connectors))

    def step(self, batch: Batch, rank: int) -> KVConnectorOutput:
        batch.wrap = None  # what the connector answers is wrapped already
        return super().step(replace(batch, meta=batch.scheduled.kv_connector_metadata), rank)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("place", [0, 1])
def test_within_a_multiconnector_nothing_costs_more(model, sidecars, place, tp):
    """Before and behind a connector that has no hit."""
    ours = {
        "kv_connector": "LookasideConnector",
        "kv_connector_module_path": "lookaside.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": FAST
        | {"lookaside.endpoint": str(sidecars[0].endpoint.parent / "rank-{rank}")},
    }
    other = {
        "kv_connector": "OtherConnector",
        "kv_connector_module_path": "other_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tokens": 0},
    }
    connectors = [other]
    connectors.insert(place, ours)
    config = make_config(
        model,
        tp=tp,
        connector={
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": connectors},
        },
    )
    engine = Engine(config, workers=MultiRanks)
    try:
        steps = counted(engine, PROMPT)
        decoding = decode(engine)
        hit, miss = engine.add(PROMPT), engine.add(tokens(3 * BLOCK, seed=9))
        assert steps.until_computed(hit, miss) == [0, 0]
        (load,) = engine.workers.loads
        assert load.request_id == hit and load.in_step and not engine.workers.invalid
        finish(engine, *decoding)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("pages", [0, 4])
def test_ranks_that_hold_different_prefixes(engines, sidecars, rank, pages):
    """One rank's sidecar has lost its memory, and has less since, or nothing."""
    first = engines(extra=FAST, tp=2)
    first.ask(PROMPT)
    first.shutdown()
    sidecars[rank].kill()
    sidecars[rank].start()
    sidecars[rank].wait_serving()
    engine = engines(extra=FAST, tp=2)
    steps = counted(engine, *[PROMPT[: pages * BLOCK + 1]][: bool(pages)])
    decoding = decode(engine)
    late = engine.add(PROMPT)
    assert steps.until_computed(late) == [0] and not steps.again[late]
    assert [len(load.block_ids) for load in engine.workers.loads] == [pages][: bool(pages)]
    assert all(load.in_step for load in engine.workers.loads) and not engine.workers.invalid
    finish(engine, *decoding)
