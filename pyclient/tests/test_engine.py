"""Both roles, vLLM's real Scheduler and the real sidecar: an engine without a model.

A forward writes into real KV tensors what each token's KV must be, and checks
all that it attends to; everything between is the product's own code. Needs
``bin/lookaside`` (``make build``).
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lookaside import space, wire
from lookaside.connection import SessionUnavailable
from lookaside.connector import LookasideConnector
from lookaside.prefill import PrefillRate
from peer import until
from readiness import ready
from scheduling import (
    BLOCK,
    WHOLE_FAILURES,
    Batch,
    Stand,
    contents,
    full_attention,
    make_config,
    make_kv_config,
    skip_if_idle,
    sliding_window,
    state,
    tokens,
)
from test_sidecar import status_of
from test_worker import SlowCopies
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput

from examples.stand.processes import send_signal

BINARY = Path(__file__).parents[2] / "bin" / "lookaside"
BLOCKS = 64
HYBRID = [full_attention(), sliding_window(40), sliding_window(24)]
STATES = [state(), full_attention(), state()]
# For histories with sidecars that are stopped: what waits for one keeps the test from letting it go
# on.
HURRIED = {
    "lookaside.lookup_timeout_ms": 1000,
    "lookaside.store_timeout_ms": 1000,
    "lookaside.reset_timeout_ms": 300,
}

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")


class Sidecar:
    """One `lookaside serve`, run by the command that wrap begins."""

    def __init__(self, endpoint: Path, *arguments: str, wrap: Sequence[str] = ()) -> None:
        self.endpoint = endpoint
        self.arguments = arguments
        self.wrap = wrap
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self.wrap, BINARY, "serve", "--runtime-dir", self.endpoint, "--arena-limit", "64M",
            "--arena-initial", "64M",
             "--arena-kind", "memfd", "--log-level", "warn", *self.arguments],
        )  # fmt: skip

    def wait_serving(self) -> None:
        """Wait until it accepts sessions and has memory."""
        until(lambda: ready(self.endpoint), 60)

    def signal(self, number: int) -> None:
        assert self.process is not None
        send_signal(self.process, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)


class Ranks:
    """The worker roles of one engine in this process, called in vLLM's order."""

    connector: type[Any] = LookasideConnector

    def __init__(self, config: Any, requests: dict[str, Any], kv_config: Any) -> None:
        self.requests = requests
        self.groups = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
        self.replicas = space.replicas(config, kv_config)
        parallel = config.parallel_config
        self.caches = []
        self.roles = []
        for rank in range(space.world(config).stage_size):
            mine = copy.copy(config)
            mine.parallel_config = copy.copy(parallel)
            mine.parallel_config.rank = rank
            # As in vLLM, all groups lie over the same memory: a block is one group's at a time.
            cache = torch.zeros(BLOCKS * self.groups[0].page_size_bytes // 4)
            views = [
                cache.view(BLOCKS, 1, 1, -1)[..., : spec.real_page_size_bytes // 4]
                if isinstance(spec, MambaSpec)
                else cache.view(BLOCKS, -1, spec.block_size, 32)
                for spec in self.groups
            ]
            role = self.connector(mine, KVConnectorRole.WORKER, kv_config)
            role.register_kv_caches({f"layer{number}": view for number, view in enumerate(views)})
            self.caches.append(views)
            self.roles.append(role)
        self.weights = (
            0  # what has a request's tokens be other KV; a reset of the cache goes with new ones
        )
        self.received: dict[str, int] = {}
        self.loads: list[Any] = []
        self.saves: list[Any] = []
        self.finished: set[str] = set()
        self.invalid = 0
        self.failed = 0

    def run(self, batch: Batch) -> KVConnectorOutput:
        self.loads += batch.meta.loads
        self.saves += batch.meta.saves
        output = KVConnectorOutput(finished_recving=set())
        folded = None
        for rank in range(len(self.roles)):
            one = self.step(batch, rank)
            for request_id in one.finished_recving or ():
                self.received[request_id] = self.received.get(request_id, 0) + 1
                if self.received[request_id] == len(self.roles):
                    del self.received[request_id]
                    assert output.finished_recving is not None
                    output.finished_recving.add(request_id)
                    self.failed += request_id in getattr(one, "failed_recving", ())
            if WHOLE_FAILURES:
                output.failed_recving |= one.failed_recving
            self.invalid += len(one.invalid_block_ids)
            output.invalid_block_ids |= one.invalid_block_ids
            answer = one.kv_connector_worker_meta
            if answer is not None:
                folded = answer if folded is None else folded.aggregate(answer)
        output.kv_connector_worker_meta = folded
        return output

    def step(self, batch: Batch, rank: int) -> KVConnectorOutput:
        """One rank's step, in the order of vLLM's V1 model runner."""
        role, output = self.roles[rank], KVConnectorOutput()
        role.handle_preemptions(batch.meta)
        role.bind_connector_metadata(batch.meta)
        in_step = batch.scheduled.has_sync_kv_loads
        if in_step:
            role.start_load_kv(None)
        self.forward(batch, rank)
        if not in_step:
            role.start_load_kv(None)
        role.wait_for_save()
        finished = batch.scheduled.finished_req_ids
        if WHOLE_FAILURES:
            results = role.get_transfer_results(finished)
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
        else:
            _, output.finished_recving = role.get_finished(finished)
        output.invalid_block_ids = role.get_block_ids_with_load_errors()
        output.kv_connector_worker_meta = role.build_connector_worker_meta()
        role.clear_connector_metadata()
        return output

    def forward(self, batch: Batch, rank: int) -> None:
        worker = self.roles[rank]._worker
        in_step = (each.spec.block_ids for each in worker.loads._in_step)
        invalid = worker.reports._invalid_blocks.union(*in_step)
        for request_id, count in batch.scheduled.num_scheduled_tokens.items():
            before = batch.before[request_id]
            if batch.scheduled.has_sync_kv_loads and invalid & set(batch.tables[request_id][0]):
                for position in range(before, before + count):  # garbage from garbage
                    page, offset = divmod(position, BLOCK)
                    self.caches[rank][0][batch.tables[request_id][0][page], :, offset] = -1.0
                continue
            for number, (spec, cache) in enumerate(
                zip(self.groups, self.caches[rank], strict=True)
            ):
                table, window = (
                    batch.tables[request_id][number],
                    getattr(spec, "sliding_window", None),
                )
                own = rank // self.replicas / 2 + number / 8
                values = [
                    float(hash((v, self.weights)) % (1 << 19)) + own
                    for v in contents(self.requests[request_id])
                ]
                if isinstance(spec, MambaSpec):
                    source, target = (
                        (before - 1) // spec.block_size,
                        (before + count - 1) // spec.block_size,
                    )
                    assert not before or bool((cache[table[source]] == values[before - 1]).all()), (
                        f"{request_id}: a wrong state of group {number} at {before}"
                    )
                    cache[table[target]] = values[before + count - 1]
                    continue
                for position in range(max(0, before - window + 1) if window else 0, before):
                    page, offset = divmod(position, spec.block_size)
                    got = cache[table[page], :, offset]
                    assert table[page] and bool((got == values[position]).all()), (
                        f"{request_id}: wrong KV of group {number} at {position} of {before}"
                    )
                for position in range(before, before + count):
                    page, offset = divmod(position, spec.block_size)
                    cache[table[page], :, offset] = values[position]

    def shutdown(self) -> None:
        for role in self.roles:
            role.shutdown()


class V2Ranks(Ranks):
    """The same in the order, and in the forward contexts, of vLLM's V2 model runner: execute_model
    and sample_tokens.

    The runner itself needs Triton, which has no backend for CPUs; what it calls the connector
    through is its own.
    """

    def __init__(self, config: Any, requests: dict[str, Any], kv_config: Any) -> None:
        super().__init__(config, requests, kv_config)
        module = pytest.importorskip("vllm.v1.worker.gpu.kv_connector")
        self.config = config
        self.connectors = []
        for role in self.roles:
            with mock.patch.object(module, "get_kv_transfer_group", lambda role=role: role):
                self.connectors.append(
                    module.ActiveKVConnector(config, {})
                )  # they are registered already

    def step(self, batch: Batch, rank: int) -> KVConnectorOutput:
        connector, scheduled = self.connectors[rank], batch.scheduled
        if not scheduled.total_num_scheduled_tokens:
            return connector.no_forward(scheduled).kv_connector_output or KVConnectorOutput()
        with set_forward_context({}, self.config, num_tokens=scheduled.total_num_scheduled_tokens):
            connector.pre_forward(scheduled)
            self.forward(batch, rank)
        if hasattr(connector, "finish_forward"):  # from vLLM 0.30 on
            connector.finish_forward()
        return connector.post_forward(scheduled.finished_req_ids)


class Engine(Stand):
    """A Stand whose workers and sidecars are real."""

    patience_s = 60.0  # with a sidecar that lives

    def __init__(
        self, config: Any, specs: list[Any] | None = None, workers: type[Ranks] = Ranks
    ) -> None:
        requests: dict[str, Any] = {}
        kv_config = make_kv_config(BLOCKS, specs)
        ranks = workers(config, requests, kv_config)  # as in vLLM, before the scheduler
        super().__init__(config, kv_config=kv_config, real=True)
        self.columns = len(self.workers.columns)
        self.requests = requests
        self.workers = ranks  # type: ignore[assignment]
        self.connect()

    def connect(self, patience_s: float = 60.0) -> None:
        """Wait until every session is up."""
        deadline = time.monotonic() + patience_s
        while not self.role.setup.sidecars.available or any(
            s.suspect for s in self.role.setup.sidecars.sessions
        ):
            assert time.monotonic() < deadline, "the sidecars do not answer"
            time.sleep(0.01)

    def ask(self, prompt: list[int], **kwargs: Any) -> tuple[str, int]:
        """Serve one request; how many pages were loaded for it."""
        before = len(self.workers.loads)
        request_id = self.add(prompt, **kwargs)
        self.run()
        return request_id, sum(
            len(load.block_ids) // self.columns for load in self.workers.loads[before:]
        )

    def run(self, limit: int = 20000) -> int:
        for steps in range(limit):
            if not self.scheduler.has_requests():
                self.heard()
                return steps
            if not self.step().scheduled.num_scheduled_tokens:
                time.sleep(0.001)
        raise AssertionError("not done")

    def reset(self) -> None:
        """What vLLM does for /pause and /sleep: wait until nothing runs, then empty all caches.

        vLLM's own refusals aside: it fails while blocks are held, as by saves that have just begun.
        """
        while self.scheduler.has_requests():
            self.step()
            time.sleep(0.001)
        assert self.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        ), "/pause fails"

    def ask_without(self, prompt: list[int], **kwargs: Any) -> int:
        """ask, of a sidecar that need not answer: how many pages were loaded."""
        before = len(self.workers.loads)
        self.add(prompt, **kwargs)
        while self.scheduler.has_requests():
            self.step()
            time.sleep(0.001)
        return sum(len(load.block_ids) // self.columns for load in self.workers.loads[before:])

    def heard(self) -> None:
        """Wait until the sidecars have heard all commits: lookups go over other sockets, and may
        overtake them."""
        for role in self.workers.roles:
            session = role._worker.link.session
            with contextlib.suppress(SessionUnavailable):
                session.submit(
                    lambda number: wire.PrepareLoad(number, 1, 1, bytes(16), 0, 1, bytes(32))
                ).wait(self.patience_s)  # refused

    def settle(self) -> None:
        """Nothing pinned, nobody loading."""
        assert not self.role.saves.pins and not self.role.requests and not self.role.loads.blocks
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1

    def shutdown(self) -> None:
        self.connector.shutdown()
        self.workers.shutdown()


def hits_again(engine: Engine, prompt: list[int]) -> bool:
    """Whether all of a prompt is loaded.

    Of a new sidecar that becomes true once all sessions are there, and workers have mapped its
    memory and stored.
    """
    engine.forget_local()
    return engine.ask(prompt)[1] == (len(prompt) - 1) // BLOCK


@pytest.fixture
def sidecars(tmp_path: Path, ended: list[Sidecar]) -> list[Sidecar]:
    ended += [Sidecar(tmp_path / f"rank-{rank}") for rank in range(2)]
    for each in ended:
        each.wait_serving()
    return ended


@pytest.fixture
def engines(model: Path, sidecars: list[Sidecar]) -> Iterator[Any]:
    made: list[Engine] = []

    def make(**kwargs: Any) -> Engine:
        # A bound for the test's answers, not for the product's: the machine is shared.
        extra = {
            "lookaside.endpoint": str(sidecars[0].endpoint.parent / "rank-{rank}"),
            "lookaside.lookup_timeout_ms": 60_000,
            "lookaside.store_timeout_ms": 60_000,
            "lookaside.load_timeout_ms": 60_000,
            "lookaside.load_in_step_ms": 0,  # most tests are of asynchronous loads
            **kwargs.pop("extra", {}),
        }
        specs, workers = kwargs.pop("specs", None), kwargs.pop("workers", Ranks)
        skip_if_idle(specs)
        made.append(Engine(make_config(model, extra, **kwargs), specs, workers))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("specs", [None, HYBRID])
def test_two_engines_share_every_prefix(engines, tp, specs):
    one, other = engines(tp=tp, specs=specs), engines(tp=tp, specs=specs)
    prompt = tokens(13 * BLOCK + 5)
    assert one.ask(prompt, max_tokens=2 * BLOCK)[1] == 0
    assert other.ask(prompt)[1] == 13
    # A prefix that parts in the middle of a chunk, and a longer one. vLLM has these itself, but not
    # their windows: of those it has what the longer prompt's end reaches.
    assert other.ask(tokens(6 * BLOCK) + tokens(99, seed=4))[1] == (6 if specs else 0)
    one.forget_local()
    assert one.ask(tokens(6 * BLOCK) + tokens(99, seed=4))[1] == 12
    one.forget_local()
    whole = prompt + next(iter(one.outputs.values()))
    assert one.ask(whole + tokens(40, seed=7))[1] == (len(whole) - 1) // BLOCK
    for engine in (one, other):
        assert engine.workers.invalid == 0
        engine.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_two_engines_share_states(engines, tp):
    one, other = (engines(tp=tp, specs=STATES, states=True) for _ in range(2))
    prompt = tokens(13 * BLOCK + 5)
    assert one.ask(prompt, max_tokens=2 * BLOCK)[1] == 0
    assert other.ask(prompt)[1] == 13 + 2
    other.forget_local()
    assert other.ask(tokens(6 * BLOCK) + tokens(99, seed=4))[1] == 0, (
        "no step of the prefill ended so early"
    )
    whole = prompt + next(iter(one.outputs.values()))
    other.forget_local()
    assert other.ask(whole + tokens(40, seed=7))[1] == (len(whole) - 1) // BLOCK + 2
    for engine in (one, other):
        assert engine.workers.failed == engine.workers.invalid == 0
        engine.settle()


@pytest.mark.parametrize("workers", [Ranks, V2Ranks])
@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_that_computes_waits_for_a_load(engines, monkeypatch, workers, is_async):
    """One that does not waits a little: vLLM would ask again at once, on the cores that copy."""
    engine = engines(workers=workers, async_scheduling=is_async)
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.forget_local()
    role = engine.workers.roles[0]._worker
    slow = role.link.copies = SlowCopies(role.link.copies)
    monkeypatch.setattr("lookaside.worker.reports._IDLE_STEP_PATIENCE_S", 0.01)
    waited: list[int] = []  # tokens computed in steps that waited
    step, wait_for = engine.workers.step, role.reports._ended.wait_for

    def noted(batch: Batch, rank: int) -> KVConnectorOutput:
        role.reports._ended.wait_for = lambda *arguments: (
            waited.append(batch.scheduled.total_num_scheduled_tokens),
            wait_for(*arguments),
        )
        return step(batch, rank)

    engine.workers.step = noted
    decoding = engine.add(tokens(BLOCK, seed=4), max_tokens=2000)
    engine.step()
    engine.add(prompt, request_id="loads")
    until(lambda: engine.step() and slow.tickets)
    before = len(engine.outputs[decoding])
    until(lambda: engine.step() and len(engine.outputs[decoding]) >= before + 10)
    assert role.reports._out and not waited, "a step that decodes waited for a load"
    engine.abort(decoding)
    until(lambda: engine.step() and len(waited) >= 3)
    assert not any(waited)
    slow.error = "the test has no bytes for it"
    role.link.copies = slow.inner

    def is_answered() -> bool:
        slow.finish()  # also those that began a moment ago
        engine.step()
        return len(engine.outputs.get("loads", ())) == 4

    until(is_answered)
    engine.run()
    assert engine.workers.invalid
    engine.settle()


def test_a_restarted_engine_finds_what_it_stored(engines):
    prompt = tokens(9 * BLOCK + 1)
    first = engines()
    first.ask(prompt)
    first.shutdown()
    assert engines().ask(prompt)[1] == 9


def test_reset_is_for_everybody(engines):
    one, other = engines(tp=2), engines(tp=2)
    prompt = tokens(9 * BLOCK + 1)
    one.ask(prompt)
    assert other.scheduler.reset_prefix_cache(reset_connector=True)
    one.forget_local()
    assert one.ask(prompt)[1] == 0


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("how", ["killed", "stopped", "killed after it"])
def test_reset_without_the_sidecar_forgets_what_it_brings_back(
    engines, sidecars, tmp_path, how, tp
):
    """Killed, it recovers from its disk what was there before; stopped, it still has it. Neither
    may be hit.

    Killed when it had cleared, it must recover nothing.
    """
    for rank in range(tp):
        sidecars[rank].kill()
        sidecars[rank].arguments = (
            "--disk", f"{tmp_path / f'disk-{rank}'}:64M:slab=8M", "--cascade-partial-delay", "1ms",
            "--lookup-deadline", "60s",
        )  # fmt: skip
        sidecars[rank].start()
        sidecars[rank].wait_serving()
    extra = {"lookaside.reset_timeout_ms": 300, "lookaside.promotion_timeout_ms": 60_000}
    engine, other = (engines(tp=tp, extra=extra) for _ in range(2))
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    if how != "stopped":
        # What it loses with its memory comes back from the disk.
        for each in sidecars[:tp]:
            each.signal(signal.SIGTERM)
        for each in sidecars[:tp]:
            assert each.process is not None and each.process.wait(120) is not None
            each.start()
        engine.connect()
        until(lambda: hits_again(engine, prompt), 120)
    if how == "killed":
        sidecars[0].kill()
        until(lambda: not engine.role.setup.sidecars.available)
    elif how == "stopped":
        sidecars[0].signal(signal.SIGSTOP)
    engine.reset()
    if how == "killed after it":
        until(lambda: engine.role.setup.sidecars.available)
        sidecars[0].kill()
        until(lambda: not engine.role.setup.sidecars.available)
    engine.workers.weights = other.workers.weights = 1
    assert engine.ask_without(prompt) == 0, "and it is served"
    if how == "stopped":
        sidecars[0].signal(signal.SIGCONT)
    else:
        sidecars[0].start()
    for each in (engine, other):
        each.connect()
    engine.forget_local()
    assert engine.ask(prompt)[1] == 0
    until(lambda: hits_again(engine, prompt))
    assert other.ask(prompt)[1] == 9
    assert not list(sidecars[0].endpoint.glob("void-*"))
    engine.settle()


def test_what_an_engine_could_not_clear_the_next_one_does(engines, sidecars):
    prompt = tokens(9 * BLOCK + 1)
    first = engines(extra={"lookaside.reset_timeout_ms": 300})
    first.ask(prompt)
    sidecars[0].signal(signal.SIGSTOP)
    first.reset()
    # As if it was killed: what it has sent, the sidecar may or may not read.
    first.shutdown()
    sidecars[0].signal(signal.SIGCONT)
    second = engines()
    second.workers.weights = 1
    assert second.ask(prompt)[1] == 0
    assert hits_again(second, prompt)
    assert not list(sidecars[0].endpoint.glob("void-*"))


def test_a_lease_that_ended_in_the_queue_fails_no_load(engines, sidecars):
    """The request was looked up as it came, and waits longer for its turn than its lease lasts."""
    sidecars[0].kill()
    sidecars[0].arguments = ("--lookup-lease", "500ms")
    sidecars[0].start()
    sidecars[0].wait_serving()
    engine = engines(max_seqs=1, policy="fail")
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.forget_local()
    hog = engine.add(tokens(BLOCK, seed=4), max_tokens=2000)
    engine.step()
    engine.add(prompt, request_id="waits")
    asked = engine.role.requests["waits"].asked
    session = engine.workers.roles[0]._worker.link.session

    def lease() -> str:
        """What the sidecar answers to a load of a page that the lookup has not: not_found once its
        lease has ended."""
        (ref,) = asked.lookup.refs
        return (
            session.submit(lambda number: wire.PrepareLoad(number, *ref, 99, 1, bytes(32)))
            .wait(60)
            .code
        )

    (link,) = engine.role.setup.sidecars._lookups._links.present
    until(
        lambda: select.select([link.fileno()], [], [], 0)[0]
    )  # it has answered, and nobody has looked
    until(lambda: lease() == "not_found")
    engine.abort(hog)
    engine.run()
    assert engine.workers.invalid == engine.workers.failed == 0
    assert len(engine.outputs["waits"]) == 4 and str(engine.finish_reasons["waits"]) == "length"
    engine.settle()


def test_a_prompt_longer_than_a_lookup_may_be_is_hit_as_far_as_one_reaches(engines, sidecars):
    sidecars[0].kill()
    sidecars[0].arguments = ("--lookup-max-pages", "6")
    sidecars[0].start()
    sidecars[0].wait_serving()
    engine = engines()
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.forget_local()
    request_id, pages = engine.ask(prompt)
    assert pages == 6
    # Who asks for more is answered, too.
    lookups = engine.role.setup.sidecars._lookups
    lookup = lookups.start(0, b"", b"".join(engine.requests[request_id].block_hashes[:9]))
    until(lambda: lookup.poll() is not None)
    assert lookup.poll() == 6
    lookup.cancel()
    engine.settle()


def test_salts_do_not_share(engines):
    one, other = engines(), engines()
    prompt = tokens(9 * BLOCK + 1)
    one.ask(prompt, cache_salt="a")
    assert other.ask(prompt, cache_salt="b")[1] == 0
    assert other.ask(prompt)[1] == 0
    other.forget_local()
    assert other.ask(prompt, cache_salt="a")[1] == 9


def test_other_weights_do_not_share(engines, model):
    prompt = tokens(9 * BLOCK + 1)
    engines().ask(prompt)
    weights = model / "model.safetensors"
    weights.write_bytes(b"new")
    try:
        assert engines().ask(prompt)[1] == 0
    finally:
        weights.unlink()


def test_blocks_of_unlike_sizes(engines):
    """A page of 64 tokens has one block of full attention, and of each window the blocks that it
    can reach."""
    spec = full_attention()
    specs = [
        replace(spec, block_size=64),
        replace(sliding_window(20), num_kv_heads=8),
        replace(sliding_window(90, 32), num_kv_heads=4),
    ]
    one, other = engines(specs=specs), engines(specs=specs, batched_tokens=100)
    prompt = tokens(5 * 64 + 5)
    assert one.ask(prompt, max_tokens=70)[1] == 0
    whole = prompt + next(iter(one.outputs.values()))
    assert other.ask(whole)[1] == 6
    # It leaves the prefix within a page, at a hash that is not the page's.
    other.forget_local()
    assert other.ask(whole[: 3 * 64 + 2 * BLOCK] + tokens(80, seed=4))[1] == 3
    for engine in (one, other):
        engine.settle()


def test_a_window_with_no_other_group(engines):
    one, other = engines(specs=[sliding_window(40)]), engines(specs=[sliding_window(40)])
    prompt = tokens(9 * BLOCK + 1)
    one.ask(prompt)
    assert other.ask(prompt)[1] == 9
    (load,) = other.workers.loads
    assert [bool(block) for block in load.block_ids] == 6 * [False] + 3 * [True]


@pytest.mark.parametrize("specs", [HYBRID, [sliding_window(40)]])
def test_failed_loads_of_hybrids_start_over(engines, sidecars, specs):
    """The sidecar is gone between the hit and its load: the request as a whole fails, and no
    block."""
    engine = engines(specs=specs)
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.forget_local()
    take = engine.role.update_state_after_alloc

    def die(*arguments: Any) -> None:
        sidecars[0].kill()
        take(*arguments)

    engine.role.update_state_after_alloc = die
    request_id, pages = engine.ask(prompt)
    assert pages == 9 and len(engine.outputs[request_id]) == 4
    assert engine.workers.failed == 1 and engine.workers.invalid == 0
    engine.settle()
    sidecars[0].start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_sidecar_the_engine_serves_on(engines, sidecars, number):
    engine = engines(extra={"lookaside.lookup_timeout_ms": 20, "lookaside.store_timeout_ms": 15})
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.forget_local()
    sidecars[0].signal(number)
    for seed in range(3):
        request_id, pages = engine.ask(prompt if seed == 0 else tokens(150, seed=seed))
        assert len(engine.outputs[request_id]) == 4 and pages == 0
    engine.settle()
    if number == signal.SIGSTOP:
        sidecars[0].signal(signal.SIGCONT)
    else:
        sidecars[0].kill()
        sidecars[0].start()
    until(lambda: hits_again(engine, prompt))
    engine.settle()


def test_a_stall_shorter_than_a_tenth_of_the_prefill_is_no_miss(engines, sidecars):
    """With the default patience of 100 ms, and what vLLM takes known; a busy machine stalls for
    longer."""
    settings = {"lookaside.lookup_timeout_ms": 100, "lookaside.lookup_timeout_max_ms": 60_000}
    engine = engines(extra=settings)
    prompt = tokens(9 * BLOCK + 1)
    engine.ask(prompt)
    engine.role.pace.rate = PrefillRate()
    for _ in range(3):
        engine.role.pace.rate.add(BLOCK, 10.0 * BLOCK)
    engine.forget_local()
    sidecars[0].signal(signal.SIGSTOP)
    engine.add(prompt, request_id="patient")
    until(
        lambda: (
            engine.step() and time.monotonic() - engine.role.requests["patient"].asked.since > 0.3
        )
    )
    sidecars[0].signal(signal.SIGCONT)
    engine.run()
    assert len(engine.workers.loads) == 1 and len(engine.outputs["patient"]) == 4
    engine.settle()


@pytest.mark.parametrize(
    ("seed", "specs"), [(0, None), (1, None), (2, HYBRID), (3, HYBRID), (4, STATES)]
)
def test_random_histories_with_deaths(engines, sidecars, seed, specs):
    """Two engines at once, their sidecar killed, stopped and started at any moment."""
    rng = random.Random(seed)
    more: dict[str, Any] = {"specs": specs, "states": specs is STATES, "extra": HURRIED}
    pair = [engines(batched_tokens=100, max_seqs=4, **more) for _ in range(2)]
    stopped = dead = False
    for _ in range(400):
        roll = rng.random()
        engine = rng.choice(pair)
        if roll < 0.15:
            engine.add(
                tokens(rng.randrange(1, 12 * BLOCK), seed=rng.randrange(3)),
                max_tokens=rng.randrange(1, 20),
            )
        elif roll < 0.175:
            with contextlib.suppress(RuntimeError):
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        elif roll < 0.18:
            for each in pair:
                each.reset()
            for each in pair:
                each.workers.weights += 1
        elif roll < 0.19 and engine.scheduler.running:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        elif (dead or stopped) and roll < 0.30:
            if dead:
                sidecars[0].start()
            else:
                sidecars[0].signal(signal.SIGCONT)
            dead = stopped = False
        elif not (dead or stopped) and roll < 0.20:
            stopped = rng.random() < 0.5
            dead = not stopped
            if dead:
                sidecars[0].kill()
            else:
                sidecars[0].signal(signal.SIGSTOP)
        for each in pair:
            each.step()
        time.sleep(0.002)
    if dead:
        sidecars[0].start()
    if stopped:
        sidecars[0].signal(signal.SIGCONT)
    for engine in pair:
        engine.run()
        engine.settle()
        assert all(
            engine.outputs[r] or engine.requests[r].status.name == "FINISHED_ABORTED"
            for r in engine.outputs
        )
    # What they share is as good as before.
    one, other = pair
    for engine in pair:
        engine.connect()
    seeds = itertools.count(99)

    def shared() -> bool:
        """Whether one stores what other loads: a scheduler may be connected before its worker has
        all regions."""
        prompt = tokens(9 * BLOCK + 1, seed=next(seeds))
        one.ask(prompt)
        return other.ask(prompt)[1] == 9 + 2 * (specs is STATES)

    until(shared)
    other.settle()


def test_nothing_of_it_is_left(engines, sidecars, tmp_path):
    engine = engines()
    engine.ask(tokens(9 * BLOCK))
    engine.shutdown()
    deadline = time.monotonic() + 30
    while status_of(Path(sidecars[0].endpoint))["sessions"]:
        assert time.monotonic() < deadline, "the session outlives its client"
        time.sleep(0.02)


def asked_again(engine: Any) -> list[str]:
    """The requests that vLLM was told to ask again for, from now on: the list grows."""
    found: list[str] = []
    ask = engine.role.get_num_new_matched_tokens

    def noted(request: Any, computed: int) -> tuple[int | None, bool]:
        tokens, later = ask(request, computed)
        if tokens is None:
            found.append(request.request_id)
        return tokens, later

    engine.role.get_num_new_matched_tokens = noted
    return found


PATIENT = {"lookaside.lookup_wait_ms": 1000, "lookaside.lookup_wait_step_ms": 1000}


def test_hits_and_misses_are_known_in_the_call_that_asks(engines):
    """Of a single request, and of 64 that arrive at once."""
    engine = engines(extra=PATIENT, max_seqs=64)
    prompt = tokens(9 * BLOCK + 1)
    again = asked_again(engine)
    engine.ask(prompt)
    engine.forget_local()
    assert engine.ask(prompt)[1] == 9
    engine.forget_local()
    for i in range(64):
        engine.add(prompt if i % 2 else tokens(3 * BLOCK, seed=100 + i), max_tokens=1)
    engine.run()
    assert again == []
    engine.settle()


def test_a_stopped_sidecar_is_waited_for_once(engines, sidecars):
    engine = engines(extra=PATIENT | {"lookaside.lookup_timeout_ms": 60_000}, max_seqs=64)
    engine.ask(tokens(9 * BLOCK + 1))
    sidecars[0].signal(signal.SIGSTOP)
    waits: list[float] = []
    observe = engine.role.setup.stats.observe

    def noted(name: str, seconds: float) -> None:
        if name == "lookup_wait_seconds" and seconds > 0.5:
            waits.append(seconds)
        observe(name, seconds)

    engine.role.setup.stats.observe = noted
    for i in range(8):
        engine.add(tokens(3 * BLOCK, seed=200 + i), max_tokens=1)
    for _ in range(20):
        engine.step()
    assert len(waits) == 1
    sidecars[0].signal(signal.SIGCONT)
    engine.run()
    engine.settle()


NEW = itertools.count(301)  # seeds of prompts that nobody has asked for


def name_weights(engine: Engine, sidecar: Sidecar, epoch: str, weights: int) -> None:
    """Give an engine other weights, and have an operator name them at one of its sidecars."""
    client = str(engine.config.kv_transfer_config.engine_id)
    command = [BINARY, "weights", epoch, "--engine", client, "--runtime-dir", sidecar.endpoint]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    until(lambda: engine.role.setup.sidecars._named == epoch)
    engine.workers.weights = weights
    engine.forget_local()
    engine.ask(tokens(2 * BLOCK, seed=next(NEW)))  # with it the sessions move; never a hit
    engine.connect()
    # A scheduler may be welcomed a moment before its worker knows that it was.
    until(lambda: all(role._worker.link.session.connected for role in engine.workers.roles))
    engine.forget_local()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("specs", [None, HYBRID])
def test_engines_share_what_has_the_same_weights(engines, sidecars, tp, specs):
    """Each rank's sidecar has both epochs side by side; one of them has to be told."""
    one, other = engines(tp=tp, specs=specs), engines(tp=tp, specs=specs)
    prompt = tokens(13 * BLOCK + 5)
    assert one.ask(prompt)[1] == 0
    name_weights(one, sidecars[tp - 1], "two", 2)
    assert one.ask(prompt)[1] == 0, "other weights"
    assert hits_again(one, prompt)
    assert other.ask(prompt)[1] == 13, "the first epoch's"
    name_weights(other, sidecars[0], "two", 2)
    assert other.ask(prompt)[1] == 13, "the second epoch's"
    name_weights(one, sidecars[0], "", 0)
    assert one.ask(prompt)[1] == 13, "they are back"
    for engine in (one, other):
        assert engine.workers.invalid == engine.workers.failed == 0
        engine.settle()


def test_weights_change_while_a_load_is_under_way(engines, sidecars):
    """The load is of the old epoch, and its request is computed."""
    engine = engines()
    prompt = tokens(13 * BLOCK + 5)
    engine.ask(prompt)
    engine.forget_local()
    worker = engine.workers.roles[0]._worker
    slow = SlowCopies(worker.link.copies)
    worker.link.copies = slow
    engine.add(prompt)
    until(lambda: engine.step() and slow.tickets)  # a late answer orders the load in a later step
    name_weights_only(engine, sidecars[0], "two")
    engine.add(tokens(3 * BLOCK, seed=9))  # is scheduled in the new epoch
    for _ in range(50):
        engine.step()
    slow.finish()
    worker.link.copies = slow.inner
    engine.run()
    assert engine.workers.invalid == 13, "the load has failed"
    engine.connect()
    assert not hits_again(engine, prompt) and hits_again(engine, prompt), "in the new epoch"
    engine.settle()


def name_weights_only(engine: Engine, sidecar: Sidecar, epoch: str) -> None:
    """The same with weights that are as they were, and with what vLLM's own cache has."""
    command = [BINARY, "weights", epoch, "--all", "--runtime-dir", sidecar.endpoint]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    until(lambda: engine.role.setup.sidecars._named == epoch)
