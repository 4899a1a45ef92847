"""One page there and back: the client's wire, mapping and copies against a real sidecar.

It needs neither torch nor vLLM, so it also runs where these are not: `make arm` runs it in an arm64
Python. ``LOOKASIDE_TEST_BINARY`` names another sidecar than ``bin/lookaside``.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from lookaside import _native, wire
from lookaside.handshake import SessionOptions
from lookaside.mappings import Mappings
from lookaside.regions import RegionSet
from lookaside.session import Session, Subscriber

BINARY = Path(
    os.environ.get("LOOKASIDE_TEST_BINARY", str(Path(__file__).parents[2] / "bin" / "lookaside"))
)
PATIENCE_S = 120.0  # an emulated sidecar takes its time
BLOCKS, PAGE, PAGE_TOKENS, PPC = 32, 20_000, 16, 4

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


class Worker(Subscriber):
    """Maps the regions as a worker does, and copies by the plan."""

    def __init__(self, plan: _native.Plan) -> None:
        self.mappings = Mappings()
        self.mappings.attachable = self
        self.plan = plan
        self.regions: RegionSet | None = None
        self.ready = threading.Event()

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        self.plan.attach(region_id, address, size)

    def detach(self, region_id: int) -> Any:
        self.plan.detach(region_id)
        return Done()

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self.regions = RegionSet(self.mappings, on_idle=session.hold())

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        assert self.regions is not None
        self.regions.add(
            region.region,
            fd,
            region.size,
            huge=False,
            background=False,
            offset=region.offset,
            page_size=region.page_size,
        )
        session.send(wire.RegionMapped(region.region), session.session_id)

    def on_regions_ready(self, session: Session) -> None:
        self.ready.set()

    def on_lost(self, session: Session) -> None:
        if self.regions is not None:
            self.regions.close()


class Done:
    """A copy that has ended."""

    def wait(self, timeout_s: float) -> bool:
        return True


class Scheduler(Subscriber):
    """Takes the direct socket, over which the answers come."""

    direct: socket.socket | None = None

    def on_connected(self, session: Session, welcome: wire.Welcome) -> None:
        self.direct = session.take_direct()


@pytest.fixture(params=["memfd", "file"])
def sidecar(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The directory of a sidecar whose arena is memory, or a file in place of a DAX device."""
    directory = tmp_path / "rank-0"
    where = ["--arena-kind=memfd", "--arena-limit=8M"]
    if request.param == "file":
        config = tmp_path / "sidecar.yaml"
        config.write_text(
            "arena:\n  kind: dax\n  dax:\n    allow_files: true\n    devices:\n"
            f"      - path: {tmp_path}/device\n        size: 16M\n"
        )
        where = [f"--config={config}"]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(BINARY), "serve", f"--runtime-dir={directory}", *where],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield directory
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, log.read_text()


def session_of(directory: Path, role: str, subscriber: Subscriber) -> Session:
    session = Session(
        SessionOptions(
            endpoint=str(directory),
            role=role,
            engine_id="engine",
            rank=0,
            page_tokens=PAGE_TOKENS,
            page_bytes=PAGE if role == "worker" else 0,
            pages_per_chunk=PPC,
            digest_bytes=32,
            fields={"model": "m"},
        )
    )
    session.subscribe(subscriber)
    session.start()
    assert session.wait_connected(PATIENCE_S)
    return session


def digests(first: int, pages: int) -> bytes:
    return b"".join(bytes([page + 1]) * 32 for page in range(first, first + pages))


def answer_of(direct: socket.socket) -> wire.LookupResult:
    direct.settimeout(PATIENCE_S)
    answer = wire.decode(direct.recv(256))
    assert isinstance(answer, wire.LookupResult), answer
    return answer


@pytest.mark.parametrize("kernel", ["default", "streams"])
def test_what_is_stored_is_found_and_loaded(sidecar: Path, kernel: str) -> None:
    streams = [k for k in (_native.AVX512, _native.NEON) if _native.usable(k)]
    number = streams[0] if kernel == "streams" and streams else _native.DEFAULT
    cache = np.random.default_rng(7).integers(0, 256, (BLOCKS, PAGE), np.uint8)
    before = cache.copy()
    plan = _native.Plan(
        [(cache.ctypes.data, PAGE, PAGE, 0)], BLOCKS, PAGE, [(cache.ctypes.data, cache.nbytes)]
    )
    worker, scheduler = Worker(plan), Scheduler()
    stores = session_of(sidecar, "worker", worker)
    looks = session_of(sidecar, "scheduler", scheduler)
    context = zmq.Context()
    try:
        assert worker.ready.wait(PATIENCE_S) and worker.regions is not None
        hold = worker.regions.acquire()
        assert hold is not None

        def places(extents: tuple[wire.Extent, ...]) -> tuple[np.ndarray, np.ndarray]:
            pages = [extent.page + i for extent in extents for i in range(extent.pages)]
            where = [
                hold.locate(extent.region, extent.offset, extent.pages * PAGE, PATIENCE_S)
                + i * PAGE
                for extent in extents
                for i in range(extent.pages)
            ]
            return np.array(pages), np.array(where, np.uint64)

        # Ten pages: two whole chunks and a part of one.
        grant = stores.submit(lambda n: wire.PrepareStore(n, 0, b"", digests(0, 10), 1, 0)).wait(
            PATIENCE_S
        )
        assert isinstance(grant, wire.StoreGrant), grant
        pages, addresses = places(grant.grants)
        assert sorted(pages) == list(range(10))
        assert plan.gather(pages, addresses, kernel=number) == 10 * PAGE
        assert stores.send(wire.CommitStore(grant.store), stores.session_id)
        # The sidecar reads in order, so this one finds all of it held.
        again = stores.submit(lambda n: wire.PrepareStore(n, 0, b"", digests(0, 10), 1, 0))
        grant = again.wait(PATIENCE_S)
        assert isinstance(grant, wire.StoreGrant) and (grant.store, grant.held) == (0, 10), grant

        welcome, direct = looks.welcome, scheduler.direct
        assert welcome is not None and direct is not None
        push = context.socket(zmq.PUSH)
        push.connect(welcome.lookup_endpoint)

        def question(lookup: int) -> bytes:
            return wire.encode(
                wire.Lookup(
                    welcome.session,
                    welcome.secret,
                    lookup,
                    0,
                    b"",
                    digests(0, 12),
                    int(PATIENCE_S * 1000),
                    0,
                )
            )

        push.send(question(1))
        assert answer_of(direct).hit_pages == 10
        direct.send(question(2))
        assert answer_of(direct).hit_pages == 10

        names = wire.names([digests(page, 1) for page in range(10)], 0, PPC)
        load = stores.submit(
            lambda n: wire.PrepareLoad(
                n, welcome.session, 2, wire.ticket(welcome.secret, 2), 0, 10, names
            )
        ).wait(PATIENCE_S)
        assert isinstance(load, wire.LoadGrant) and load.names == names, load
        pages, addresses = places(load.extents)
        cache[:] = 0
        assert plan.scatter(pages + 16, addresses, kernel=number) == 10 * PAGE
        assert (cache[16:26] == before[:10]).all() and not cache[:16].any()
        assert stores.send(wire.Release(load.load), stores.session_id)
        hold.release()
    finally:
        context.destroy(0)
        looks.close()
        stores.close()
        worker.mappings.close()
        worker.mappings.wait_unmapped(PATIENCE_S)
