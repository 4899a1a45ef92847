"""The client against the real sidecar: bytes through real regions, and what survives its death.

Needs ``bin/lookaside`` (``make build``).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import zmq
from lookaside import wire
from lookaside.autostart import Autostart
from lookaside.config import parse
from lookaside.connection import SessionUnavailable
from lookaside.endpoint import EndpointAbsent, EndpointError, open_endpoint
from lookaside.hints import Hints
from lookaside.lookups import Lookup
from lookaside.metadata import LoadSpec, LookasideMetadata, SaveSpec
from lookaside.ratelog import RateLimitedLog
from lookaside.session import Session
from lookaside.sidecars import RankSidecars
from peer import until, waited_in_vain
from readiness import ready
from scheduling import make_kv_config
from test_session import Heard, options
from test_worker import (
    BLOCKS,
    PAGE,
    PPC,
    SlowCopies,
    Stand,
    addresses,
    attachments,
    hashes,
    page,
)

from examples.stand.processes import send_signal

PLAIN = Hints()
BINARY = Path(__file__).parents[2] / "bin" / "lookaside"

# What runs behind it sees no process but its own, as in a container.
CONTAINER = (
    "unshare",
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
    "--fork",
    "--kill-child",
    "--pid",
    "--mount-proc",
)

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


class Sidecar:
    """One ``lookaside serve``; ends with the test."""

    def __init__(self, directory: Path, wrap: Sequence[str] = (), **settings: Any) -> None:
        self.directory = directory
        self.wrap = wrap
        self.settings = settings
        if settings.get("arena_kind") != "dax":  # which is as large as its devices
            self.settings = {"arena_limit": "32M", "arena_kind": "memfd", **settings}
        self.process: subprocess.Popen[bytes] | None = None
        self.log = directory.parent / f"{directory.name}.log"
        self.start()

    def start(self, wait: bool = True) -> None:
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in self.settings.items()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.wrap, str(BINARY), "serve", f"--runtime-dir={self.directory}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        if wait:
            until(self.answers, 60)

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log.read_text()
        return ready(self.directory)

    def signal(self, number: int) -> None:
        assert self.process is not None
        send_signal(self.process, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        if self.wrap:  # that was not itself
            with (self.directory / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)

    def restart(self) -> None:
        self.kill()
        self.start()

    def take_over(self) -> None:
        """Start another process that takes over, and wait for the end of the one before."""
        before, settings = self.process, self.settings
        assert before is not None
        self.settings = {**settings, "takeover": "true"}
        self.start(wait=False)
        self.settings = settings
        assert before.wait(60) == 0, self.log.read_text()
        until(self.answers, 60)

    def status(self) -> dict[str, Any]:
        return status_of(self.directory)

    def errors(self, kind: str) -> int:
        """How many errors of a kind it has counted."""
        return self.status()["counters"]["errors"][kind]


def status_of(directory: Path) -> dict[str, Any]:
    """What the sidecar of an endpoint says of itself."""
    address = (directory / "admin.addr").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/v1/status", timeout=60) as answer:
        return json.load(answer)


class Engine(Stand):
    """Both roles of one engine, without vLLM between them."""

    def __init__(self, model: Path, directory: Path, seed: int = 0, **extra: Any) -> None:
        settings = {f"lookaside.{key}": value for key, value in extra.items()}
        super().__init__(model, str(directory), settings)
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(0, 256, (BLOCKS * PAGE,), dtype=torch.uint8, generator=generator)
        self.cache.view(torch.uint8).view(-1).copy_(raw)
        config = parse(self.vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.asked: dict[int, tuple[int, list[bytes]]] = {}
        self.sidecars = RankSidecars(config, self.vllm_config, make_kv_config(BLOCKS), self.stats)

    def start(self) -> Engine:
        self.register()
        self.sidecars.connect()
        self.wait_up()
        return self

    def wait_up(self) -> None:
        until(
            lambda: self.worker.link.session.available and self.sidecars.sessions[0].available, 60
        )

    def lookup(self, first_page: int, *names: int) -> Lookup:
        lookup = self.ask(first_page, *names)
        until(lambda: lookup.poll() is not None)
        return lookup

    def ask(self, first_page: int, *names: int) -> Lookup:
        lookup = self.sidecars.start(first_page, b"", hashes(*names), 0)
        self.asked[lookup.id] = first_page, [hashes(name) for name in names]
        return lookup

    def spec(self, name: str, lookup: Lookup, blocks: list[int]) -> LoadSpec:
        """A load of the first pages of a lookup, as many as there are blocks."""
        first_page, digests = self.asked[lookup.id]
        names = wire.names(digests[: len(blocks)], first_page, PPC)
        return LoadSpec(name, lookup.refs, first_page, blocks, names)

    def save_now(self, *specs: SaveSpec, forward: Any = None) -> None:
        """Save, and wait until the sidecar has heard it: lookups go over another socket and may
        overtake a commit."""
        super().save_now(*specs, forward=forward)
        session = self.worker.link.session
        with contextlib.suppress(SessionUnavailable):
            session.submit(
                lambda number: wire.PrepareLoad(number, 1, 1, bytes(16), 0, 1, bytes(32))
            ).wait(30.0)  # refused, in order

    def held(self, first_page: int, *names: int) -> int:
        """How many of the pages are held, without keeping leases on them."""
        lookup = self.lookup(first_page, *names)
        hits = lookup.poll()
        lookup.cancel()
        assert hits is not None
        return hits

    def fetch(self, name: str, names: list[int], blocks: list[int]) -> int:
        """Look up and load what is held into the first of the blocks; returns how much."""
        lookup = self.lookup(0, *names)
        hits = lookup.poll()
        assert hits is not None
        if hits:
            self.load_now(self.spec(name, lookup, blocks[:hits]))
        return hits

    def close(self) -> None:
        self.sidecars.close()
        self.worker.shutdown()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    each = Sidecar(tmp_path / "endpoint")
    yield each
    each.kill()


@pytest.fixture
def engine(model: Path, sidecar: Sidecar) -> Iterator[Engine]:
    each = Engine(model, sidecar.directory).start()
    yield each
    each.close()


def test_bytes_come_back(engine: Engine, sidecar: Sidecar) -> None:
    names = [101, 102, 103, 104, 105]
    want = [page(engine.cache, block) for block in range(1, 6)]
    engine.save_now(engine.save(0, [1, 2, 3, 4, 5], names))
    until(lambda: engine.held(0, *names) == 5)
    engine.cache[1:6] = 0
    assert engine.fetch("r", names, [20, 21, 22, 23, 24]) == 5
    assert [page(engine.cache, block) for block in range(20, 25)] == want
    assert engine.received == ["r"] and not engine.failed
    until(lambda: sidecar.status()["leases"] == 0)


def test_the_sidecar_counts_what_it_is_told(engine: Engine, sidecar: Sidecar) -> None:
    for told in ((1000, 0, 0, 24), (700, 600, 512, 300)):
        engine.sidecars.report_prefilled(*told)
    want = {"requests": 2, "asked": 1700, "found": 600, "loaded": 512, "computed": 1188, "own": 324}
    until(lambda: sidecar.status()["counters"]["tokens"] == want)
    # One that cannot be told costs nothing.
    sidecar.kill()
    until(lambda: not engine.sidecars.available)
    engine.sidecars.report_prefilled(1, 1, 1, 0)


@pytest.mark.parametrize(
    ("env", "extra", "fix"),
    [
        ({"PYTHONHASHSEED": "1"}, {}, "PYTHONHASHSEED=0"),
        ({}, {"chunk_tokens": 16}, "lookaside.chunk_tokens"),
    ],
)
def test_engines_that_share_nothing_by_accident_are_warned(
    model: Path,
    sidecar: Sidecar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    env: dict[str, str],
    extra: dict[str, Any],
    fix: str,
) -> None:
    """Both of them, though one has been there before; once, however often they connect."""
    monkeypatch.setattr(
        "lookaside.notices._notices", RateLimitedLog(logging.getLogger("vllm.lookaside"), 3600.0)
    )
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def warned() -> set[str]:
        return {each.message for each in caplog.records if "nothing is shared with" in each.message}

    with caplog.at_level(logging.WARNING, logger="vllm.lookaside"):
        one = Engine(model, sidecar.directory).start()
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        other = Engine(model, sidecar.directory, **extra).start()
        try:
            until(lambda: len(warned()) == 2)
            assert all(fix in each and f"pid {os.getpid()}" in each for each in warned())
            spaces = {(each["space"], each["other"]) for each in sidecar.status()["unshared"]}
            assert len(spaces) == 2
            one.save_now(one.save(0, [1, 2], [101, 102]))
            until(lambda: one.held(0, 101, 102) == 2)
            assert other.held(0, 101, 102) == 0
        finally:
            one.close()
            other.close()
    assert (
        len({id(each) for each in caplog.records if "nothing is shared with" in each.message}) == 2
    )


def test_prefix_and_partial_chunks(engine: Engine) -> None:
    engine.save_now(engine.save(0, list(range(1, 7)), list(range(101, 107))))
    until(lambda: engine.held(0, *range(101, 107)) == 6)
    assert engine.held(0, 101, 102, 103, 999) == 3
    assert engine.held(0, 999, 101) == 0
    assert engine.held(0, *range(101, 108)) == 6
    # The partly filled chunk grows in place.
    engine.save_now(engine.save(4, [7, 8, 9, 10], [105, 106, 107, 108], prev=104))
    until(lambda: engine.held(0, *range(101, 109)) == 8)
    assert engine.held(4, 105, 106, 107, 108) == 4
    want = [page(engine.cache, b) for b in (1, 2, 3, 4, 5, 6, 9, 10)]
    assert engine.fetch("r", list(range(101, 109)), list(range(20, 28))) == 8
    assert [page(engine.cache, b) for b in range(20, 28)] == want


def test_hints_keep_what_a_flood_would_evict(model: Path, tmp_path: Path) -> None:
    """Of stores and of what is held already; a tenant's name goes along."""
    sidecar = Sidecar(
        tmp_path / "hinted",
        arena_limit="2M",
        arena_initial="2M",
        arena_eviction="lru",
        hints_share="0.1",
    )
    engine = Engine(model, sidecar.directory).start()
    slots = (2 << 20) // (PPC * PAGE)
    blocks = list(range(1, PPC + 1))

    def names(number: int) -> list[int]:
        return [1000 * number + page for page in range(1, PPC + 1)]

    def save(number: int, wanted: Hints = PLAIN) -> None:
        engine.save_now(replace(engine.save(0, blocks, names(number)), hints=wanted.of_store()))

    def hints() -> dict[str, Any]:
        return sidecar.status()["hints"]

    def advise(number: int, action: int, ms: int = 0) -> None:
        assert engine.sidecars.advise(hashes(*names(number)), action, ms, 0, "a")

    flood = iter(range(100, 1_000_000))

    def evict() -> None:
        for _ in range(2 * slots):
            save(next(flood))

    try:
        save(1, Hints(retain_ms=600_000, tenant="a"))
        save(2, Hints(tenant="a"))
        save(3)
        advise(2, wire.ADVISE_PIN, 600_000)
        until(lambda: (hints()["retained_slots"], hints()["pinned_slots"]) == (1, 1))
        evict()
        assert [engine.held(0, *names(number)) for number in (1, 2, 3)] == [PPC, PPC, 0]
        # Both end when they are told to.
        advise(1, wire.ADVISE_DEMOTE)
        advise(2, wire.ADVISE_PIN, 0)
        until(lambda: (hints()["low_slots"], hints()["pinned_slots"]) == (1, 0))
        evict()
        assert [engine.held(0, *names(number)) for number in (1, 2)] == [0, 0]
        # What is stored from the second use on; a share bounds what is kept.
        save(4, Hints(store_from_use=2))
        assert engine.held(0, *names(4)) == 0 and hints()["deferred_pages"] == PPC
        save(4, Hints(store_from_use=2))
        assert engine.held(0, *names(4)) == PPC
        for number in range(10, 10 + slots):
            save(number, Hints(pin_ms=600_000))
        assert hints()["pinned_slots"] == slots // 10 and hints()["over_share"] > 0
        assert engine.held(0, *names(9 + slots)) == PPC
        assert sidecar.errors("malformed") == 0
    finally:
        engine.close()
        sidecar.kill()


def test_an_advised_prefetch_brings_pages_up_from_the_disk(model: Path, tmp_path: Path) -> None:
    sidecar = Sidecar(
        tmp_path / "tiered", arena_limit="2M", arena_initial="2M", **disk_in(tmp_path)
    )
    engine = Engine(model, sidecar.directory, promotion_timeout_ms=60_000).start()
    names = list(range(1, PPC + 1))
    try:
        engine.save_now(engine.save(0, names, names))
        until(lambda: sidecar.status()["tiers"][0]["pages"] == PPC, 60)
        for number in range(2, 300):
            other = [1000 * number + page for page in names]
            engine.save_now(engine.save(0, names, other))
        assert engine.sidecars.advise(hashes(*names), wire.ADVISE_PREFETCH, 0, 0, "")
        until(lambda: sidecar.status()["hints"]["advice"]["prefetched_pages"] == PPC, 60)
        lookup = engine.lookup(0, *names)
        assert lookup.poll() == PPC and lookup.in_memory
        lookup.cancel()
    finally:
        engine.close()
        sidecar.kill()


def disk_in(directory: Path, wanted: bool = True) -> dict[str, str]:
    """Settings of a sidecar with a small disk tier; without one, if it is not wanted."""
    if not wanted:
        return {}
    disk = f"{directory / 'disk'}:32M:slab=8M:load_timeout=60s:store_timeout=120s"
    return {"disk": disk, "cascade_partial_delay": "1ms", "lookup_deadline": "60s"}


def test_what_the_arena_has_no_room_for_comes_up_from_the_disk(model: Path, tmp_path: Path) -> None:
    """Ten times the arena, read from its first page on; then again after the sidecar was killed."""
    sidecar = Sidecar(
        tmp_path / "tiered", arena_limit="2M", arena_initial="2M", **disk_in(tmp_path)
    )
    engine = Engine(model, sidecar.directory, promotion_timeout_ms=60_000).start()
    prefixes = {
        1000 * number: 3 * PPC - number % PPC for number in range(420)
    }  # pages of each, by its first name
    blocks = list(range(1, 3 * PPC + 1))

    def everything_is_there(turn: str) -> None:
        for first, pages in prefixes.items():
            engine.cache[:] = -1.0
            names = [first + page + 1 for page in range(pages)]
            assert engine.fetch(f"{turn}-{first}", names, blocks[:pages]) == pages
            assert (
                engine.cache[blocks[:pages], 0, 0, 0] == torch.tensor(names, dtype=torch.float32)
            ).all()
        assert not engine.failed

    try:
        total = 0
        for first, pages in prefixes.items():
            engine.cache[blocks] = (
                torch.arange(first + 1, first + len(blocks) + 1).float().view(-1, 1, 1, 1)
            )
            engine.save_now(
                engine.save(0, blocks[:pages], [first + page + 1 for page in range(pages)])
            )
            total += pages
            if first % 5_000 == 0:  # what is evicted before the disk has it is shed
                until(lambda want=total: sidecar.status()["tiers"][0]["pages"] == want, 60)
        until(lambda: sidecar.status()["tiers"][0]["pages"] == total, 60)
        assert sidecar.status()["pages"] < total // 5
        everything_is_there("once")
        assert engine.count("lookups_promoted") > 0
        sidecar.restart()
        until(
            lambda: (
                not engine.worker.link.session.connected or engine.worker.link.session.available
            ),
            60,
        )
        engine.wait_up()
        until(lambda: engine.held(0, 1, 2, 3) == 3, 60)
        everything_is_there("again")
        until(lambda: sidecar.status()["leases"] == 0)
    finally:
        engine.close()
        sidecar.kill()


def test_another_engine_of_the_model_loads_it(
    model: Path, engine: Engine, sidecar: Sidecar
) -> None:
    names = list(range(201, 209))
    engine.save_now(engine.save(0, list(range(1, 9)), names))
    other = Engine(model, sidecar.directory, seed=9).start()
    try:
        until(lambda: other.held(0, *names) == 8)
        assert other.fetch("r", names, list(range(10, 18))) == 8
        for index in range(8):
            assert page(other.cache, 10 + index) == page(engine.cache, 1 + index)
    finally:
        other.close()


def test_sidecar_in_a_container_of_its_own(model: Path, tmp_path: Path) -> None:
    """As in a pod of two containers: neither sees the other's processes."""
    sidecar = Sidecar(tmp_path / "endpoint", wrap=CONTAINER)
    engine = Engine(model, sidecar.directory).start()
    try:
        assert sidecar.status()["pid"] == 1
        engine.save_now(engine.save(0, [1, 2], [1, 2]))
        until(lambda: engine.held(0, 1, 2) == 2)
        assert engine.fetch("r", [1, 2], [10, 11]) == 2
        assert page(engine.cache, 10) == page(engine.cache, 1)
        lookup = engine.lookup(0, 1, 2)
        sidecar.restart()
        engine.step(LookasideMetadata(loads=[engine.spec("s", lookup, [5, 6])]))
        until(lambda: engine.step() or "s" in engine.received)
        assert engine.invalid == {5, 6}
        engine.wait_up()
        # The worker gave the memory back, though neither sees the other's processes.
        until(lambda: engine.held(0, 1, 2) == 2)
        assert engine.fetch("again", [1, 2], [12, 13]) == 2
        assert page(engine.cache, 13) == page(engine.cache, 2)
    finally:
        engine.close()
        sidecar.kill()


def test_strangers_change_nothing_that_a_worker_loads(
    engine: Engine, sidecar: Sidecar, model: Path
) -> None:
    """Processes of the same user that read the status, one without a session and one that calls
    itself the engine."""
    engine.save_now(engine.save(0, [1, 2, 3, 4], [1, 2, 3, 4]))
    engine.save_now(engine.save(0, [5, 6, 7, 8], [5, 6, 7, 8]))
    until(lambda: engine.held(0, 1, 2, 3, 4) == engine.held(0, 5, 6, 7, 8) == 4)
    (scheduler,) = (each for each in sidecar.status()["sessions"] if each["role"] == "scheduler")
    session = int(scheduler["session"], 16)
    directory = sidecar.directory
    context = zmq.Context()
    push, dealer = context.socket(zmq.PUSH), context.socket(zmq.DEALER)
    impostor = Engine(model, directory)
    try:
        push.connect(f"ipc://{directory}/lookup.sock")
        dealer.setsockopt(zmq.ROUTING_ID, scheduler["session"].encode())
        dealer.connect(f"ipc://{directory}/reply.sock")
        impostor.vllm_config.kv_transfer_config.engine_id = (
            engine.vllm_config.kv_transfer_config.engine_id
        )
        impostor.register()
        until(lambda: impostor.worker.link.session.available)
        own = impostor.worker.link.session.welcome.secret
        forged = sidecar.errors("forged")
        for turn, secret in enumerate([bytes(16), scheduler["session"].encode(), own]):
            lookup = engine.lookup(0, 1, 2, 3, 4)
            assert lookup.poll() == 4
            for message in (
                wire.Lookup(session, secret, lookup.id, 0, b"", hashes(5, 6, 7, 8), 1000, 0),
                wire.Trim(session, secret, lookup.id, 4),
                wire.Cancel(session, secret, lookup.id),
                wire.Cancel((1 << 64) - 1, secret, lookup.id),
            ):
                push.send(wire.encode(message))
            forged += 3
            until(lambda forged=forged: sidecar.errors("forged") >= forged)
            spec = engine.spec("r", lookup, [9, 10, 11, 12])
            stolen = replace(
                spec, refs=(spec.refs[0]._replace(ticket=wire.ticket(own, lookup.id)),)
            )
            impostor.load_now(replace(stolen, request_id=f"s{turn}"))
            assert impostor.failed == {f"s{each}": 1 for each in range(turn + 1)}
            forged += 1
            assert sidecar.errors("forged") == forged
            engine.load_now(replace(spec, request_id=f"r{turn}"))
            assert not engine.failed and not engine.invalid
            for block, source in zip((9, 10, 11, 12), (1, 2, 3, 4), strict=True):
                assert page(engine.cache, block) == page(engine.cache, source)
                engine.cache[block] = -1.0
        assert not dealer.poll(50), "nobody else's answers"
        # What it is told to load by other names than it gets is not loaded.
        lookup = engine.lookup(0, 5, 6, 7, 8)
        wrong = replace(
            engine.spec("w", lookup, [9, 10, 11, 12]), names=wire.names([hashes(4)], 3, PPC)
        )
        engine.load_now(wrong)
        assert engine.failed == {"w": 1} and engine.invalid == {9, 10, 11, 12}
        until(lambda: sidecar.status()["leases"] == 0)
    finally:
        impostor.close()
        context.destroy(0)


def test_load_of_an_expired_or_cancelled_lookup_fails(engine: Engine, sidecar: Sidecar) -> None:
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    lookup = engine.lookup(0, 1, 2)
    lookup.cancel()
    until(lambda: sidecar.status()["leases"] == 0)
    engine.load_now(engine.spec("r", lookup, [5, 6]))
    assert engine.failed == {"r": 1} and engine.invalid == {5, 6}


def test_save_of_what_is_held_moves_no_bytes(engine: Engine) -> None:
    engine.save_now(engine.save(0, [1, 2, 3, 4], [1, 2, 3, 4]))
    until(lambda: engine.held(0, 1, 2, 3, 4) == 4)
    moved = engine.count("save_bytes")
    engine.save_now(engine.save(0, [5, 6, 7, 8], [1, 2, 3, 4]))
    assert engine.count("save_bytes") == moved == 4 * PAGE
    assert engine.count("save_failures") == 0


def test_arena_grows_under_the_workers(model: Path, tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "grow", arena_limit="16M", arena_initial="1M")
    engine = Engine(model, sidecar.directory).start()
    rng = random.Random(3)
    try:
        kept: dict[int, list[bytes]] = {}
        for prefix in range(128):  # 128 x 8 pages of 4 KiB: 4 MiB, four times the first region
            names = [1000 * (prefix + 1) + i for i in range(8)]
            blocks = rng.sample(range(1, BLOCKS), 8)
            engine.cache[blocks] = float(prefix)
            engine.save_now(engine.save(0, blocks, names))
            kept[prefix] = [page(engine.cache, b) for b in blocks]
            # At full speed the arena would be outrun, and would evict.
            until(
                lambda: (
                    (arena := sidecar.status()["arena"])["used_bytes"]
                    < 0.8 * arena["capacity_bytes"]
                )
            )
        live = engine.worker.link.live
        assert live is not None
        until(lambda: live.regions.bytes_mapped >= 4 << 20)
        held = 0
        for prefix, want in kept.items():
            names = [1000 * (prefix + 1) + i for i in range(8)]
            hits = engine.fetch(f"r{prefix}", names, list(range(10, 18)))
            assert [page(engine.cache, 10 + i) for i in range(hits)] == want[:hits]
            held += hits
        assert held >= 64 * 8
    finally:
        engine.close()
        sidecar.kill()


def test_killed_sidecar_costs_hits_only(engine: Engine, sidecar: Sidecar) -> None:
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    lookup = engine.lookup(0, 1, 2)
    sidecar.kill()
    waits = waited_in_vain(engine.worker.link.session)
    engine.step(
        LookasideMetadata(
            loads=[engine.spec("r", lookup, [5, 6])], saves=[engine.save(4, [1], [5])]
        )
    )
    until(lambda: engine.step() or engine.received)
    assert engine.held(0, 1) == 0
    assert not waits, "its end is noticed, not waited for"
    assert engine.invalid == {5, 6} and len(engine.acked) == 2
    sidecar.start()
    engine.wait_up()
    until(lambda: engine.held(0, 1, 2) == 2)  # its worker gives it its memory back
    assert engine.held(4, 5) == 0, "it was not stored"
    assert engine.fetch("again", [1, 2], [10, 11]) == 2
    assert page(engine.cache, 10) == page(engine.cache, 1)
    assert page(engine.cache, 11) == page(engine.cache, 2)


def test_nothing_is_mapped_anew_after_a_kill(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = attachments(engine, monkeypatch)
    inode = None
    for round_ in range(3):
        names = [100 * round_ + 1, 100 * round_ + 2]
        engine.save_now(engine.save(0, [1, 2], names))
        until(lambda names=names: engine.held(0, *names) == 2)
        before = addresses(engine)
        mappings = engine.worker.link.mappings
        (fd,) = [each.fd for each in mappings._all]
        assert inode in (None, os.fstat(fd).st_ino)
        inode = os.fstat(fd).st_ino
        sidecar.kill()
        sidecar.start()
        engine.wait_up()
        until(lambda before=before: addresses(engine) == before)
    for round_ in range(3):
        names = [100 * round_ + 1, 100 * round_ + 2]
        until(lambda names=names: engine.held(0, *names) == 2)
        assert engine.fetch(f"r{round_}", names, [10, 11]) == 2
        assert page(engine.cache, 10) == page(engine.cache, 1)
    assert not attached and engine.count("regions_mapped") == 1
    assert engine.count("regions_kept") == 3
    assert engine.count("kept_bytes") == 3 * engine.count("mapped_bytes")
    # What it holds may be reused, now that nobody from before can touch it.
    until(lambda: not claimed(sidecar.directory, but=engine.worker.link.session.generation))
    engine.save_now(engine.save(0, [5, 6], [501, 502]))
    until(lambda: engine.held(0, 501, 502) == 2)


def test_takeover_is_not_noticed(
    engine: Engine, sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times, while the engine saves and loads all the time."""
    attached = attachments(engine, monkeypatch)
    sessions = [engine.worker.link.session, engine.sidecars.sessions[0]]
    before = [session.session_id for session in sessions]
    generation, mapped = sessions[0].generation, addresses(engine)
    lost = [Heard() for _ in sessions]
    for session, heard in zip(sessions, lost, strict=True):
        session.subscribe(heard)
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    rounds = 0
    for _ in range(3):
        waiting = engine.lookup(0, 1, 2)  # answered by one process, loaded from the next
        pid = sidecar.status()["pid"]
        taking = threading.Thread(target=sidecar.take_over)
        taking.start()
        while taking.is_alive() or rounds % 5:
            rounds += 1
            names = [100 * rounds + 1, 100 * rounds + 2]
            engine.save_now(engine.save(0, [1, 2], names))
            until(lambda names=names: engine.held(0, *names) == 2)
            engine.cache[10:12] = 0
            assert engine.fetch(f"r{rounds}", names, [10, 11]) == 2
            assert page(engine.cache, 10) == page(engine.cache, 1)
            assert engine.held(0, 1, 2) == 2, "no lookup misses what was stored before"
        taking.join()
        status = sidecar.status()
        assert status["pid"] != pid and len(status["sessions"]) == 2
        engine.load_now(engine.spec(f"w{rounds}", waiting, [12, 13]))
        assert page(engine.cache, 13) == page(engine.cache, 2)
        rounds += 1
    assert not engine.failed
    assert [session.session_id for session in sessions] == before
    assert all(session.generation == generation for session in sessions)
    assert not any(heard.lost for heard in lost), "no session ended"
    assert not attached and addresses(engine) == mapped, "nothing is mapped or pinned anew"
    until(lambda: sidecar.status()["leases"] == 0)


_F_OFD_GETLK = 36


def claimed(directory: Path, but: int) -> bool:
    """Whether any process has a claim on another run than one, as the next sidecar looks for it."""
    with (directory / "lock").open("r+b") as lock:
        for start, length in ((0, but), (but + 1, (1 << 62) - but - 1)):
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
            answer = fcntl.fcntl(lock, _F_OFD_GETLK, asked)
            if struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK:
                return True
    return False


FROZEN_WORKER = """
import sys, threading
from lookaside import wire
from lookaside.handshake import SessionOptions
from lookaside.session import Session, Subscriber

class Copying(Subscriber):
    def on_connected(self, session, welcome):
        self.release = getattr(self, "release", None) or session.hold()
        print(welcome.generation, flush=True)

copying = Copying()
session = Session(SessionOptions(sys.argv[1], "worker", "frozen", 0, 16, 4096, 4, 32))
session.subscribe(copying)
session.start()
sys.stdin.readline()
copying.release()
print("ended", flush=True)
sys.stdin.readline()
"""


def test_frozen_worker_keeps_its_claim(sidecar: Sidecar) -> None:
    """Its sidecar is killed and replaced, and must not reuse what it may still copy."""
    worker = subprocess.Popen(
        [sys.executable, "-c", FROZEN_WORKER, str(sidecar.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdin is not None and worker.stdout is not None
    try:
        first = int(worker.stdout.readline())
        worker.send_signal(signal.SIGSTOP)
        sidecar.kill()
        assert claimed(sidecar.directory, but=0) and not claimed(sidecar.directory, but=first)
        sidecar.start()
        second = first + 1
        assert claimed(sidecar.directory, but=second)
        worker.send_signal(signal.SIGCONT)
        assert int(worker.stdout.readline()) == second, "generations go on rising"
        assert claimed(sidecar.directory, but=second), "its copy goes on"
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "ended\n"
        assert not claimed(sidecar.directory, but=second)
        assert claimed(sidecar.directory, but=first), "that of its present session"
        sidecar.kill()
        worker.kill()
        worker.wait()
        assert not claimed(sidecar.directory, but=0), "a dead process copies nothing"
    finally:
        worker.kill()
        worker.wait()


def test_stopped_sidecar_costs_one_patience_and_keeps_everything(
    engine: Engine, sidecar: Sidecar
) -> None:
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    generation = engine.worker.link.session.generation
    sidecar.signal(signal.SIGSTOP)
    lookups, session = engine.sidecars._lookups, engine.worker.link.session
    patience_s, lookups._timeout_s = lookups._timeout_s, 0.2
    engine.hurry(store_timeout_ms=200)
    try:
        waits, names = waited_in_vain(session), ("lookup_timeouts", "lookups_unasked")
        before = [engine.count(name) for name in names]
        lookup = engine.ask(0, 1, 2)
        until(lambda: lookup.poll() is not None)
        assert lookup.poll() == 0
        engine.step(LookasideMetadata(saves=[engine.save(4, [3], [3])]))
        for i in range(100):
            assert engine.sidecars.start(0, b"", hashes(1, 2), 0).poll() == 0
            engine.step(
                LookasideMetadata(
                    saves=[engine.save(4, [3], [3])],
                    loads=[engine.spec(f"r{i}", lookup, [7])],
                )
            )
        # The first may have been spared, too: a session notices a stop also by itself.
        timeouts, unasked = (
            engine.count(name) - count for name, count in zip(names, before, strict=True)
        )
        assert timeouts <= 1 and len(waits) <= 1, "no more is waited for"
        assert timeouts + unasked == 101
        assert len(engine.received) == 100 and len(engine.acked) == 102
    finally:
        sidecar.signal(signal.SIGCONT)
    lookups._timeout_s = patience_s
    engine.wait_up()
    assert engine.worker.link.session.generation == generation
    assert engine.fetch("r", [1, 2], [10, 11]) == 2
    assert page(engine.cache, 10) == page(engine.cache, 1)
    until(lambda: sidecar.status()["leases"] == 0)


def test_sidecar_that_drains_is_survived(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.signal(signal.SIGTERM)
    assert sidecar.process is not None and sidecar.process.wait(60) == 0
    until(lambda: not engine.worker.link.session.connected)
    engine.save_now(engine.save(0, [1], [1]))
    sidecar.start()
    engine.wait_up()


def test_refusal_names_the_field_that_differs(
    model: Path, engine: Engine, sidecar: Sidecar
) -> None:
    own = engine.worker.link.session.options
    wrong = Session(
        options(
            sidecar.directory,
            role="scheduler",
            engine_id=own.engine_id,
            page_tokens=own.page_tokens,
            page_bytes=0,
            pages_per_chunk=own.pages_per_chunk,
            fields={"dtype": "torch.bfloat16"},
        )
    )
    wrong.start()
    until(lambda: wrong.refused)
    refusal = wrong.refused
    assert refusal is not None and refusal.code == "incompatible"
    assert "dtype" in refusal.field
    assert {refusal.want, refusal.got} == {"torch.float32", "torch.bfloat16"}
    wrong.close()


def test_scheduler_before_its_worker_is_told_to_wait(model: Path, sidecar: Sidecar) -> None:
    engine = Engine(model, sidecar.directory)
    engine.sidecars.connect()
    session = engine.sidecars.sessions[0]
    until(lambda: session.refused)
    assert session.refused is not None and session.refused.code == "no_worker"
    engine.register()
    engine.wait_up()
    engine.close()


def test_other_models_are_kept_apart(model: Path, engine: Engine, sidecar: Sidecar) -> None:
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    own = engine.worker.link.session.options
    fields = {**own.fields, "model": "another"}
    worker = Session(
        options(
            sidecar.directory, engine_id="b", page_bytes=PAGE, pages_per_chunk=PPC, fields=fields
        )
    )
    scheduler = Session(
        options(sidecar.directory, role="scheduler", engine_id="b", page_bytes=0, fields=fields)
    )
    worker.start()
    assert worker.wait_connected(30)
    from lookaside.lookups import LookupClient

    counted: list[str] = []
    client = LookupClient([scheduler], 60.0, 60.0, count=counted.append)
    scheduler.start()
    assert scheduler.wait_connected(30)
    assert client.wait(client.start(0, b"", hashes(1, 2)), 60) == 0 and not counted
    client.close()
    for session in (scheduler, worker):
        session.close()


def test_stale_directory_is_taken_over(model: Path, sidecar: Sidecar) -> None:
    sidecar.kill()
    assert (sidecar.directory / "session.sock").exists()
    with pytest.raises(EndpointAbsent):
        open_endpoint(str(sidecar.directory))
    sidecar.start()
    session = Session(options(sidecar.directory))
    session.start()
    assert session.wait_connected(30)
    session.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_directory_that_changes_hands_is_not_used_again(engine: Engine, sidecar: Sidecar) -> None:
    os.chown(sidecar.directory, 65534, 65534)
    try:
        session = Session(options(sidecar.directory))
        session.start()
        assert not session.wait_settled(30)
        assert not session.connected
        session.close()
        assert engine.worker.link.session.connected, "who is connected stays so"
    finally:
        os.chown(sidecar.directory, os.geteuid(), os.getegid())


def test_garbage_client_disturbs_nobody(engine: Engine, sidecar: Sidecar) -> None:
    rng = random.Random(11)
    for _ in range(20):
        with contextlib.closing(open_endpoint(str(sidecar.directory))) as sock:
            sock.setblocking(True)
            with contextlib.suppress(OSError):
                sock.send(rng.randbytes(rng.randrange(1, 500)))
                sock.settimeout(2)
                sock.recv(1024)
    engine.save_now(engine.save(0, [1], [1]))
    until(lambda: engine.held(0, 1) == 1)


def test_dead_worker_frees_everything(model: Path, engine: Engine, sidecar: Sidecar) -> None:
    """A killed process: its session ends though nobody closed it."""
    engine.save_now(engine.save(0, [1, 2], [1, 2]))
    until(lambda: engine.held(0, 1, 2) == 2)
    for lookup in [engine.lookup(0, 1, 2) for _ in range(5)]:
        assert lookup.poll() == 2
    assert sidecar.status()["leases"] == 5
    before = len(sidecar.status()["sessions"])
    child = os.fork()
    if child == 0:
        session = Session(options(sidecar.directory, engine_id="doomed"))
        session.start()
        session.wait_connected(30)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    until(lambda: len(sidecar.status()["sessions"]) == before)
    engine.sidecars.close()
    until(lambda: sidecar.status()["leases"] == 0)


def test_autostart(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What vLLM's workers have in theirs binds whoever inherits it to a core of theirs.
    for name in ("LD_PRELOAD", "KMP_AFFINITY", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    directory = tmp_path / "auto" / "rank-0"
    below = ["--disk", f"{tmp_path}/disk-{{rank}}:32M:slab=8M", "--cascade-partial-delay=1ms"]
    started = {
        "autostart": True,
        "arena_limit": "16M",
        "binary": str(BINARY),
        "sidecar_args": below,
    }
    engine = Engine(model, directory, **started)
    other = Engine(model, directory, **started)
    pids: set[int] = set()

    def owner() -> int:
        return int((directory / "lock").read_text().split()[0])

    try:
        engine.start()
        other.start()
        pids.add(owner())
        assert os.stat(directory).st_mode & 0o777 == 0o700
        inherited = Path(f"/proc/{owner()}/environ").read_bytes()
        assert b"PATH=" in inherited and not any(
            name in inherited for name in (b"LD_PRELOAD", b"KMP_", b"OMP_")
        )
        engine.save_now(engine.save(0, [1], [1]))
        until(lambda: other.held(0, 1) == 1)
        until(lambda: status_of(directory)["tiers"][0]["pages"] == 1)
        assert (tmp_path / "disk-0").is_dir()
        # It is started anew when it dies, and finds its disk again.
        os.kill(owner(), signal.SIGKILL)
        until(lambda: not engine.worker.link.session.connected)
        until(lambda: engine.worker.link.session.connected, 60)
        pids.add(owner())
        assert len(pids) == 2
        engine.wait_up()
        until(lambda: engine.held(0, 1) == 1)
    finally:
        engine.close()
        other.close()
        with contextlib.suppress(OSError, ValueError):
            os.kill(owner(), signal.SIGKILL)


def program(path: Path, script: str) -> str:
    """A program that is no sidecar."""
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


LASTING = [
    (lambda at: "no-such-program", [], "no-such-program: no such program; set lookaside.binary"),
    (
        lambda at: program(at / "true", "exit 0"),
        [],
        "ended with 0 and said nothing; set lookaside.binary",
    ),
    (lambda at: program(at / "yes", "yes"), [], "ended with -9 and said 'y y"),
    (
        lambda at: str(BINARY),
        [f"--arena-limit={1 << 60}"],
        "not enough memory, even with all of it free",
    ),
    (lambda at: str(BINARY), ["--arena-kind=memory"], "arena.kind"),
    (lambda at: str(BINARY), ["--arena-limits=1G"], "unknown flag"),
]


@pytest.mark.parametrize(("binary", "arguments", "reason"), LASTING)
def test_what_can_never_start_is_one_line(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    binary: Callable[[Path], str],
    arguments: list[str],
    reason: str,
) -> None:
    monkeypatch.setattr("lookaside.autostart._FIRST_PAUSE_S", 0.0)
    starter = Autostart(binary(tmp_path), str(tmp_path / "rank-0"), arguments)
    for _ in range(3):
        starter.ensure()
        assert not starter.wait(60)
    (line,) = [record.getMessage() for record in caplog.records]
    assert reason in line and "\n" not in line and "does not try again" in line


def test_what_may_start_later_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookaside.autostart._FIRST_PAUSE_S", 0.0)
    directory = tmp_path / "rank-0"
    directory.mkdir(mode=0o755)
    starter = Autostart(str(BINARY), str(directory), ["--arena-limit=16M"])
    for _ in range(2):
        starter.ensure()
        assert starter.wait(60)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "mode 0755" in line and "tries again" in line
    directory.chmod(0o700)
    starter.ensure()
    assert starter.wait(60)
    pid = int((directory / "lock").read_text().split()[0])
    try:
        # Another worker's start finds it, and has nothing to say.
        caplog.clear()
        other = Autostart(str(BINARY), str(directory))
        other.ensure()
        assert other.wait(60)
        assert not caplog.records
    finally:
        os.kill(pid, signal.SIGKILL)


def test_autostarted_sidecar_is_nobodys_descendant(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    directory = tmp_path / "rank-0"
    starter = Autostart(str(BINARY), str(directory), ["--arena-limit=16M"])
    starter.ensure()
    assert starter.wait(60)
    pid = int((directory / "lock").read_text().split()[0])
    try:
        assert str(pid) in caplog.text and not [
            each for each in caplog.records if each.levelname != "INFO"
        ]
        assert psutil.Process().children(recursive=True) == []
        assert os.getsid(pid) == pid, "it is in no session of ours"
        assert "warn" not in (directory / "sidecar.log").read_text()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_second_client_maps_the_same_memory(engine: Engine, sidecar: Sidecar) -> None:
    heard = Heard()
    session = Session(options(sidecar.directory, engine_id="second"))
    session.subscribe(heard)
    session.start()
    assert session.wait_connected(30)
    assert heard.regions == [0]
    session.close()


@pytest.mark.parametrize(("seed", "below"), [(1, False), (2, False), (3, True), (4, True)])
def test_random_history_never_lies(model: Path, tmp_path: Path, seed: int, below: bool) -> None:
    """Saves and loads while the sidecar, with a disk below or without, is stopped, continued,
    killed and restarted.

    Every byte that a load reports as good is the byte that was saved under that name; every load is
    reported once, every save acknowledged once.
    """
    rng = random.Random(seed)
    sidecar = Sidecar(
        tmp_path / "chaos", arena_limit="2M", arena_initial="2M", **disk_in(tmp_path, below)
    )
    impatient = {"lookup_timeout_ms": 200, "store_timeout_ms": 100, "load_timeout_ms": 2000}
    engine = Engine(model, sidecar.directory, **impatient).start()
    content: dict[int, bytes] = {}  # what every page of that name holds, whoever saved it
    loads = hits = saves = 0
    stopped = False
    try:
        for turn in range(600):
            what = rng.random()
            prefix = rng.randrange(20)
            length = rng.randrange(1, 3 * PPC)
            names = [1000 * prefix + i + 1 for i in range(length)]
            blocks = rng.sample(range(1, BLOCKS), length)
            if what < 0.5:
                for name, block in zip(names, blocks, strict=True):
                    engine.cache[block] = float(name)
                    content.setdefault(name, page(engine.cache, block))
                engine.step(LookasideMetadata(saves=[engine.save(0, blocks, names)]))
                saves += 1
            elif what < 0.9:
                lookup = engine.ask(0, *names)
                until(lambda lookup=lookup: lookup.poll() is not None)
                held = lookup.poll()
                if not held:
                    continue
                loads += 1
                engine.cache[blocks] = -1.0
                if rng.random() < 0.05:
                    sidecar.kill()
                engine.load_now(engine.spec(f"r{turn}", lookup, blocks[:held]))
                if f"r{turn}" not in engine.failed:
                    hits += 1
                    for name, block in zip(names[:held], blocks, strict=False):
                        assert page(engine.cache, block) == content[name], (seed, turn, name)
            elif what < 0.94:
                stopped = not stopped
                if sidecar.process is not None:
                    sidecar.signal(signal.SIGSTOP if stopped else signal.SIGCONT)
            else:
                if sidecar.process is not None and rng.random() < 0.2:
                    sidecar.kill()
                if sidecar.process is None:
                    sidecar.start()
                    stopped = False
            if rng.random() < 0.5 and sidecar.process is not None:
                if stopped:
                    sidecar.signal(signal.SIGCONT)
                    stopped = False
                engine.wait_up()
        assert len(engine.acked) == len(set(engine.acked)) == saves
        assert len(engine.received) == len(set(engine.received)) == loads
        assert hits > 20, "too little happened to prove anything"
        assert engine.count("errors") == 0
    finally:
        if sidecar.process is not None:
            sidecar.signal(signal.SIGCONT)
        engine.close()
        sidecar.kill()


@pytest.mark.parametrize("cancel", [True, False])
def test_long_burst_of_lookups(model: Path, tmp_path: Path, cancel: bool) -> None:
    """Every one is answered, up to the bound on lookups that are neither loaded nor cancelled."""
    sidecar = Sidecar(
        tmp_path / "endpoint", lookup_lease="10m"
    )  # none ends by itself, however long this takes
    engine = Engine(model, sidecar.directory).start()
    try:
        long_burst_of_lookups(engine, sidecar, cancel)
    finally:
        engine.close()
        sidecar.kill()


def long_burst_of_lookups(engine: Engine, sidecar: Sidecar, cancel: bool) -> None:
    bound = 4096
    engine.save_now(engine.save(0, list(range(1, 9)), list(range(101, 109))))
    until(lambda: engine.held(0, *range(101, 109)) == 8)
    client = engine.sidecars._lookups
    before = sidecar.status()["counters"]["errors"]["busy"]
    asked = hashes(*range(101, 109))
    lookups: list[Lookup] = []
    hits: list[int | None] = []
    while len(hits) < bound + 500:
        unasked = engine.count("lookups_unasked")
        lookup = client.start(0, b"", asked)
        hit = client.wait(lookup, 60.0)
        if engine.count("lookups_unasked") != unasked:
            # A busy machine may make a session suspect for a moment; a queue that is too short does
            # every few dozen.
            until(lambda: engine.sidecars.sessions[0].available, 20)
            continue
        hits.append(hit)
        if cancel:
            lookup.cancel()
        else:
            lookups.append(lookup)
    assert engine.count("lookup_timeouts") == 0 and engine.count("lookups_unasked") < 10
    busy = sidecar.status()["counters"]["errors"]["busy"] - before
    if cancel:
        assert set(hits) == {8} and busy == 0
    else:
        assert set(hits[:bound]) == {8} and set(hits[bound:]) == {0} and busy == 500
    for number, lookup in enumerate(lookups):
        lookup.cancel()
        if number % 500 == 499:
            engine.held(0, 101)  # in order: a burst longer than the send queue would be dropped
    until(lambda: sidecar.status()["leases"] == 0, 60)
    assert engine.held(0, *range(101, 109)) == 8


def test_busy_sidecar_says_so(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path / "endpoint", sessions_limit=1)
    try:
        first, second = Session(options(sidecar.directory)), Session(options(sidecar.directory))
        first.start()
        assert first.wait_connected(30)
        second.start()
        until(lambda: second.refused is not None)
        refused = second.refused
        assert refused is not None and (refused.code, refused.field, refused.want) == (
            "busy",
            "sessions.limit",
            "1",
        )
        first.close()
        assert second.wait_connected(30)
        second.close()
    finally:
        sidecar.kill()


@pytest.mark.parametrize("what", ["load", "save"])
def test_sidecar_that_gives_us_up_waits_for_our_copies(
    sidecar: Sidecar, model: Path, what: str
) -> None:
    engine = Engine(model, sidecar.directory).start()
    try:
        engine.save_now(engine.save(0, [1, 2, 3, 4], [1, 2, 3, 4]))
        lookup = engine.lookup(0, 1, 2, 3, 4)
        assert lookup.poll() == 4
        inner = engine.worker.link.copies
        slow = SlowCopies(inner)
        engine.worker.link.copies = slow  # type: ignore[assignment]
        if what == "load":
            engine.step(LookasideMetadata(loads=[engine.spec("r", lookup, [9, 10, 11, 12])]))
        else:
            lookup.cancel()
            engine.step(LookasideMetadata(saves=[engine.save(0, [5, 6, 7, 8], [5, 6, 7, 8])]))
        until(lambda: slow.tickets)
        session = engine.worker.link.session
        assert session is not None and session._connection is not None
        first = session.session_id
        session._connection.line.socket.send(b"\xc1")
        until(lambda: session.connected and session.session_id not in (0, first))
        status = sidecar.status()
        assert [each["session"] for each in status["lingering"]] == [f"{first:016x}"]
        assert status["loads_in_flight" if what == "load" else "stores_in_flight"] == 1
        time.sleep(0.3)
        assert len(sidecar.status()["lingering"]) == 1
        slow.finish()
        until(
            lambda: engine.step() or (engine.received if what == "load" else len(engine.acked) == 2)
        )
        until(lambda: not sidecar.status()["lingering"])
        status = sidecar.status()
        assert (
            status["loads_in_flight"]
            == status["stores_in_flight"]
            == status["slots"]["filling"]
            == 0
        )
        assert engine.held(0, 5, 6, 7, 8) == 0 and engine.held(0, 1, 2, 3, 4) == 4
        engine.worker.link.copies = inner
        engine.save_now(engine.save(0, [5, 6, 7, 8], [5, 6, 7, 8]))
        assert engine.held(0, 5, 6, 7, 8) == 4
    finally:
        engine.close()


def test_real_sidecar_is_not_fooled_by_a_closed_socket(sidecar: Sidecar) -> None:
    """Handshakes cut off anywhere leave it serving."""
    for cut in range(3):
        sock = open_endpoint(str(sidecar.directory))
        if cut:
            sock.send(b"\x9a\x01")
        if cut == 2:
            sock.shutdown(socket.SHUT_WR)
        sock.close()
    assert sidecar.answers()


def test_the_two_commands_of_the_readme_meet(monkeypatch):
    """As they stand there: both name the same directory, with XDG_RUNTIME_DIR and without."""
    readme = (BINARY.parents[1] / "README.md").read_text()
    (serve,) = re.findall(r"^lookaside (serve .*)$", readme, re.MULTILINE)
    (transfer,) = re.findall(r"--kv-transfer-config '(\{.*?\})'", readme, re.DOTALL)
    extra = json.loads(transfer).get("kv_connector_extra_config")
    # /tmp, as all tests of this machine share what is there.
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    endpoint = parse(extra).endpoint_for(0, 0)
    assert endpoint == f"/tmp/lookaside-{os.getuid()}/rank-0"
    help_text = subprocess.run(
        [BINARY, "serve", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "default: ${XDG_RUNTIME_DIR:-/tmp}/lookaside-$UID/rank-0" in " ".join(help_text.split())
    with tempfile.TemporaryDirectory(prefix="la") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        endpoint = parse(extra).endpoint_for(0, 0)
        command = [str(BINARY), *shlex.split(serve.replace("16G", "16M")), "--arena-kind=memfd"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:

                def meets() -> bool:
                    assert process.poll() is None
                    with contextlib.suppress(EndpointError):
                        open_endpoint(endpoint).close()
                        return True
                    return False

                until(meets, 60)
            finally:
                process.kill()
