"""The worker role against a peer that can do what the real sidecar would not."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lookaside import wire
from lookaside.config import parse
from lookaside.connector import LookasideConnector
from lookaside.copies import Ticket
from lookaside.mapping import RegionError
from lookaside.metadata import LoadSpec, LookasideMetadata, SaveSpec
from lookaside.stats import Collector
from lookaside.worker import WorkerConnector
from peer import Conn, Peer, until, waited_in_vain
from scheduling import (
    BLOCK,
    full_attention,
    make_config,
    make_kv_config,
    skip_if_idle,
    sliding_window,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

BLOCKS = 32
PAGE = 4096  # 2 heads x 16 tokens x 32 floats
PPC = 4
# What is tested is what happens, not how fast: on a busy machine the default patience makes a miss
# of a hit at times.
PATIENT = {
    "lookaside.lookup_timeout_ms": 60_000,
    "lookaside.store_timeout_ms": 60_000,
    "lookaside.load_timeout_ms": 60_000,
}


def filled(seed: int = 0) -> torch.Tensor:
    """A KV cache of one layer in vLLM's LBHNC layout, every byte random."""
    values = torch.randint(0, 256, (BLOCKS * PAGE,), dtype=torch.uint8,
                           generator=torch.Generator().manual_seed(seed))  # fmt: skip
    return values.view(torch.float32).view(BLOCKS, 2, BLOCK, 32)


def page(cache: torch.Tensor, block: int) -> bytes:
    return cache[block].contiguous().view(torch.uint8).numpy().tobytes()


def hashes(*names: int) -> bytes:
    return b"".join(name.to_bytes(32, "big") for name in names)


def load_spec(
    request_id: str, refs: Any, first_page: int, block_ids: list[int], names: bytes = b"n" * 32
) -> LoadSpec:
    """A load of pages with a name, by refs of which the tickets are made up."""
    refs = tuple(wire.LeaseRef(session, lookup, b"t" * 16) for session, lookup in refs)
    return LoadSpec(request_id, refs, first_page, block_ids, names)


class Stand:
    """A worker role that has registered its KV cache, and steps like vLLM's."""

    def __init__(
        self,
        model: Path,
        endpoint: str,
        extra: dict[str, Any] | None = None,
        specs: list[Any] | None = None,
    ) -> None:
        settings = {
            "lookaside.endpoint": endpoint,
            "lookaside.chunk_tokens": PPC * BLOCK,
            **PATIENT,
            **(extra or {}),
        }
        self.vllm_config = make_config(model, settings)
        self.cache = filled()
        self.stats = Collector()
        self.worker = WorkerConnector(
            parse(settings), self.vllm_config, make_kv_config(BLOCKS, specs), self.stats
        )
        self.layers = [f"layer{number}" for number in range(len(specs or [None]))]
        self.counts: dict[str, Any] = {}
        self.received: list[str] = []
        self.started_over: list[str] = []
        self.invalid: set[int] = set()
        self.failed: dict[str, int] = {}
        self.acked: list[int] = []
        self.seconds: dict[int, float] = {}
        self._ids = iter(range(1, 1 << 30))

    def hurry(self, **timeouts_ms: int) -> None:
        """Change timeouts, which are such that no stall of the machine is noticed."""
        config = replace(self.worker.saves.config, **timeouts_ms)
        self.worker.saves.config = self.worker.loads.config = config

    def register(self) -> None:
        self.worker.register_kv_caches(dict.fromkeys(self.layers, self.cache))

    def step(
        self, meta: LookasideMetadata | None = None, forward: Any = None, idle: bool = False
    ) -> None:
        worker, meta = self.worker, meta or LookasideMetadata()
        meta.idle = idle
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        if forward is not None:
            forward()
        worker.start_load_kv(*(() if isinstance(worker, WorkerConnector) else (None,)))
        worker.wait_for_save()
        _, received = worker.get_finished(set())
        # Invalid blocks come no later than the request that they belong to.
        self.invalid |= worker.get_block_ids_with_load_errors()
        self.received += received or ()
        if isinstance(worker, WorkerConnector):
            self.started_over += worker.failed_requests(received or set())
        answer = worker.build_connector_worker_meta()
        if answer is not None:
            self.acked += answer.saves_done
            assert not self.seconds.keys() & answer.forward_seconds.keys(), "told twice"
            self.seconds |= answer.forward_seconds
            for request, ranks in answer.loads_failed.items():
                self.failed[request] = self.failed.get(request, 0) + ranks
        worker.clear_connector_metadata()

    def count(self, name: str) -> int:
        taken = self.stats.take()
        for key, value in (taken.data if taken else {}).items():
            if not isinstance(value, list):
                self.counts[key] = self.counts.get(key, 0) + value
        return self.counts.get(name, 0)

    def save(self, first_page: int, blocks: list[int], names: list[int], **more: Any) -> SaveSpec:
        prev = hashes(more.pop("prev", first_page - 1)) if first_page else b""
        return SaveSpec(next(self._ids), "r", first_page, prev, hashes(*names), blocks)

    def save_now(self, *specs: SaveSpec, forward: Any = None) -> None:
        self.step(LookasideMetadata(saves=list(specs)), forward)
        deadline = time.monotonic() + 30
        while not all(spec.save_id in self.acked for spec in specs):
            assert time.monotonic() < deadline, "a save was not acknowledged"
            self.step()
            time.sleep(0.005)

    def load_now(self, *specs: LoadSpec) -> None:
        self.step(LookasideMetadata(loads=list(specs)))
        deadline = time.monotonic() + 30
        while not all(spec.request_id in self.received for spec in specs):
            assert time.monotonic() < deadline, "a load was not reported"
            self.step()
            time.sleep(0.002)


class Shelf:
    """Grants from one region, page by page, as a sidecar with endless room would."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.next = 0
        self.stores: dict[int, wire.StoreGrant] = {}
        peer.script[wire.PrepareStore] = self.store

    def store(self, conn: Conn, message: wire.PrepareStore) -> wire.StoreGrant:
        pages = len(message.hashes) // 32
        grant = wire.Extent(message.first_page, pages, 0, self.next * PAGE)
        self.next += pages
        answer = wire.StoreGrant(message.id, self.next, 0, 0, (grant,))
        self.stores[answer.store] = answer
        return answer

    def bytes_at(self, offset: int, size: int = PAGE) -> bytes:
        return os.pread(self.peer.regions[0], size, offset)


@pytest.fixture
def stand(model: Path, peer: Peer) -> Iterator[Stand]:
    each = Stand(model, str(peer.directory))
    each.register()
    assert each.worker.link.session is not None and each.worker.link.session.connected
    yield each
    each.worker.shutdown()


def test_constructing_opens_nothing(model: Path) -> None:
    threads, fds = threading.active_count(), set(os.listdir("/proc/self/fd"))
    stand = Stand(model, "/nonexistent/rank-{rank}")
    assert threading.active_count() == threads
    assert len(set(os.listdir("/proc/self/fd")) - fds) == 0
    stand.step(
        LookasideMetadata(
            loads=[load_spec("a", ((1, 1),), 0, [1])], saves=[stand.save(0, [1], [1])]
        )
    )
    assert stand.received == ["a"] and stand.invalid == {1} and stand.acked == [1]
    stand.worker.shutdown()
    stand.worker.shutdown()


def test_worker_declares_its_space(stand: Stand, peer: Peer) -> None:
    (hello,) = peer.of(wire.Hello)
    assert (hello.role, hello.rank, hello.page_tokens, hello.page_bytes) == (
        "worker",
        0,
        BLOCK,
        PAGE,
    )
    assert (hello.pages_per_chunk, hello.digest_bytes) == (PPC, 32)
    assert {"model", "dtype", "page", "isa", "none_hash"} <= set(hello.fields)


def test_forwards_are_timed_where_asked(
    stand: Stand, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From when the step's questions have been sent to before its pages are copied."""
    Shelf(peer)
    skew = 0.0

    def forward() -> None:  # of 1000 seconds
        nonlocal skew
        skew += 1000

    monkeypatch.setattr(
        "lookaside.worker.forwards.time", SimpleNamespace(monotonic=lambda: time.monotonic() + skew)
    )
    stand.step(LookasideMetadata(timed=7), forward)
    stand.step(forward=forward)
    stand.step(LookasideMetadata(timed=9, saves=[stand.save(0, [3], [1])]))
    assert stand.seconds.keys() == {7, 9}
    assert 1000 <= stand.seconds[7] < 1100 and stand.seconds[9] < 100


class Events:
    """A device's events, which come true when the test says so."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.over = 0  # so many of those recorded have come true

    def make(self) -> Any:
        events = self

        class Event:
            def record(self) -> None:
                events.recorded.append(self)

            def query(self) -> bool:
                return events.recorded.index(self) < events.over

            def elapsed_time(self, end: Any) -> float:
                assert self.query() and end.query()
                return 250.0 * (events.recorded.index(end) - events.recorded.index(self))

        return Event()


def test_forwards_on_a_device_are_timed_without_waiting(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    monkeypatch.setattr("lookaside.worker.forwards._event", events.make)
    stand.worker._note_stream = lambda: 1
    for number in range(1, 30):
        stand.step(LookasideMetadata(timed=number))
    assert not stand.seconds and len(events.recorded) == 2 * 16, "bounded"
    events.over = 3
    stand.step()
    assert stand.seconds == {1: 0.25}
    events.over = 32
    stand.step()
    assert stand.seconds == dict.fromkeys(range(1, 17), 0.25)


def test_save_copies_what_the_forward_computed(stand: Stand, peer: Peer) -> None:
    shelf = Shelf(peer)

    def forward() -> None:
        stand.cache[3] = 42.0

    stand.save_now(stand.save(0, [3, 9, 4], [1, 2, 3]), forward=forward)
    peer.wait_for(wire.CommitStore)
    assert shelf.bytes_at(0) == page(stand.cache, 3) == b"\x00\x00\x28\x42" * (PAGE // 4)
    assert shelf.bytes_at(PAGE) == page(stand.cache, 9)
    assert shelf.bytes_at(2 * PAGE) == page(stand.cache, 4)
    assert peer.of(wire.CommitStore) == [wire.CommitStore(3)]
    assert stand.acked == [1]
    assert stand.count("save_bytes") == 3 * PAGE


def test_step_that_vllm_does_not_end_is_copied_out_when_the_next_begins(
    stand: Stand, peer: Peer
) -> None:
    """So it is with speculation on all ranks of a pipeline but the last one."""
    shelf = Shelf(peer)
    saves = [stand.save(0, [3], [1])]
    stand.worker.bind_connector_metadata(LookasideMetadata(saves=saves))
    stand.cache[3] = 42.0
    assert not peer.of(wire.CommitStore)
    stand.worker.bind_connector_metadata(LookasideMetadata())
    stand.cache[3] = 0.0
    stand.save_now()
    peer.wait_for(wire.CommitStore)
    assert shelf.bytes_at(0) == b"\x00\x00\x28\x42" * (PAGE // 4)


def test_save_of_what_is_held_copies_nothing(stand: Stand, peer: Peer) -> None:
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 0, 2, 0, ())
    stand.save_now(stand.save(0, [1, 2], [1, 2]))
    assert stand.acked == [1] and stand.count("save_failures") == 0


def test_only_what_was_granted_is_copied(stand: Stand, peer: Peer) -> None:
    Shelf(peer)
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(
        m.id, 5, 1, 1, (wire.Extent(5, 2, 0, 7 * PAGE),)
    )
    stand.save_now(stand.save(4, [10, 11, 12, 13], [4, 5, 6, 7]))
    region = os.pread(peer.regions[0], BLOCKS * PAGE, 0)
    assert region[7 * PAGE : 8 * PAGE] == page(stand.cache, 11)
    assert region[8 * PAGE : 9 * PAGE] == page(stand.cache, 12)
    assert region.count(0) >= 30 * PAGE, "nothing else was touched"
    assert stand.count("shed_pages") == 1
    (asked,) = peer.of(wire.PrepareStore)
    assert (asked.first_page, asked.prev) == (4, hashes(3))


def test_long_save_is_asked_for_in_pieces(stand: Stand, peer: Peer) -> None:
    shelf = Shelf(peer)
    live = stand.worker.link.live
    assert live is not None
    stand.worker.link.live = type(live)(live.session_id, live.regions, 2 * PPC)
    names = list(range(100, 120))
    stand.save_now(stand.save(8, list(range(1, 21)), names))
    asked = peer.of(wire.PrepareStore)
    assert [(m.first_page, len(m.hashes) // 32) for m in asked] == [(8, 8), (16, 8), (24, 4)]
    assert [m.prev for m in asked] == [hashes(7), hashes(107), hashes(115)]
    assert len(peer.wait_for(wire.CommitStore, 3)) == 3
    for index in range(20):
        assert shelf.bytes_at(index * PAGE) == page(stand.cache, index + 1)


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 2, 0, BLOCKS * PAGE - PAGE)],  # beyond the region
        [(0, 2, 9, 0)],  # an unknown region
        [(0, 3, 0, 0)],  # more than was asked
        [(7, 1, 0, 0)],  # not what was asked
        [(0, 2, 0, (1 << 63) - 1)],
        [(0, 0xFFFFFFFE, 0, 0)],
    ],
)
def test_grants_that_cannot_be_right_are_failed(
    stand: Stand, peer: Peer, extents: list[tuple[int, ...]]
) -> None:
    grants = tuple(wire.Extent(*extent) for extent in extents)
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 5, 0, 0, grants)
    stand.save_now(stand.save(0, [1, 2], [1, 2]))
    assert peer.wait_for(wire.CommitStore) == [wire.CommitStore(5, (0,))]
    assert not any(os.pread(peer.regions[0], BLOCKS * PAGE, 0))


def test_room_that_comes_late_is_given_back(stand: Stand, peer: Peer) -> None:
    asked: list[tuple[Conn, Any]] = []
    peer.script[wire.PrepareStore] = lambda conn, m: asked.append((conn, m))
    waits = waited_in_vain(stand.worker.link.session)
    stand.hurry(store_timeout_ms=50)
    stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1])]))
    assert len(waits) == 1
    assert stand.acked == [1] and stand.count("save_failures") == 1
    until(lambda: asked)
    conn, message = asked[0]
    conn.send(wire.StoreGrant(message.id, 77, 0, 0, (wire.Extent(0, 1, 0, 0),)))
    assert peer.wait_for(wire.AbortStore) == [wire.AbortStore(77)]
    assert not any(os.pread(peer.regions[0], PAGE, 0))


def test_silent_peer_costs_one_patience(stand: Stand, peer: Peer) -> None:
    for kind in (wire.PrepareStore, wire.PrepareLoad, wire.Ping):
        peer.script[kind] = lambda conn, m: None
    waits = waited_in_vain(stand.worker.link.session)
    stand.hurry(store_timeout_ms=50)
    stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1])]))
    for i in range(50):
        stand.step(
            LookasideMetadata(
                saves=[stand.save(0, [1], [1])],
                loads=[load_spec(f"r{i}", ((1, 1),), 0, [i % 8 + 1])],
            )
        )
    assert len(waits) == 1
    assert len(stand.acked) == 51 and len(stand.received) == 50 == len(set(stand.received))
    assert set(stand.failed) == set(stand.received)


def test_refused_store_is_acknowledged(stand: Stand, peer: Peer) -> None:
    peer.script[wire.PrepareStore] = lambda conn, m: wire.Error(m.id, "busy", "no")
    stand.save_now(stand.save(0, [1], [1]))
    assert stand.count("save_failures") == 1


@pytest.mark.parametrize("what", ["hashes", "first_page", "blocks"])
def test_malformed_save_is_acknowledged(stand: Stand, what: str) -> None:
    spec = stand.save(0, [1, 2], [1, 2])
    if what == "hashes":
        spec.hashes = spec.hashes[:-1]
    elif what == "first_page":
        spec.first_page = 1
    else:
        spec.block_ids = []
    stand.save_now(spec)
    assert stand.count("errors") == 1


def grant_load(peer: Peer, *extents: tuple[int, ...]) -> None:
    peer.script[wire.PrepareLoad] = lambda conn, m: wire.LoadGrant(
        m.id, 55, m.names, tuple(wire.Extent(*extent) for extent in extents)
    )


def test_load_fills_the_blocks_and_releases(stand: Stand, peer: Peer) -> None:
    content = random.Random(1).randbytes(BLOCKS * PAGE)
    os.pwrite(peer.regions[0], content, 0)
    before = stand.cache.clone()
    grant_load(peer, (4, 2, 0, 10 * PAGE), (6, 1, 0, 3 * PAGE))
    stand.load_now(load_spec("r", ((71, 72),), 4, [5, 8, 6]))
    (asked,) = peer.of(wire.PrepareLoad)
    assert (asked.session, asked.lookup, asked.first_page, asked.pages) == (71, 72, 4, 3)
    assert (asked.ticket, asked.names) == (b"t" * 16, b"n" * 32)
    assert page(stand.cache, 5) == content[10 * PAGE : 11 * PAGE]
    assert page(stand.cache, 8) == content[11 * PAGE : 12 * PAGE]
    assert page(stand.cache, 6) == content[3 * PAGE : 4 * PAGE]
    untouched = [b for b in range(BLOCKS) if b not in (5, 6, 8)]
    assert torch.equal(
        stand.cache[untouched].view(torch.uint8), before[untouched].view(torch.uint8)
    )
    assert peer.wait_for(wire.Release) == [wire.Release(55)]
    assert stand.received == ["r"] and not stand.invalid and not stand.failed
    assert stand.count("load_bytes") == 3 * PAGE
    for _ in range(5):
        stand.step()
    assert stand.received == ["r"], "exactly once"


def test_null_block_is_never_written(stand: Stand, peer: Peer) -> None:
    os.pwrite(peer.regions[0], b"\xff" * BLOCKS * PAGE, 0)
    before = page(stand.cache, 0)
    grant_load(peer, (0, 3, 0, 0))
    stand.load_now(load_spec("r", ((1, 1),), 0, [0, 2, 0]))
    assert page(stand.cache, 0) == before
    assert page(stand.cache, 2) == b"\xff" * PAGE


@pytest.mark.parametrize(
    "extents",
    [
        [],
        [(0, 1, 0, 0)],  # too few
        [(0, 1, 0, 0), (0, 1, 0, PAGE)],  # the same twice
        [(0, 3, 0, 0)],  # too many
        [(0, 2, 0, BLOCKS * PAGE - PAGE)],  # beyond the region
        [(0, 2, 5, 0)],  # an unknown region
        [(1, 2, 0, 0)],
    ],
)
def test_load_of_anything_else_than_asked_fails(
    stand: Stand, peer: Peer, extents: list[tuple[int, ...]]
) -> None:
    before = stand.cache.clone()
    grant_load(peer, *extents)
    stand.load_now(load_spec("r", ((1, 1),), 0, [5, 6]))
    assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
    assert peer.wait_for(wire.Release) == [wire.Release(55)]
    assert torch.equal(stand.cache.view(torch.uint8), before.view(torch.uint8))


def test_grant_that_names_other_pages_fails(stand: Stand, peer: Peer) -> None:
    before = stand.cache.clone()
    peer.script[wire.PrepareLoad] = lambda conn, m: wire.LoadGrant(
        m.id, 55, b"o" * 32, (wire.Extent(0, 2, 0, 0),)
    )
    stand.load_now(load_spec("r", ((1, 1),), 0, [5, 6]))
    assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
    assert peer.wait_for(wire.Release) == [wire.Release(55)]
    assert torch.equal(stand.cache.view(torch.uint8), before.view(torch.uint8)), (
        "nothing was copied"
    )


def test_refused_load_fails(stand: Stand, peer: Peer) -> None:
    peer.script[wire.PrepareLoad] = lambda conn, m: wire.Error(m.id, "not_found", "expired")
    stand.load_now(load_spec("r", ((1, 1),), 0, [5, 0]))
    assert stand.invalid == {5} and stand.failed == {"r": 1}


@pytest.mark.parametrize("refs", [(), ((0, 0),)])
def test_load_without_a_lease_fails_at_once(
    stand: Stand, refs: tuple[tuple[int, int], ...]
) -> None:
    stand.load_now(load_spec("r", refs, 0, [5]))
    assert stand.invalid == {5} and stand.received == ["r"]


def test_load_granted_late_is_given_back(stand: Stand, peer: Peer) -> None:
    asked: list[tuple[Conn, Any]] = []
    peer.script[wire.PrepareLoad] = lambda conn, m: asked.append((conn, m))
    stand.hurry(load_timeout_ms=50)
    stand.load_now(load_spec("r", ((1, 1),), 0, [5]))
    assert stand.failed == {"r": 1}
    until(lambda: asked)
    conn, message = asked[0]
    conn.send(wire.LoadGrant(message.id, 9, message.names, (wire.Extent(0, 1, 0, 0),)))
    assert peer.wait_for(wire.Release) == [wire.Release(9)]


def test_many_loads_are_each_reported_once(stand: Stand, peer: Peer) -> None:
    rng = random.Random(5)
    pages = random.Random(6).randbytes(BLOCKS * PAGE)
    os.pwrite(peer.regions[0], pages, 0)

    def answer(conn: Conn, m: wire.PrepareLoad) -> Any:
        if m.lookup % 3 == 2:
            return wire.Error(m.id, "stale", "gone")
        return wire.LoadGrant(
            m.id, m.lookup + 1, m.names, (wire.Extent(0, 1, 0, m.lookup % 16 * PAGE),)
        )

    peer.script[wire.PrepareLoad] = answer
    specs = [load_spec(f"r{i}", ((1, i),), 0, [1 + i % (BLOCKS - 1)]) for i in range(200)]
    todo = list(specs)
    while todo or len(stand.received) < len(specs):
        batch = [todo.pop(0) for _ in range(min(len(todo), rng.randrange(8)))]
        stand.step(LookasideMetadata(loads=batch))
    assert sorted(stand.received) == sorted(spec.request_id for spec in specs)
    assert set(stand.failed) == {f"r{i}" for i in range(200) if i % 3 == 2}
    assert len(peer.wait_for(wire.Release, 134)) == 134


class Moods:
    """A sidecar that falls silent and speaks again between any two requests of a step.

    Wraps Session.submit: before a request the session turns suspect, as after a missed
    deadline, or what it was suspected of is over, as after a Pong.
    """

    def __init__(self, stand: Stand, rng: random.Random) -> None:
        self.session: Any = stand.worker.link.session
        self.rng = rng
        self.submit = self.session.submit
        self.session.submit = self

    def __call__(self, *args: Any) -> Any:
        connection = self.session._connection
        with self.session._lock:
            connection.suspect = connection.connected and self.rng.random() < 0.4
        try:
            return self.submit(*args)
        finally:
            with self.session._lock:
                connection.suspect = False


@pytest.mark.parametrize("seed", range(8))
def test_each_request_is_received_once_whatever_happens(
    stand: Stand, peer: Peer, seed: int
) -> None:
    """Random loads of one to three specs a request, of which any may fail at any moment, in any
    order."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    session = Moods(stand, rng).session
    waiting: list[tuple[Conn, wire.PrepareLoad]] = []

    def grant(message: wire.PrepareLoad) -> Any:
        if message.lookup % 4 == 0:
            return wire.Error(message.id, "not_found", "expired")
        first, pages = message.first_page, message.pages - (message.lookup % 5 == 0)
        extents = (wire.Extent(first, pages, 0, 0),) if pages else ()
        return wire.LoadGrant(message.id, message.lookup + 1, message.names, extents)

    def asked(conn: Conn, message: wire.PrepareLoad) -> Any:
        if message.lookup % 3 == 0:
            waiting.append((conn, message))  # answered when the test says so
            return None
        return grant(message)

    def answer() -> None:
        while waiting:
            conn, message = waiting.pop(rng.randrange(len(waiting)))
            conn.send(grant(message))

    def check() -> None:
        assert len(stand.received) == len(set(stand.received)), "received twice"
        assert set(stand.failed) <= set(stand.received) <= set(ordered)

    peer.script[wire.PrepareLoad] = asked
    lookups = iter(range(1, 1 << 20))
    ordered: list[str] = []
    late_aborts: list[str] = []
    for _ in range(60):
        meta = LookasideMetadata(aborted=late_aborts)
        late_aborts = []
        for _ in range(rng.randrange(3)):
            request_id = f"r{len(ordered)}"
            ordered.append(request_id)
            for number in range(rng.choice((1, 2, 2, 3))):
                refs = ((1, next(lookups)),) if rng.random() < 0.9 else ()
                blocks = [rng.randrange(1, BLOCKS) for _ in range(rng.randrange(1, 4))]
                meta.loads.append(load_spec(request_id, refs, 4 * number, blocks))
            if rng.random() < 0.2:
                rng.choice((meta.aborted, late_aborts)).append(request_id)
        rng.shuffle(meta.loads)
        if rng.random() < 0.3:
            answer()
        if rng.random() < 0.05 and not peer.conns[-1].closed.is_set():
            with contextlib.suppress(OSError):  # closed just now
                peer.conns[-1].sock.shutdown(socket.SHUT_WR)
        if rng.random() < 0.1:
            until(lambda: session.connected)
        stand.step(meta, idle=rng.random() < 0.5)
        check()
    until(lambda: answer() or stand.step() or len(stand.received) >= len(ordered))
    for _ in range(3):
        stand.step()
    check()
    assert sorted(stand.received) == sorted(ordered)
    assert (
        not stand.worker.reports._out
        and not stand.worker.reports._failed
        and not stand.worker.reports._aborted
    )


class SlowCopies:
    """Copies that end when the test says so; delegates the bytes to the real ones."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.tickets: list[Ticket] = []
        self.error: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _slow(self, *_: Any) -> Ticket:
        self.tickets.append(Ticket())
        return self.tickets[-1]

    gather = scatter = _slow

    def finish(self) -> None:
        for ticket in self.tickets:
            ticket._finish(self.error)
        self.tickets = []


@pytest.fixture
def slow(stand: Stand) -> SlowCopies:
    copies = SlowCopies(stand.worker.link.copies)
    stand.worker.link.copies = copies  # type: ignore[assignment]
    return copies


def test_load_is_not_reported_while_its_bytes_move(
    stand: Stand, peer: Peer, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even at its deadline, or when it is aborted: vLLM would reuse the blocks."""
    grant_load(peer, (0, 1, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5])]))
    until(lambda: slow.tickets)
    stand.step(LookasideMetadata(aborted=["r"]))
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000, sleep=time.sleep)
    monkeypatch.setattr("lookaside.worker.loads.time", later)  # long past its deadline
    for _ in range(6):
        stand.step()
        assert not stand.received and not peer.of(wire.Release)
        time.sleep(0.05)
    slow.finish()
    until(lambda: stand.step() or stand.received)
    assert stand.received == ["r"]
    assert not stand.invalid, "an aborted request's blocks are nobody's business"
    peer.wait_for(wire.Release)


def test_load_that_is_shorter_than_the_forward_is_reported_in_its_step(
    stand: Stand, peer: Peer
) -> None:
    """It moves beside the forward, and not after it."""
    os.pwrite(peer.regions[0], b"\xff" * BLOCKS * PAGE, 0)
    grant_load(peer, (0, 1, 0, 0))
    meta = LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5])])
    stand.step(meta, forward=lambda: until(lambda: stand.worker.reports._received))
    assert stand.received == ["r"] and not stand.invalid
    assert page(stand.cache, 5) == b"\xff" * PAGE


def test_step_without_a_forward_waits_for_a_load(
    stand: Stand, peer: Peer, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of being asked again at once; one with a forward has waited enough."""
    monkeypatch.setattr("lookaside.worker.reports._IDLE_STEP_PATIENCE_S", 30.0)
    grant_load(peer, (0, 1, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5])]))
    until(lambda: slow.tickets)
    stand.step()
    assert not stand.received
    threading.Timer(0.1, slow.finish).start()
    stand.step(idle=True)
    assert stand.received == ["r"]
    stand.step(idle=True)  # nothing is out: nothing to wait for
    assert stand.received == ["r"]


def test_aborted_load_is_not_copied(stand: Stand, peer: Peer) -> None:
    before = stand.cache.clone()
    os.pwrite(peer.regions[0], b"\xff" * PAGE, 0)
    grant_load(peer, (0, 1, 0, 0))
    load = load_spec("r", ((1, 1),), 0, [5])
    stand.worker.bind_connector_metadata(LookasideMetadata(loads=[load]))
    stand.worker.bind_connector_metadata(LookasideMetadata(aborted=["r", "unknown"]))
    until(lambda: stand.step() or stand.received)
    assert stand.received == ["r"] and not stand.failed and not stand.invalid
    assert torch.equal(stand.cache.view(torch.uint8), before.view(torch.uint8))
    peer.wait_for(wire.Release)


def test_session_lost_during_a_load_fails_it(stand: Stand, peer: Peer, slow: SlowCopies) -> None:
    grant_load(peer, (0, 2, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    until(lambda: slow.tickets)
    live = stand.worker.link.live
    assert live is not None
    peer.close()
    until(lambda: stand.worker.link.live is None)
    assert not live.regions.wait_idle(0), "given back under a copy"
    stand.step()
    assert not stand.received
    slow.finish()
    until(lambda: stand.step() or stand.received)
    assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
    assert live.regions.wait_idle(30)


@pytest.mark.parametrize("what", ["load", "save"])
def test_given_up_session_stays_open_until_its_copies_have_ended(
    stand: Stand, peer: Peer, slow: SlowCopies, what: str
) -> None:
    """However long they take: its end would give our room to others while we write there."""
    Shelf(peer)
    grant_load(peer, (0, 2, 0, 0))
    if what == "load":
        stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    else:
        stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1])]))
    until(lambda: slow.tickets)
    tickets = list(slow.tickets)
    live = stand.worker.link.live
    assert live is not None
    peer.conns[0].sock.shutdown(socket.SHUT_WR)
    until(lambda: stand.worker.link.live is not live and stand.worker.link.live is not None)
    until(lambda: stand.worker.link.session.connected)
    slow.tickets.clear()
    # The worker has a session again, and the old one is not over.
    stand.save_now(stand.save(8, [], []))
    assert not peer.conns[0].closed.wait(0.3)
    assert not live.regions.wait_idle(0), "given back under a copy"
    assert peer.conns[0].claimed and mapped(peer.regions[0]) == 1
    for ticket in tickets:
        ticket._finish(None)
    until(lambda: stand.step() or (stand.received if what == "load" else len(stand.acked) == 2))
    assert peer.conns[0].closed.wait(30)
    assert live.regions.wait_idle(0) and not peer.conns[0].claimed
    assert not peer.conns[1].closed.is_set() and peer.conns[1].claimed
    assert mapped(peer.regions[0]) == 1, "that of both sessions"
    if what == "load":
        assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
    assert not peer.of(wire.Release) and not peer.of(wire.CommitStore), (
        "the new session knows nothing of them"
    )


@pytest.mark.parametrize("how", ["state", "generation"])
def test_load_from_a_sidecar_that_says_it_is_over_fails(
    stand: Stand, peer: Peer, slow: SlowCopies, how: str
) -> None:
    grant_load(peer, (0, 1, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5])]))
    until(lambda: slow.tickets)
    if how == "generation":
        peer.generation += 1
    peer.set_state(3 if how == "state" else 1)
    slow.finish()
    until(lambda: stand.step() or stand.received)
    assert stand.failed == {"r": 1}


def test_copy_errors_fail_the_load_and_abort_the_store(
    stand: Stand, peer: Peer, slow: SlowCopies
) -> None:
    Shelf(peer)
    grant_load(peer, (0, 1, 0, 0))
    slow.error = "the device has fallen off the bus"
    stand.step(
        LookasideMetadata(
            loads=[load_spec("r", ((1, 1),), 0, [5])], saves=[stand.save(0, [1], [1])]
        )
    )
    until(lambda: len(slow.tickets) == 2)
    slow.finish()
    until(lambda: stand.step() or (stand.received and stand.acked))
    assert stand.failed == {"r": 1}
    peer.wait_for(wire.AbortStore)
    assert not peer.of(wire.CommitStore)


def test_pages_that_cannot_be_encoded_are_not_committed(model: Path, peer: Peer) -> None:
    """Of two grants, the one with such a page is given back. What was encoded is loaded again."""
    stand = Stand(model, str(peer.directory), {"lookaside.compress": "int8"})
    stand.cache = torch.randn(stand.cache.shape, generator=torch.Generator().manual_seed(1))
    stand.register()
    try:
        small = stand.worker.link.pages.page_bytes
        hello = peer.of(wire.Hello)[-1]
        assert small == hello.page_bytes == 1088  # 1,024 codes and 8 scales, in whole lines
        assert "int8" in dict(hello.fields)["encoding"]
        grants = (wire.Extent(0, 2, 0, 0), wire.Extent(2, 2, 0, 2 * small))
        peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 5, 0, 0, grants)
        stand.cache[12, 0, 0] = float("nan")
        stand.save_now(stand.save(0, [10, 11, 12, 13], [0, 1, 2, 3]))
        peer.wait_for(wire.CommitStore)
        assert peer.of(wire.CommitStore) == [wire.CommitStore(5, (1,))]
        assert (stand.count("unfit_pages"), stand.count("save_bytes")) == (1, 2 * small)
        grant_load(peer, (0, 2, 0, 0))
        before = stand.cache.clone()
        stand.load_now(load_spec("r", ((1, 1),), 0, [20, 21]))
        assert not stand.failed and stand.count("load_bytes") == 2 * small
        assert (stand.cache[20:22] - before[10:12]).abs().max() < before[10:12].abs().max() / 200
        assert torch.equal(stand.cache[:12], before[:12])
    finally:
        stand.worker.shutdown()


def test_asynchronous_save_is_acknowledged_when_its_copy_ends(
    stand: Stand, peer: Peer, slow: SlowCopies
) -> None:
    """As on CUDA: the scheduler keeps the blocks until then."""
    Shelf(peer)
    stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1]), stand.save(4, [2], [2])]))
    for _ in range(5):
        stand.step()
    assert not stand.acked and not peer.of(wire.CommitStore)
    slow.tickets.pop(0)._finish(None)
    stand.step()
    assert stand.acked == [1]
    slow.finish()
    stand.step()
    assert stand.acked == [1, 2]
    assert len(peer.wait_for(wire.CommitStore, 2)) == 2


def test_session_lost_between_room_and_copy(stand: Stand, peer: Peer) -> None:
    Shelf(peer)
    spec = stand.save(0, [1], [1])

    def die() -> None:
        peer.wait_for(wire.PrepareStore)
        peer.close()
        until(lambda: stand.worker.link.live is None)

    stand.save_now(spec, forward=die)
    assert stand.count("save_failures") == 1


def test_nothing_that_goes_wrong_inside_leaves_the_connector(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError("injected")

    connector = LookasideConnector(
        stand.vllm_config, KVConnectorRole.WORKER, make_kv_config(BLOCKS)
    )
    worker, connector._worker, connector._stats = stand.worker, stand.worker, stand.stats
    for part, name in (
        (worker.loads, "order"),
        (worker.saves, "_start"),
        (worker.saves, "finish"),
        (worker, "_order_loads"),
    ):
        monkeypatch.setattr(part, name, broken)
    stand.worker = connector  # type: ignore[assignment]
    meta = LookasideMetadata(
        loads=[load_spec("r", ((1, 1),), 0, [5])], saves=[stand.save(0, [1], [1])]
    )
    for _ in range(3):
        stand.step(meta)
    connector.register_kv_caches({})
    assert not stand.received and not stand.acked
    assert stand.count("errors") >= 3
    stand.worker = worker


def test_sidecar_comes_goes_and_comes_back(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "endpoint"
    stand = Stand(model, str(directory))
    stand.register()  # an absent sidecar does not hold it up
    for round_ in range(3):
        stand.save_now(stand.save(0, [1], [1]))
        peer = Peer(directory, region_bytes=BLOCKS * PAGE)
        shelf = Shelf(peer)
        until(lambda: stand.worker.link.live is not None and stand.worker.link.session.connected)
        stand.save_now(stand.save(0, [round_ + 1], [1]))
        peer.wait_for(wire.CommitStore)
        assert shelf.bytes_at(0) == page(stand.cache, round_ + 1)
        peer.close()
        until(lambda: stand.worker.link.live is None)
    stand.worker.shutdown()


def test_shutdown_ends_everything(model: Path, peer: Peer) -> None:
    threads = set(threading.enumerate())
    stand = Stand(model, str(peer.directory))
    stand.register()
    Shelf(peer)
    stand.save_now(stand.save(0, [1], [1]))
    stand.worker.shutdown()
    stand.worker.shutdown()
    assert peer.conns[-1].closed.wait(30)
    until(lambda: not [t for t in set(threading.enumerate()) - threads if "lookaside" in t.name])
    assert "memfd:region" not in Path("/proc/self/maps").read_text()
    stand.step(
        LookasideMetadata(
            loads=[load_spec("late", ((1, 1),), 0, [5])], saves=[stand.save(0, [1], [1])]
        )
    )
    assert stand.received == ["late"] and len(stand.acked) == 2


# ---- regions that come and go ----


def mapped(fd: int) -> int:
    """How many mappings of what is behind fd this process has."""
    status = os.fstat(fd)
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, _, device, inode, *_ = line.split()
        major, minor = (int(part, 16) for part in device.split(":"))
        count += (os.makedev(major, minor), int(inode)) == (status.st_dev, status.st_ino)
    return count


def test_region_at_an_offset_comes_while_the_session_lives(stand: Stand, peer: Peer) -> None:
    content = random.Random(1).randbytes(PAGE)
    index = peer.add_region(offset=12 * PAGE, kind="devdax")
    os.pwrite(peer.regions[index], content, 14 * PAGE)
    assert peer.wait_for(wire.RegionMapped) == [wire.RegionMapped(index)]
    grant_load(peer, (0, 1, index, 2 * PAGE))
    stand.load_now(load_spec("r", ((1, 1),), 0, [5]))
    assert not stand.failed and page(stand.cache, 5) == content
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(
        m.id, 5, 0, 0, (wire.Extent(0, 1, index, PAGE),)
    )
    stand.save_now(stand.save(0, [7], [1]))
    assert peer.wait_for(wire.CommitStore) == [wire.CommitStore(5)]
    assert os.pread(peer.regions[index], PAGE, 13 * PAGE) == page(stand.cache, 7)


def test_region_of_another_sidecar_is_read_and_never_written(stand: Stand, peer: Peer) -> None:
    content = random.Random(1).randbytes(PAGE)
    index = peer.add_region(read_only=True)
    os.pwrite(peer.regions[index], content, 2 * PAGE)
    grant_load(peer, (0, 1, index, 2 * PAGE), (1, 1, 0, 0))
    stand.load_now(load_spec("r", ((1, 1),), 0, [5, 6]))
    assert not stand.failed and page(stand.cache, 5) == content
    grants = (wire.Extent(0, 1, index, 0), wire.Extent(1, 1, 0, 0))
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 5, 0, 0, grants)
    stand.save_now(stand.save(0, [7, 8], [1, 2]))
    assert peer.wait_for(wire.CommitStore) == [wire.CommitStore(5, (0,))], (
        "a grant that would have it written"
    )
    assert os.pread(peer.regions[0], PAGE, 0) == page(stand.cache, 8)
    assert not any(os.pread(peer.regions[index], PAGE, 0))
    peer.remove_region(index)
    assert peer.wait_for(wire.RegionUnmapped) == [wire.RegionUnmapped(index)] and not mapped(
        peer.regions[index]
    )


def test_region_of_another_sidecar_that_cannot_be_mapped_fails_its_loads_alone(
    stand: Stand, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: Any = stand.worker.link.copies

    def attach(region: int, address: int, size: int, read_only: bool = False) -> None:
        raise RuntimeError("cuMemHostRegister: not supported")

    monkeypatch.setattr(copies, "attach", attach)
    index = peer.add_region(read_only=True)
    grant_load(peer, (0, 1, index, 0))
    stand.load_now(load_spec("a", ((1, 1),), 0, [5]))
    assert stand.invalid == {5} and stand.failed == {"a": 1}
    assert peer.wait_for(wire.Release) == [wire.Release(55)], "nothing is wrong with the page"
    grant_load(peer, (0, 1, 0, 0))
    stand.load_now(load_spec("b", ((1, 1),), 0, [6]))
    assert stand.received == ["a", "b"] and stand.failed == {"a": 1} and len(peer.conns) == 1


def test_the_sidecar_is_told_when_a_region_can_be_used(
    stand: Stand, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the device has pinned it; and of one that will never be, too, so that nobody waits
    for that."""
    copies: Any = stand.worker.link.copies
    attach, go_on = copies.attach, threading.Event()

    def slowly(region: int, address: int, size: int, read_only: bool = False) -> None:
        go_on.wait()
        attach(region, address, size, read_only)

    monkeypatch.setattr(copies, "attach", slowly)
    index = peer.add_region()
    until(lambda: mapped(peer.regions[index]))
    stand.worker.link.session.submit(lambda request: wire.ClearSpace(request))
    peer.wait_for(wire.ClearSpace)
    assert not peer.of(wire.RegionMapped)
    go_on.set()
    assert peer.wait_for(wire.RegionMapped) == [wire.RegionMapped(index)], (
        "those of the handshake are not told of"
    )
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(
        m.id, 5, 0, 0, (wire.Extent(0, 1, index, 0),)
    )
    stand.save_now(stand.save(0, [2], [1]))
    assert peer.wait_for(wire.CommitStore) == [wire.CommitStore(5)], "nothing of it is bad"

    def never(region: int, address: int, size: int, read_only: bool = False) -> None:
        raise RuntimeError("cuMemHostRegister: out of memory")

    monkeypatch.setattr(copies, "attach", never)
    failed = peer.add_region()
    assert peer.wait_for(wire.RegionMapped, 2)[1:] == [wire.RegionMapped(failed)]

    def unmappable(*arguments: object) -> int:
        raise RegionError("out of addresses")

    monkeypatch.setattr("lookaside.mappings.map_region", unmappable)
    index = peer.add_region()
    assert peer.wait_for(wire.RegionMapped, 3)[2:] == [wire.RegionMapped(index)]


def test_removed_region_is_unmapped_and_told(stand: Stand, peer: Peer) -> None:
    index = peer.add_region()
    assert peer.wait_for(wire.RegionMapped) == [wire.RegionMapped(index)]
    peer.remove_region(0)
    assert peer.wait_for(wire.RegionUnmapped) == [wire.RegionUnmapped(0)]
    assert not mapped(peer.regions[0]) and mapped(peer.regions[index])
    # What a grant says of it from now on is an error of that grant.
    grant_load(peer, (0, 1, 0, 0), (1, 1, index, 0))
    stand.load_now(load_spec("r", ((1, 1),), 0, [5, 6]))
    assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
    grants = (wire.Extent(0, 1, 0, 0), wire.Extent(1, 1, index, 0))
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 5, 0, 0, grants)
    stand.save_now(stand.save(0, [1, 2], [1, 2]))
    assert peer.wait_for(wire.CommitStore) == [wire.CommitStore(5, (0,))]
    assert os.pread(peer.regions[index], PAGE, 0) == page(stand.cache, 2)
    # One that was never there, or could not be mapped, is told of as well: the sidecar waits for
    # that.
    peer.remove_region(77)
    peer.wait_for(wire.RegionUnmapped, 2)
    peer.remove_region(index)
    assert peer.wait_for(wire.RegionUnmapped, 3)[1:] == [
        wire.RegionUnmapped(77),
        wire.RegionUnmapped(index),
    ]
    assert (
        stand.worker.link.session is not None
        and stand.worker.link.session.connected
        and len(peer.conns) == 1
    )


@pytest.mark.parametrize("what", ["load", "save"])
def test_removed_region_stays_until_its_last_copy_has_ended(
    stand: Stand, peer: Peer, slow: SlowCopies, what: str
) -> None:
    """A sidecar that removes what it has leased is wrong; but it is not vLLM that dies of it."""
    Shelf(peer)
    grant_load(peer, (0, 2, 0, 0))
    index = peer.add_region()
    if what == "load":
        stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    else:
        stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1])]))
    until(lambda: slow.tickets)
    peer.remove_region(0)
    peer.remove_region(index)
    assert peer.wait_for(wire.RegionUnmapped) == [wire.RegionUnmapped(index)], "no copy is there"
    stand.step()
    assert mapped(peer.regions[0]) and not mapped(peer.regions[index]), "unmapped under a copy"
    slow.finish()
    until(lambda: stand.step() or stand.received or stand.acked)
    assert peer.wait_for(wire.RegionUnmapped, 2)[1] == wire.RegionUnmapped(0)
    assert not mapped(peer.regions[0]) and not stand.failed


def test_session_that_ends_while_a_region_is_removed(
    stand: Stand, peer: Peer, slow: SlowCopies
) -> None:
    grant_load(peer, (0, 2, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    until(lambda: slow.tickets)
    live = stand.worker.link.live
    assert live is not None
    peer.remove_region(0)
    until(lambda: not live.regions.bytes_mapped)
    peer.conns[0].sock.shutdown(socket.SHUT_WR)
    until(lambda: stand.worker.link.live is not live)
    assert not live.regions.wait_idle(0) and not peer.conns[0].closed.is_set()
    assert mapped(peer.regions[0]), "unmapped under a copy"
    slow.finish()
    assert live.regions.wait_idle(30) and peer.conns[0].closed.wait(30)
    until(lambda: stand.step() or stand.received)
    assert stand.invalid == {5, 6}
    until(lambda: stand.worker.link.session.connected)
    assert mapped(peer.regions[0]) == 1, "that of the session after it"
    assert not peer.of(wire.RegionUnmapped), "the next session knows nothing of it"


# ---- sidecars that are replaced ----


def attachments(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The addresses of the regions that are attached from now on: the list grows."""
    copies: Any = stand.worker.link.copies
    attach, attached = copies.attach, []

    def noted(region: int, address: int, size: int, read_only: bool = False) -> None:
        attached.append(address)
        attach(region, address, size, read_only)

    monkeypatch.setattr(copies, "attach", noted)
    return attached


def addresses(stand: Stand) -> list[int]:
    """Where the regions of the present session are mapped."""
    live = stand.worker.link.live
    assert live is not None
    return [region.mapping.address for region in live.regions._regions.values()]


def replaced(peer: Peer, keep_memory: bool = True) -> tuple[Peer, Conn]:
    """Kill a peer, and start another that finds the memory with its worker, or has other memory.

    Returns the new one, and the connection to the old one with nothing but its claim.
    """
    old = Conn(peer.conns[-1].sock)
    old.claim = os.dup(peer.conns[-1].claim)
    peer.close()
    new = Peer(peer.directory, region_bytes=peer.region_bytes, regions=0 if keep_memory else 1)
    new.preparing = True
    return new, old


def is_back(stand: Stand) -> bool:
    session = stand.worker.link.session
    return session is not None and session.connected and stand.worker.link.live is not None


def test_replaced_sidecar_gets_its_memory_back_and_nothing_is_mapped_anew(
    stand: Stand, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(peer)
    stand.save_now(stand.save(0, [3], [1]))
    peer.wait_for(wire.CommitStore)
    device = peer.add_region(kind="devdax")  # it is found by its path, and mapped as before
    theirs = peer.add_region(read_only=True)
    peer.wait_for(wire.RegionMapped, 2)
    (before, on_device, foreign) = addresses(stand)
    memory = os.fstat(peer.regions[0])
    device_fd = os.dup(peer.regions[device])
    assert stand.count("mapped_bytes") == 2 * BLOCKS * PAGE, "those of the sidecar's own"
    attached = attachments(stand, monkeypatch)
    assert theirs == 2 and foreign and shelf.next == 1

    second, old = replaced(peer)
    try:
        until(lambda: is_back(stand))
        assert old.claimed is False, "the next sidecar knows of us"
        (hello,) = second.of(wire.Hello)
        held = second.conns[0].held
        assert hello.held == 1 and len(held) == 1
        status = os.fstat(held[0])
        assert (status.st_dev, status.st_ino) == (memory.st_dev, memory.st_ino)
        assert not addresses(stand) and flags(before) and flags(on_device)
        # A load of what was stored before, from memory that the new sidecar has from us alone.
        second.regions = [held.pop(), device_fd]
        second.ready()
        until(lambda: len(second.of(wire.RegionMapped)) == 2)
        assert addresses(stand) == [before, on_device] and not attached
        grant_load(second, (0, 1, 0, 0))
        stand.load_now(load_spec("r", ((1, 1),), 0, [9]))
        assert not stand.failed and page(stand.cache, 9) == page(stand.cache, 3)
        assert stand.count("regions_kept") == 2 and stand.count("mapped_bytes") == 2 * BLOCKS * PAGE
        assert stand.count("kept_bytes") == 2 * BLOCKS * PAGE
    finally:
        os.close(old.claim)
        stand.worker.shutdown()
        second.close()
    assert not flags(before) and not flags(on_device)


def flags(address: int) -> bool:
    """Whether there is a mapping that begins at address."""
    return f"\n{address:x}-" in Path("/proc/self/maps").read_text()


def test_memory_that_the_next_sidecar_does_not_want_is_unmapped(
    stand: Stand, peer: Peer, slow: SlowCopies
) -> None:
    """When it says which regions it has, and not before; and not under a copy."""
    inode = os.fstat(peer.regions[0]).st_ino
    grant_load(peer, (0, 2, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    until(lambda: slow.tickets)
    (before,) = addresses(stand)
    live = stand.worker.link.live
    assert live is not None
    second, old = replaced(peer, keep_memory=False)
    try:
        until(lambda: is_back(stand))
        assert len(second.conns[0].held) == 1 and flags(before)
        second.ready()
        until(lambda: addresses(stand))
        assert stand.worker.link.mappings.wait_unmapped(30) and flags(before)
        assert old.claimed, "the copy goes on"
        (now,) = addresses(stand)
        assert now != before
        slow.finish()
        until(lambda: stand.step() or stand.received)
        assert stand.invalid == {5, 6} and stand.failed == {"r": 1}
        until(lambda: not flags(before) and not old.claimed)
        stand.worker.link.session.submit(lambda request: wire.ClearSpace(request))
        second.wait_for(wire.ClearSpace)
        assert os.fstat(second.regions[0]).st_ino != inode and flags(now)
    finally:
        os.close(old.claim)
        stand.worker.shutdown()
        second.close()


@pytest.mark.parametrize("what", ["load", "save"])
def test_copies_into_the_memory_of_a_killed_sidecar_keep_their_claim(
    stand: Stand, peer: Peer, slow: SlowCopies, what: str
) -> None:
    """Its successor is served meanwhile, in the same mapping, and must not reuse what they
    touch."""
    Shelf(peer)
    grant_load(peer, (0, 2, 0, 0))
    if what == "load":
        stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    else:
        stand.step(LookasideMetadata(saves=[stand.save(0, [1], [1])]))
    until(lambda: slow.tickets)
    tickets, (before,) = list(slow.tickets), addresses(stand)
    slow.tickets.clear()
    second, old = replaced(peer)
    try:
        until(lambda: is_back(stand))
        second.regions = [second.conns[0].held.pop()]
        second.ready()
        until(lambda: addresses(stand) == [before])
        second.wait_for(wire.RegionMapped)
        assert old.claimed and second.conns[0].claimed
        copies = stand.worker.link.copies
        stand.worker.link.copies = slow.inner
        grant_load(second, (0, 1, 0, 0))
        stand.load_now(load_spec("s", ((1, 1),), 0, [7]))
        assert "s" not in stand.failed and old.claimed
        stand.worker.link.copies = copies
        for ticket in tickets:
            ticket._finish(None)
        until(lambda: stand.step() or ("r" in stand.received if what == "load" else stand.acked))
        if what == "load":
            assert stand.failed == {"r": 1} and stand.invalid == {5, 6}
        until(lambda: not old.claimed)
        assert second.conns[0].claimed and addresses(stand) == [before]
        assert not second.of(wire.CommitStore)
    finally:
        os.close(old.claim)
        stand.worker.shutdown()
        second.close()


def test_memory_is_given_up_when_no_sidecar_comes(
    stand: Stand, peer: Peer, slow: SlowCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookaside.session._KEEP_S", 0.5)
    grant_load(peer, (0, 2, 0, 0))
    stand.step(LookasideMetadata(loads=[load_spec("r", ((1, 1),), 0, [5, 6])]))
    until(lambda: slow.tickets)
    (before,) = addresses(stand)
    claim = Conn(peer.conns[0].sock)
    claim.claim = os.dup(peer.conns[0].claim)
    peer.close()
    until(lambda: not stand.worker.link.live and not stand.worker.link.mappings._kept)
    assert flags(before) and claim.claimed, "the copy goes on"
    slow.finish()
    until(lambda: stand.step() or stand.received)
    until(lambda: not flags(before) and not claim.claimed)
    os.close(claim.claim)


def test_memory_that_is_not_there_fails_its_copies_alone(stand: Stand, peer: Peer) -> None:
    """A device has gone, a page of it is bad: here, a file was cut short. The chunk is said to be
    bad."""
    shelf = Shelf(peer)
    index = peer.add_region(kind="file")
    until(lambda: mapped(peer.regions[index]))
    content = random.Random(2).randbytes(4 * PAGE)
    os.pwrite(peer.regions[index], content, 0)
    os.ftruncate(peer.regions[index], 4 * PAGE)
    grant_load(peer, (0, 2, index, 0), (2, 2, index, 4 * PAGE), (4, 1, 0, 0))
    stand.load_now(load_spec("bad", ((1, 1),), 0, [5, 6, 7, 8, 9]))
    assert stand.invalid == {5, 6, 7, 8, 9} and stand.failed == {"bad": 1}
    assert peer.wait_for(wire.Release) == [wire.Release(55, (1,))]
    grant_load(peer, (0, 2, index, 2 * PAGE))
    stand.load_now(load_spec("good", ((1, 1),), 0, [5, 6]))
    assert "good" not in stand.failed and page(stand.cache, 6) == content[3 * PAGE :]
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(
        m.id, 9, 0, 0, (wire.Extent(0, 2, index, 3 * PAGE),)
    )
    stand.save_now(stand.save(0, [1, 2], [1, 2]))
    assert (
        peer.wait_for(wire.AbortStore) == [wire.AbortStore(9)] and stand.count("save_failures") == 1
    )
    peer.script[wire.PrepareStore] = shelf.store
    stand.save_now(stand.save(4, [3], [3]))
    peer.wait_for(wire.CommitStore)
    assert shelf.bytes_at(0) == page(stand.cache, 3)


# ---- pages of several blocks ----

TWO = [full_attention(), sliding_window(40)]


@pytest.fixture
def hybrid(model: Path, peer: Peer) -> Iterator[Stand]:
    skip_if_idle(TWO)
    each = Stand(model, str(peer.directory), specs=TWO)
    each.register()
    assert each.worker.link.session is not None and each.worker.link.session.connected
    yield each
    each.worker.shutdown()


def test_a_page_has_a_block_of_every_group(hybrid: Stand, peer: Peer) -> None:
    (hello,) = peer.of(wire.Hello)
    assert (hello.page_tokens, hello.page_bytes, hello.pages_per_chunk) == (BLOCK, 2 * PAGE, 2)
    assert "FullAttentionSpec:16:0|SlidingWindowSpec:16:40" in hello.fields["groups"]
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(
        m.id, 5, 0, 0, (wire.Extent(0, 2, 0, PAGE),)
    )
    hybrid.save_now(hybrid.save(0, [3, 9, 4, 7], [1, 2]))
    peer.wait_for(wire.CommitStore)
    assert peer.of(wire.CommitStore) == [wire.CommitStore(5)]
    region = os.pread(peer.regions[0], 5 * PAGE, 0)
    assert region == bytes(PAGE) + b"".join(page(hybrid.cache, block) for block in (3, 9, 4, 7))
    assert hybrid.count("save_bytes") == 4 * PAGE


def test_a_page_that_is_not_whole_is_not_stored(hybrid: Stand, peer: Peer) -> None:
    """Nor what follows it; what comes before it is."""
    grants = tuple(wire.Extent(number, 2, 0, 4 * number * PAGE) for number in (0, 2, 4))
    peer.script[wire.PrepareStore] = lambda conn, m: wire.StoreGrant(m.id, 5, 0, 0, grants)
    hybrid.save_now(hybrid.save(0, [1, 2, 3, 4, 5, 6, 7, 0, 8, 9, 10, 11], list(range(6))))
    peer.wait_for(wire.CommitStore)
    assert peer.of(wire.CommitStore) == [wire.CommitStore(5, (1, 2))]
    region = os.pread(peer.regions[0], BLOCKS * PAGE, 0)
    assert region[: 4 * PAGE] == b"".join(page(hybrid.cache, block) for block in (1, 2, 3, 4))
    assert not any(region[4 * PAGE :])
    assert hybrid.count("save_bytes") == 4 * PAGE and hybrid.count("save_failures") == 0


def test_the_null_block_is_not_written(hybrid: Stand, peer: Peer) -> None:
    """A load leaves out what a window does not reach; the arena has it."""
    peer.script[wire.PrepareLoad] = lambda conn, m: wire.LoadGrant(
        m.id, 7, m.names, (wire.Extent(0, 2, 0, PAGE),)
    )
    bytes_ = os.urandom(4 * PAGE)
    os.pwrite(peer.regions[0], bytes_, PAGE)
    before = [page(hybrid.cache, block) for block in range(BLOCKS)]
    hybrid.load_now(load_spec("a", ((1, 1),), 0, [5, 0, 6, 2]))
    after = [page(hybrid.cache, block) for block in range(BLOCKS)]
    want = {5: bytes_[:PAGE], 6: bytes_[2 * PAGE : 3 * PAGE], 2: bytes_[3 * PAGE :]}
    assert after == [want.get(block, before[block]) for block in range(BLOCKS)]
    assert not hybrid.started_over and hybrid.count("load_bytes") == 3 * PAGE


@pytest.mark.parametrize("refs", [((1, 1),), ()])
def test_a_failed_load_fails_its_request_and_no_block(
    hybrid: Stand, peer: Peer, refs: tuple[tuple[int, int], ...]
) -> None:
    peer.script[wire.PrepareLoad] = lambda conn, m: wire.LoadGrant(
        m.id, 7, m.names, (wire.Extent(0, 1, 0, 0),)
    )
    hybrid.load_now(load_spec("a", refs, 0, [5, 0, 6, 2]))
    assert hybrid.received == hybrid.started_over == ["a"]
    assert not hybrid.invalid and hybrid.failed == {"a": 1}
    # A request that was aborted meanwhile is only received.
    hybrid.step(LookasideMetadata(loads=[load_spec("b", ((1, 1),), 0, [5, 0, 6, 2])], aborted=[]))
    with hybrid.worker.reports._lock:
        hybrid.worker.reports._aborted.update(
            each for each in ["b"] if each in hybrid.worker.reports._out
        )
    until(lambda: hybrid.step() or "b" in hybrid.received)
    assert not hybrid.invalid


@pytest.mark.parametrize("blocks", [[1, 2, 3], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_rows_that_do_not_fit_the_pages_are_refused(
    hybrid: Stand, peer: Peer, blocks: list[int]
) -> None:
    Shelf(peer)
    hybrid.save_now(hybrid.save(0, blocks, [1, 2]))
    assert hybrid.acked and not peer.of(wire.PrepareStore)
    if len(blocks) % 2:
        hybrid.load_now(load_spec("a", ((1, 1),), 0, blocks))
        assert hybrid.started_over == ["a"] and not peer.of(wire.PrepareLoad)
