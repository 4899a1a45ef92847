"""Ranks that hold the same pages: with one sidecar, or with such as lend to each other, each chunk
is stored once, by one of them, and loaded by all.

Engines as in test_engine.py: both roles, vLLM's real Scheduler and the real sidecar. A model has
one or two KV heads, and mostly more ranks than that.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lookaside import config as settings
from lookaside import space, wire
from lookaside.sidecars import RankSidecars
from lookaside.stats import Collector
from peer import Peer, until
from scheduling import (
    BLOCK,
    full_attention,
    make_config,
    make_kv_config,
    skip_if_idle,
    sliding_window,
    tokens,
    write_model,
)
from test_engine import BINARY, HURRIED, Engine, Sidecar, hits_again

CHUNK = 4  # pages
ONE_HEAD = [replace(full_attention(), num_kv_heads=1)]
WINDOWS = [*ONE_HEAD, replace(sliding_window(72), num_kv_heads=1)]

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason="bin/lookaside is not built")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Models by their KV heads."""
    directory = tmp_path_factory.mktemp("models")
    return {heads: write_model(directory / f"{heads}", heads) for heads in (1, 2)}


@pytest.fixture
def sidecars(ended: list[Sidecar]) -> list[Sidecar]:
    """As many as a test appends."""
    return ended


@pytest.fixture
def engines(models: dict[int, Path]) -> Iterator[Any]:
    made: list[Engine] = []

    def make(
        endpoint: Path | str, heads: int, tp: int, specs: list[Any] | None = None, **kwargs: Any
    ) -> Engine:
        skip_if_idle(specs)
        extra = {
            "lookaside.endpoint": str(endpoint),
            "lookaside.lookup_timeout_ms": 60_000,  # the machine is shared
            "lookaside.store_timeout_ms": 60_000,
            "lookaside.load_timeout_ms": 60_000,
            **kwargs.pop("extra", {}),
        }
        made.append(Engine(make_config(models[heads], extra, tp=tp, **kwargs), specs or ONE_HEAD))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def started(sidecars: list[Sidecar], endpoint: Path) -> Sidecar:
    sidecars.append(Sidecar(endpoint, "--peers-enabled=false"))
    sidecars[-1].wait_serving()
    return sidecars[-1]


def lending(sidecars: list[Sidecar], directory: Path, *names: str, ranks: int = 2) -> list[Sidecar]:
    """A sidecar for each rank of each instance, by its name; all of them lend to each other."""
    directory.chmod(0o700)
    made = [
        Sidecar(directory / f"{name}-{rank}", "--peers-linger=100ms")
        for name in names
        for rank in range(ranks)
    ]
    sidecars += made
    lend(made)
    return made


def lend(sidecars: list[Sidecar]) -> None:
    """Wait until each lends to all others, and borrows from them."""
    others = len(sidecars) - 1

    def found(sidecar: Sidecar) -> bool:
        with contextlib.suppress(OSError, KeyError):  # it is just starting
            return set(counted(sidecar, "peers", "peer_borrowers").values()) == {others}
        return False

    until(lambda: all(found(each) for each in sidecars))


def know(sidecars: list[Sidecar], pages: list[int]) -> None:
    """Wait until each knows of so many pages that others hold."""
    until(
        lambda: [counted(each, "peer_hint_pages")["peer_hint_pages"] for each in sidecars] == pages
    )


def hits(engine: Engine, prompt: list[int], pages: int) -> None:
    """Ask until so many pages are loaded: what others hold is known a little later, and who is slow
    is passed over."""
    until(lambda: engine.forget_local() or engine.ask(prompt)[1] == pages)


def pages_of(sidecar: Sidecar) -> int:
    return counted(sidecar, "pages")["pages"]


def counted(sidecar: Sidecar, *names: str) -> dict[str, int]:
    """Metrics of the sidecar, by the names that are left without their beginning."""
    address = (sidecar.endpoint / "admin.addr").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        lines = [
            line.split() for line in answer.read().decode().splitlines() if not line.startswith("#")
        ]
    values = {line[0]: float(line[1]) for line in lines if len(line) == 2}
    return {name: int(values[f"lookaside_{name}"]) for name in names}


@pytest.mark.parametrize(
    ("heads", "tp", "specs"), [(1, 2, ONE_HEAD), (1, 4, WINDOWS), (2, 4, ONE_HEAD), (2, 2, None)]
)
def test_one_sidecar_holds_every_page_once(engines, sidecars, tmp_path, heads, tp, specs):
    """With as many heads as ranks, all ranks' pages are different."""
    sidecar = started(sidecars, tmp_path / "all")
    specs = specs or [full_attention()]
    one, other = (engines(sidecar.endpoint, heads, tp, specs) for _ in range(2))
    assert one.workers.replicas == tp // heads
    assert len(one.role.setup.sidecars.sessions) == heads
    prompt = tokens(13 * BLOCK + 5)
    assert one.ask(prompt)[1] == 0
    names = ("pages", "lookups_total", "loads_total", "stored_pages_total")
    before = counted(sidecar, *names)
    assert before["pages"] == before["stored_pages_total"] == heads * 13
    # Each rank has stored: of a group of n, every nth chunk.
    shares = [role._worker.saves.share for role in one.workers.roles]
    for rank, (role, share) in enumerate(zip(one.workers.roles, shares, strict=True)):
        pages = sum(
            min(CHUNK, 13 - chunk * CHUNK) for chunk in range(4) if chunk % share[0] == share[1]
        )
        assert (
            role._stats.take().data["save_bytes"] == pages * role._worker.link.pages.page_bytes
        ), f"rank {rank}"

    assert other.ask(prompt)[1] == 13
    # The loads end with what the workers send last, which nothing waits for.
    until(lambda: counted(sidecar, "loads_total")["loads_total"] == before["loads_total"] + tp)
    after = counted(sidecar, *names)
    assert after["lookups_total"] == before["lookups_total"] + heads, "each space is asked once"
    assert after["pages"] == before["pages"]
    for engine in (one, other):
        assert engine.workers.invalid == engine.workers.failed == 0
        engine.settle()


def test_with_sidecars_of_their_own_all_ranks_store_everything(engines, sidecars, tmp_path):
    """As long as these do not lend each other what they hold: each must have what its rank will
    load."""
    each = [started(sidecars, tmp_path / f"rank-{rank}") for rank in range(2)]
    one, other = (engines(tmp_path / "rank-{rank}", 1, 2) for _ in range(2))
    assert (
        one.workers.replicas == 2
        and len(one.role.setup.sidecars.sessions) == 2
        and not one.role.setup.sidecars.divided
    )
    prompt = tokens(9 * BLOCK + 1)
    one.ask(prompt)
    assert [counted(sidecar, "pages")["pages"] for sidecar in each] == [9, 9]
    assert other.ask(prompt)[1] == 9
    # What one of them lacks is no hit.
    each[1].kill()
    each[1].start()
    other.forget_local()
    assert other.ask(prompt)[1] == 0
    until(lambda: hits_again(other, prompt))
    for engine in (one, other):
        engine.settle()


@pytest.mark.parametrize("specs", [ONE_HEAD, WINDOWS])
def test_sidecars_that_lend_to_each_other_hold_every_page_once(engines, sidecars, tmp_path, specs):
    """Each rank stores every second chunk into its own, and loads the others through its peer."""
    each = lending(sidecars, tmp_path, "a")
    one = engines(tmp_path / "a-{rank}", 1, 2, specs)
    other = engines(tmp_path / "a-{rank}", 1, 2, specs, connector={"kv_role": "kv_consumer"})
    assert one.role.setup.sidecars.divided and len(one.role.setup.sidecars.sessions) == 2
    prompt = tokens(13 * BLOCK + 5)
    assert one.ask(prompt)[1] == 0
    until(lambda: [pages_of(sidecar) for sidecar in each] == [2 * CHUNK, CHUNK + 1])
    know(each, [CHUNK + 1, 2 * CHUNK])
    hits(other, prompt, 13)
    borrowed = [
        counted(sidecar, "peer_borrowed_pages_total")["peer_borrowed_pages_total"]
        for sidecar in each
    ]
    assert borrowed[0] >= CHUNK + 1 and borrowed[1] >= 2 * CHUNK
    assert [pages_of(sidecar) for sidecar in each] == [2 * CHUNK, CHUNK + 1]
    for engine in (one, other):
        assert engine.workers.invalid == engine.workers.failed == 0
        engine.settle()


def test_two_instances_of_two_ranks_share_through_four_sidecars(engines, sidecars, tmp_path):
    """What the first stored the second loads and does not store; then one that holds half of it
    dies."""
    four = lending(sidecars, tmp_path, "a", "b")
    one = engines(tmp_path / "a-{rank}", 1, 2)
    loads, stores = (
        engines(tmp_path / "b-{rank}", 1, 2, connector={"kv_role": f"kv_{role}"})
        for role in ("consumer", "producer")
    )
    # A sidecar that is slow to say that it still has a chunk has it stored again: then with the
    # next prompt.
    for prompts in range(1, 21):
        prompt = tokens(13 * BLOCK + 5, seed=prompts)
        one.ask(prompt)
        know(four[2:], [13 * prompts] * 2)
        hits(loads, prompt, 13)
        before = [pages_of(each) for each in four]
        assert before[:2] == [2 * CHUNK * prompts, (CHUNK + 1) * prompts]
        assert stores.ask(prompt)[1] == 0
        taken = [role._stats.take() for role in stores.workers.roles]
        if not any(stats and stats.data.get("save_bytes") for stats in taken):
            break
    assert [pages_of(each) for each in four] == before
    skipped = [
        counted(each, "peer_skipped_pages_total")["peer_skipped_pages_total"] for each in four[2:]
    ]
    assert min(skipped) >= 13

    # Half of it is gone, and computed again.
    four[1].kill()
    until(lambda: counted(four[2], "peers")["peers"] == counted(four[3], "peers")["peers"] == 2)
    other = engines(tmp_path / "b-{rank}", 1, 2)
    assert other.ask(prompt)[1] <= CHUNK
    hits(other, prompt, 13)
    assert pages_of(four[3]) >= before[3] + CHUNK + 1
    # The first instance has it again, with a new sidecar that holds nothing.
    four[1].start()
    lend(four)
    one.connect()
    reconnected(one)
    assert one.role.setup.sidecars.divided
    hits(one, prompt, 13)
    for engine in (one, other, loads, stores):
        assert engine.workers.invalid == engine.workers.failed == 0
        engine.settle()


def test_what_a_rank_loses_is_missed_alone(engines, sidecars, tmp_path):
    sidecar = started(sidecars, tmp_path / "all")
    engine = engines(sidecar.endpoint, 1, 2)
    worker = engine.workers.roles[1]._worker
    gather = worker.link.copies.gather

    def fail(*arguments: Any) -> None:
        raise RuntimeError("the copy fails")

    worker.link.copies.gather = fail
    prompt = tokens(13 * BLOCK + 5)
    engine.ask(prompt)
    engine.settle()  # nothing waits for what was lost
    worker.link.copies.gather = gather
    # Chunks 0 and 2 are there, 1 and 3 were the other rank's.
    assert counted(sidecar, "pages")["pages"] == 2 * CHUNK
    for want in (CHUNK, 13):
        engine.forget_local()
        assert engine.ask(prompt)[1] == want
    assert counted(sidecar, "stored_pages_total")["stored_pages_total"] == 13
    engine.settle()


def test_a_rank_without_its_session_stops_hits_and_no_store(engines, sidecars, tmp_path):
    """Its share of what is saved meanwhile is missed; the rest is as ever."""
    sidecar = started(sidecars, tmp_path / "all")
    engine = engines(sidecar.endpoint, 1, 4)
    prompt = tokens(17 * BLOCK + 1)
    cut(engine, 2)
    engine.ask(prompt)
    engine.settle()
    stored = counted(sidecar, "pages")["pages"]
    assert stored in (13, 17)  # 17 if it was back in time
    reconnected(engine)
    engine.forget_local()
    assert engine.ask(prompt)[1] == (2 * CHUNK if stored == 13 else 17)
    engine.forget_local()
    assert engine.ask(prompt)[1] == 17
    engine.settle()


def cut(engine: Engine, rank: int) -> None:
    """End a rank's session as if its sidecar had."""
    session = engine.workers.roles[rank]._worker.link.session
    with contextlib.suppress(OSError, AttributeError):
        session._connection.line.socket.shutdown(socket.SHUT_RDWR)


def reconnected(engine: Engine) -> None:
    """Wait until every rank's session is up."""
    until(lambda: all(role._worker.link.session.connected for role in engine.workers.roles))


@pytest.mark.parametrize(
    ("seed", "heads", "tp", "specs", "own"),
    [
        (0, 1, 4, ONE_HEAD, False),
        (1, 2, 4, ONE_HEAD, False),
        (2, 1, 2, WINDOWS, False),
        (3, 1, 2, ONE_HEAD, True),
    ],
)
def test_random_histories_with_deaths(engines, sidecars, tmp_path, seed, heads, tp, specs, own):
    """Two engines at once; a rank's session cut, its copies failing, a sidecar killed, stopped and
    started.

    There is one sidecar, or each rank of each engine has its own, and they lend to each other.
    """
    rng = random.Random(seed)
    if own:
        lending(sidecars, tmp_path, "a", "b", ranks=tp)
        endpoints = [tmp_path / "a-{rank}", tmp_path / "b-{rank}"]
    else:
        endpoints = 2 * [started(sidecars, tmp_path / "all").endpoint]
    pair = [
        engines(endpoint, heads, tp, specs, batched_tokens=100, max_seqs=4, extra=HURRIED)
        for endpoint in endpoints
    ]
    for engine in pair:
        for role in engine.workers.roles:
            copies = role._worker.link.copies
            copies.gather = Failing(rng, copies.gather)
    sidecar = sidecars[0]
    stopped = dead = False
    for _ in range(300):
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
        elif roll < 0.185 and engine.scheduler.running:
            engine.abort(rng.choice(engine.scheduler.running).request_id)
        elif (dead or stopped) and roll < 0.30:
            if dead:
                sidecar.start()
            else:
                sidecar.signal(signal.SIGCONT)
            dead = stopped = False
        elif not (dead or stopped) and roll < 0.195:
            sidecar = rng.choice(sidecars)
            stopped = rng.random() < 0.5
            dead = not stopped
            if dead:
                sidecar.kill()
            else:
                sidecar.signal(signal.SIGSTOP)
        elif roll < 0.21:
            cut(engine, rng.randrange(tp))
        for each in pair:
            each.step()
        time.sleep(0.002)
    if dead:
        sidecar.start()
    if stopped:
        sidecar.signal(signal.SIGCONT)
    for engine in pair:
        engine.run()
        engine.settle()
        assert all(
            engine.outputs[r] or engine.requests[r].status.name == "FINISHED_ABORTED"
            for r in engine.outputs
        )
        for role in engine.workers.roles:
            role._worker.link.copies.gather.rate = 0.0
    # What they share is as good as before.
    one, other = pair
    prompt = tokens(9 * BLOCK + 1, seed=99)
    for engine in pair:
        engine.connect()
        reconnected(engine)
    if own:
        lend(sidecars)
    one.ask(prompt)
    hits(other, prompt, 9)
    other.settle()


class Failing:
    """A call that fails now and then."""

    def __init__(self, rng: random.Random, call: Any) -> None:
        self.rng, self.call, self.rate = rng, call, 0.1

    def __call__(self, *arguments: Any) -> Any:
        if self.rng.random() < self.rate:
            raise RuntimeError("the copy fails")
        return self.call(*arguments)


def test_sidecars_that_lend_to_each_other_divide_the_stores(models, tmp_path):
    """All that the ranks of a group say they are among must be the same, and be there."""
    peers = [Peer(tmp_path / f"rank-{rank}") for rank in range(4)]
    try:
        for numbers, want in (
            ((0, 0, 0, 0), False),
            ((7, 7, 9, 9), True),
            ((7, 7, 9, 8), False),
            ((7, 7, 7, 0), False),
        ):
            for peer, number in zip(peers, numbers, strict=True):
                peer.peers = number
            config = make_config(
                models[2], {"lookaside.endpoint": str(tmp_path / "rank-{rank}")}, tp=4
            )
            kv_config = make_kv_config(4, ONE_HEAD)
            assert space.replicas(config, kv_config) == 2
            extra = config.kv_transfer_config.kv_connector_extra_config
            sidecars = RankSidecars(settings.parse(extra), config, kv_config, Collector())
            assert not sidecars.divided, "before they are connected"
            sidecars.connect()
            until(lambda made=sidecars: made.available)
            assert sidecars.divided == want
            sidecars.close()
            until(lambda made=sidecars: not made.available)
            assert not sidecars.divided
        assert {hello.ranks for peer in peers for hello in peer.of(wire.Hello)} == {1}
    finally:
        for peer in peers:
            peer.close()
