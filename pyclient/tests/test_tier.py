"""Tiers in Python programs: through a real sidecar and lookaside.Client, and by the protocol."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lookaside import Client, tiermessages
from lookaside.tier import Call, Item, Region, Status, Tier, serve
from peer import until
from readiness import ready

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "bin" / "lookaside"
STORE = ROOT / "examples" / "tier_program" / "memory_store.py"
SIZE = 1 << 16
PATIENCE_S = 60.0


class Sidecar:
    """A sidecar with an arena of 8 MiB and a program under it."""

    def __init__(self, directory: Path, program: str) -> None:
        self.directory = directory
        command = f"serve --runtime-dir {directory} --arena-kind memfd --log-level warn"
        command += " --arena-limit 8M --arena-initial 8M --program"
        self.process = subprocess.Popen(
            [BINARY, *command.split(), program],
            env={**os.environ, "PYTHONPATH": str(ROOT / "pyclient")},
        )
        until(lambda: ready(directory), PATIENCE_S)
        until(lambda: self.tier()["state"] == "closed", PATIENCE_S)

    def tier(self) -> dict[str, Any]:
        """The program's tier in the status."""
        out = subprocess.run(
            [BINARY, "status", "--runtime-dir", self.directory, "--json"],
            capture_output=True,
            check=True,
        )
        return json.loads(out.stdout)["tiers"][0]

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0


def content(number: int) -> bytes:
    return bytes([number % 251]) * SIZE


def test_stored_evicted_and_loaded_again(tmp_path: Path) -> None:
    """More values than the arena holds come back through the program, also a new one."""
    count = 200  # of 64 KiB, and the arena has 8 MiB
    sidecar = Sidecar(tmp_path / "rank-0", f"{sys.executable} {STORE}")
    try:
        with Client(sidecar.directory, timeout_s=PATIENCE_S) as client:
            space = client.space("values", SIZE)
            for i in range(count):
                assert space.put(b"%d" % i, content(i))
                if i % 50 == 49:  # what is evicted before it is written is lost
                    until(lambda i=i: sidecar_stored(sidecar) > i, PATIENCE_S)
            for i in range(count):
                assert space.get(b"%d" % i) == content(i)
            tier = sidecar.tier()
            assert tier["kind"] == "program" and tier["loaded_chunks"] > 0
            # A killed program has forgotten all. A get misses or has the right bytes.
            pid = program_of(tier)
            os.kill(pid, signal.SIGKILL)
            until(lambda: program_of(sidecar.tier()) not in (0, pid), PATIENCE_S)
            got = [space.get(b"%d" % i) for i in range(count)]
            assert all(value in (None, content(i)) for i, value in enumerate(got))
            assert None in got
            # The arena must not have it for a put to go through again.
            again = next(i for i, value in enumerate(got) if value is None)
            assert space.put(b"%d" % again, content(again))
    finally:
        sidecar.stop()


def sidecar_stored(sidecar: Sidecar) -> int:
    return sidecar.tier()["stored_chunks"]


def program_of(tier: dict[str, Any]) -> int:
    """Return the pid of the tier's program, 0 if it is not known."""
    _, _, rest = tier["detail"].partition("(pid ")
    return int(rest.rstrip(")")) if rest else 0


def test_listens_on_a_socket(tmp_path: Path) -> None:
    """A program that somebody else starts serves two sidecars, one after the other."""
    path = tmp_path / "tier.sock"
    program = subprocess.Popen(
        [sys.executable, STORE, "--listen", path],
        env={**os.environ, "PYTHONPATH": str(ROOT / "pyclient")},
    )
    try:
        until(path.exists, PATIENCE_S)
        for rank in range(2):
            sidecar = Sidecar(tmp_path / f"rank-{rank}", f"unix:{path}")
            try:
                with Client(sidecar.directory, timeout_s=PATIENCE_S) as client:
                    space = client.space("values", SIZE)
                    if rank == 0:
                        assert space.put(b"a", content(7))
                        until(lambda s=sidecar: sidecar_stored(s) > 0, PATIENCE_S)
                    else:
                        assert space.get(b"a") == content(7)
            finally:
                sidecar.stop()
    finally:
        program.terminate()
        assert program.wait(PATIENCE_S) == 0
    assert not path.exists()


class Recorder(Tier):
    """Keeps values, and records what it is told; test hooks make calls wait or fail."""

    name = "recorder"
    max_calls = 4

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.regions: list[Region] = []
        self.gone: list[int] = []
        self.began = threading.Event()
        self.fails: Exception | None = None
        self.waits = False

    def on_region(self, region: Region) -> None:
        if region.kind == "refused":
            raise ValueError("not this one")
        self.regions.append(region)

    def on_region_gone(self, region: Region) -> None:
        self.gone.append(region.id)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self.fails:
            raise self.fails
        return [key in self.values for key in keys]

    def put(self, items: Sequence[Item], call: Call) -> list[Status]:
        for item in items:
            self.values[item.key] = b"".join(item.views)
        return [Status.OK] * len(items)

    def get(self, items: Sequence[Item], call: Call) -> Any:
        for item in items:
            self.began.set()
            if self.fails:
                raise self.fails
            if self.waits:
                call.wait_cancelled(PATIENCE_S)
            value = self.values.get(item.key)
            yield Status.MISSING if value is None else item.fill(value)

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.values.pop(key, None)

    def clear(self, prefix: bytes) -> int:
        gone = [key for key in self.values if key.startswith(prefix)]
        self.drop(gone)
        return len(gone)


class Peer:
    """The sidecar's end of a connection, by hand."""

    def __init__(self, tier: Tier) -> None:
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.failure: list[BaseException] = []
        self.thread = threading.Thread(target=self._serve, args=(tier, other))
        self.thread.start()
        self.memory = os.memfd_create("lookaside-test")
        os.ftruncate(self.memory, 1 << 20)
        self.lifeline, hold = os.pipe()
        self.send(tiermessages.TierHello(tiermessages.VERSION, "t", 1), hold)
        os.close(hold)

    def _serve(self, tier: Tier, sock: socket.socket) -> None:
        try:
            serve(tier, sock)
        except Exception as error:
            self.failure.append(error)

    def send(self, message: Any, *fds: int) -> None:
        socket.send_fds(self.socket, [tiermessages.encode(message)], list(fds))

    def receive(self) -> Any:
        data = self.socket.recv(1 << 18)
        return tiermessages.decode(data, "sidecar")

    def region(self, number: int, kind: str = "memfd", size: int = 1 << 20) -> Any:
        self.send(tiermessages.TierRegion(number, kind, size, 0, 4096), self.memory)
        return self.receive()

    def close(self) -> None:
        self.socket.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        assert os.read(self.lifeline, 1) == b"", "the lifeline is still open"
        os.close(self.lifeline)
        os.close(self.memory)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def peer(recorder: Recorder) -> Iterator[Peer]:
    it = Peer(recorder)
    assert it.receive() == tiermessages.TierWelcome(tiermessages.VERSION, "recorder", 256, 4)
    yield it
    it.close()


def item(key: bytes, *pieces: tuple[int, int, int]) -> tiermessages.TierItem:
    return tiermessages.TierItem(key, tuple(tiermessages.TierPiece(*p) for p in pieces))


def results(message: Any) -> list[tuple[int, int]]:
    assert isinstance(message, tiermessages.TierDone)
    return [(r.index, r.status) for r in message.results]


def test_values_lie_in_regions(peer: Peer, recorder: Recorder) -> None:
    assert peer.region(7) == tiermessages.TierRegionReady(7, "")
    region = recorder.regions[0]
    assert (region.id, region.size, region.kind) == (7, 1 << 20, "memfd")
    os.pwrite(peer.memory, b"head", 0)
    os.pwrite(peer.memory, b"body" * 50_000, 8192)
    peer.send(tiermessages.TierPut(1, (item(b"k", (7, 0, 4), (7, 8192, 200_000)),)))
    assert results(peer.receive()) == [(0, Status.OK)]
    assert recorder.values == {b"k": b"head" + b"body" * 50_000}
    os.pwrite(peer.memory, bytes(1 << 20), 0)
    wanted = (item(b"k", (7, 4096, 4), (7, 300_000, 100_000)), item(b"none", (7, 0, 1)))
    peer.send(tiermessages.TierGet(2, wanted))
    assert results(peer.receive()) + results(peer.receive()) == [
        (0, Status.OK),
        (1, Status.MISSING),
    ]
    assert os.pread(peer.memory, 4, 4096) == b"head"
    assert os.pread(peer.memory, 100_001, 300_000) == b"body" * 25_000 + b"\0"
    peer.send(tiermessages.TierContains(3, (b"k", b"none")))
    assert results(peer.receive()) == [(0, Status.OK), (1, Status.MISSING)]
    peer.send(tiermessages.TierClear(4, b""))
    assert peer.receive() == tiermessages.TierCleared(4, 1, "")
    peer.send(tiermessages.TierStats(5))
    assert peer.receive() == tiermessages.TierFigures(5, 0, 0, 0, 0, "", "")
    peer.send(tiermessages.TierRegionGone(7))
    assert peer.receive() == tiermessages.TierRegionLeft(7)
    assert recorder.gone == [7]


def test_regions_are_refused_or_unmapped_at_the_end(peer: Peer, recorder: Recorder) -> None:
    assert peer.region(1) == tiermessages.TierRegionReady(1, "")
    assert peer.region(2, kind="refused").error == "not this one"
    assert "holds" in peer.region(3, size=2 << 20).error
    peer.send(tiermessages.TierGet(1, (item(b"k", (2, 0, 1)),)))
    done = peer.receive()
    assert results(done) == [(0, Status.FAILED)] and "outside of region 2" in done.text
    peer.socket.shutdown(socket.SHUT_WR)
    peer.thread.join(PATIENCE_S)
    assert recorder.gone == [1]


def test_a_cancelled_call_is_answered(peer: Peer, recorder: Recorder) -> None:
    peer.region(1)
    recorder.values[b"k"] = b"v"
    recorder.waits = True
    peer.send(tiermessages.TierGet(9, (item(b"k", (1, 0, 1)), item(b"k", (1, 1, 1)))))
    assert recorder.began.wait(PATIENCE_S)
    peer.send(tiermessages.TierContains(10, (b"k",)))  # others go on meanwhile
    assert results(peer.receive()) == [(0, Status.OK)]
    peer.send(tiermessages.TierCancel(9))
    peer.send(tiermessages.TierCancel(9000))  # of a call that has ended
    got = results(peer.receive()) + results(peer.receive())
    assert got == [(0, Status.OK), (1, Status.CANCELLED)]


def test_an_exception_fails_the_call_only(peer: Peer, recorder: Recorder) -> None:
    peer.region(1)
    recorder.fails = RuntimeError("the store is away")
    peer.send(tiermessages.TierGet(1, (item(b"k", (1, 0, 1)),)))
    done = peer.receive()
    assert results(done) == [(0, Status.FAILED)] and done.text == "the store is away"
    peer.send(tiermessages.TierContains(2, (b"k", b"l")))
    assert results(peer.receive()) == [(0, Status.FAILED), (1, Status.FAILED)]
    recorder.fails = None
    peer.send(tiermessages.TierContains(3, (b"k",)))
    assert results(peer.receive()) == [(0, Status.MISSING)]


def test_garbage_ends_the_connection(recorder: Recorder) -> None:
    peer = Peer(recorder)
    peer.receive()
    peer.region(1)
    peer.socket.send(b"\x80\x04garbage")
    peer.thread.join(PATIENCE_S)
    assert recorder.gone == [1]
    peer.close()
