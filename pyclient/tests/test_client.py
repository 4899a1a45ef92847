"""lookaside.Client against a real sidecar: every method, in one process and in several."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lookaside import AsyncClient, Client
from lookaside.client import NoRoom, SidecarUnavailable, Space
from peer import until
from readiness import ready

BINARY = Path(__file__).parents[2] / "bin" / "lookaside"
SIZE = 1 << 16
PATIENCE_S = 60.0


class Sidecar:
    """One `lookaside serve`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.arguments = arguments
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [BINARY, "serve", "--runtime-dir", self.directory, "--arena-kind", "memfd",
             "--arena-limit", "8M", "--arena-initial", "8M", "--log-level", "warn",
             *self.arguments],
        )  # fmt: skip
        until(lambda: ready(self.directory), PATIENCE_S)
        return self.process

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    it = Sidecar(tmp_path / "rank-0")
    try:
        yield it
    finally:
        it.process.send_signal(signal.SIGCONT)
        it.stop()


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with Client(sidecar.directory, timeout_s=PATIENCE_S) as it:
        yield it


@pytest.fixture
def space(client: Client) -> Space:
    return client.space("values", SIZE)


def key(number: int) -> bytes:
    return b"key %d" % number


def content(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def test_a_value_goes_there_and_back(space: Space) -> None:
    assert space.retrieve(b"a") is None
    assert not space.exists(b"a")
    with space.alloc(b"a", 1000) as room:
        assert not room.held and room.view is not None and room.view.nbytes == 1000
        room.view[:] = content(1, 1000)
        assert not space.exists(b"a"), "visible before it is stored"
    assert space.exists(b"a")
    value = space.retrieve(b"a")
    assert value is not None
    with value:
        assert value.view == content(1, 1000) and len(value) == 1000
        assert value.view.readonly
        view = value.view
    with pytest.raises(ValueError):
        bytes(view)
    with pytest.raises(ValueError):
        value.view  # noqa: B018
    assert space.get(b"a") == content(1, 1000)


def test_the_first_value_of_a_key_stays(space: Space) -> None:
    assert space.put(b"a", b"first")
    assert not space.put(b"a", b"second")
    with space.alloc(b"a") as room:
        assert room.held and room.view is None
    assert space.get(b"a") == b"first"


@pytest.mark.parametrize("size", [0, 1, 63, 64, SIZE])
def test_values_of_any_size(space: Space, size: int) -> None:
    assert space.put(b"a", content(3, size))
    assert space.get(b"a") == content(3, size)


def test_any_bytes_are_a_key(space: Space) -> None:
    keys = [
        b"",
        b"\0",
        b"\0\0",
        "größer".encode(),
        bytes(100_000),
        bytearray(b"x"),
        memoryview(b"y"),
    ]
    assert space.put_many((k, b"%d" % i) for i, k in enumerate(keys)) == [True] * len(keys)
    assert [space.get(k) for k in keys] == [b"%d" % i for i in range(len(keys))]


def test_arguments_that_never_work_say_so(client: Client, space: Space) -> None:
    with pytest.raises(ValueError, match="value_bytes"):
        space.alloc(b"a", SIZE + 1)
    with pytest.raises(ValueError, match="value_bytes"):
        space.put(b"a", bytes(SIZE + 1))
    with pytest.raises(ValueError, match="give it another name"):
        client.space("values", SIZE + 1)
    with pytest.raises(ValueError, match="name"):
        client.space("", 1)
    with pytest.raises(ValueError, match="value_bytes"):
        client.space("other", 0)
    with pytest.raises(ValueError, match="unpin"):
        space.pin([b"a"], 0)
    assert client.space("values", SIZE) is space


def test_spaces_are_apart(client: Client) -> None:
    one, other = client.space("one", 100), client.space("other", 100)
    one.put(b"a", b"1")
    assert not other.exists(b"a")
    other.put(b"a", b"2")
    assert (one.get(b"a"), other.get(b"a")) == (b"1", b"2")
    assert one.clear() == 1
    assert (one.get(b"a"), other.get(b"a")) == (None, b"2")


def test_batches_keep_their_order(space: Space) -> None:
    numbers = list(range(40))
    rooms = space.alloc_many([key(n) for n in numbers], 100)
    for number, room in zip(numbers, rooms, strict=True):
        assert room.view is not None
        room.view[:] = content(number, 100)
        if number % 2:
            room.store()
        else:
            room.abort()
            room.abort()
    assert space.exists_many([key(n) for n in numbers]) == [n % 2 == 1 for n in numbers]
    values = space.retrieve_many([key(n) for n in reversed(numbers)])
    for number, value in zip(reversed(numbers), values, strict=True):
        assert (None if value is None else bytes(value)) == (
            content(number, 100) if number % 2 else None
        )


def test_what_was_given_back_cannot_be_stored(space: Space) -> None:
    room = space.alloc(b"a", 10)
    room.abort()
    with pytest.raises(ValueError):
        room.view  # noqa: B018
    with pytest.raises(SidecarUnavailable, match="allocate"):
        room.store()
    with pytest.raises(ZeroDivisionError), space.alloc(b"a", 10):
        raise ZeroDivisionError
    assert not space.exists(b"a")


def fill(space: Space, first: int, count: int) -> None:
    for number in range(first, first + count):
        space.put(key(number), content(number))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_leased_bytes_stay_while_the_arena_is_turned_over(space: Space) -> None:
    space.put(b"a", content(7))
    value, other = space.retrieve(b"a"), space.retrieve(b"a")
    assert value is not None and other is not None
    array = np.frombuffer(value.view, dtype=np.uint8)
    tensor = torch.frombuffer(other.view, dtype=torch.uint8)
    del value, other  # nothing else refers to the bytes
    gc.collect()
    fill(space, 0, 400)  # an arena of about 127 values
    assert bytes(array) == content(7)
    assert tensor.numpy().tobytes() == content(7)
    assert space.exists(b"a")


def status(sidecar: Sidecar) -> Any:
    out = subprocess.run(
        [BINARY, "status", "--json", "--runtime-dir", sidecar.directory],
        capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    return json.loads(out)


def leased(sidecar: Sidecar) -> int:
    return int(status(sidecar)["slots"]["leased"])


def test_leases_end_with_what_uses_them(sidecar: Sidecar, space: Space) -> None:
    space.put(b"a", content(7))
    until(lambda: leased(sidecar) == 0, PATIENCE_S)
    value = space.retrieve(b"a")
    assert value is not None
    array = np.frombuffer(value.view, dtype=np.uint8)
    value.close()
    value.close()
    assert leased(sidecar) == 1, "an array still uses the bytes"
    assert bytes(array) == content(7)
    del array
    until(lambda: leased(sidecar) == 0, PATIENCE_S)
    kept = space.retrieve(b"a")
    del kept  # without a close
    until(lambda: leased(sidecar) == 0, PATIENCE_S)
    space.exists(b"a")
    until(lambda: leased(sidecar) == 0, PATIENCE_S)  # exists keeps its lease for a second


def test_room_that_is_forgotten_is_given_back(space: Space) -> None:
    for number in range(400):
        space.alloc(key(number))  # an arena of about 127 values
    assert not any(space.exists_many([key(n) for n in range(400)]))


def test_a_full_arena_says_so(space: Space) -> None:
    fill(space, 0, 200)
    values = []
    with pytest.raises(NoRoom, match="close values"):
        for number in range(200):
            if (value := space.retrieve(key(number))) is not None:
                values.append((number, value))
    assert values
    for number, value in values:
        assert bytes(value) == content(number)
        value.close()
    assert space.put(b"new", content(1))


def test_a_slot_without_its_trailer_is_a_miss(space: Space) -> None:
    """Bytes that are not what the index says, as by a fault of memory, are dropped."""
    with space.alloc(b"a", 100) as room:
        assert room.view is not None
    value = space.retrieve(b"a")
    assert value is not None
    ((lease, _),) = space._find([hashlib.sha256(b"a").digest()], space._unkeep)
    assert lease is not None
    ctypes.memset(lease.address + space._slot_bytes - 64, 0, 64)
    space._end(lease)
    value.close()
    assert space.retrieve(b"a") is None
    assert space.put(b"a", b"anew") and space.get(b"a") == b"anew"


def test_pinned_values_stay(space: Space) -> None:
    fill(space, 0, 4)
    space.pin([key(n) for n in range(4)], 600)
    fill(space, 100, 400)
    assert [space.get(key(n)) for n in range(4)] == [content(n) for n in range(4)]
    space.unpin([key(n) for n in range(4)])


def test_values_come_up_from_a_disk(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text(f"tiers:\n  - kind: disk\n    paths: [{tmp_path}/disk]\n    capacity: 64M\n")
    sidecar = Sidecar(tmp_path / "rank-0", f"--config={config}")
    try:
        with Client(sidecar.directory, timeout_s=PATIENCE_S) as client:
            space = client.space("values", SIZE)
            for begin in range(0, 300, 50):  # an arena of about 127 values
                fill(space, begin, 50)
                least = (begin + 50) * SIZE
                until(lambda least=least: status(sidecar)["tiers"][0]["used_bytes"] >= least)
            numbers = list(range(300))
            found = [space.get(key(n)) for n in numbers]
            held = [n for n, data in zip(numbers, found, strict=True) if data is not None]
            assert len(held) > 200
            assert all(found[n] == content(n) for n in held)
            space.prefetch([key(n) for n in held[:8]])
            assert space.exists_many([key(n) for n in held[:8]]) == [True] * 8
    finally:
        sidecar.stop()


def in_another(sidecar: Sidecar, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c",
         f"from lookaside import Client\nspace = Client({str(sidecar.directory)!r})"
         f".space('values', {SIZE})\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_processes_share(sidecar: Sidecar, space: Space) -> None:
    space.put(b"a", b"mine")
    other = in_another(sidecar, "print(space.get(b'a'), space.put(b'b', b'theirs'))")
    assert other.communicate(timeout=PATIENCE_S)[0] == "b'mine' True\n"
    assert space.get(b"b") == b"theirs"


def test_a_process_that_is_killed_leaves_nothing(sidecar: Sidecar, space: Space) -> None:
    space.put(b"a", content(7))
    other = in_another(
        sidecar,
        "value, room = space.retrieve(b'a'), space.alloc(b'b')\nprint('held', flush=True)\ninput()",
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    assert leased(sidecar) == 1
    other.kill()
    other.communicate()
    until(lambda: leased(sidecar) == 0, PATIENCE_S)
    assert not space.exists(b"b")
    with space.alloc(b"b") as room:
        assert not room.held


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_sidecar_that_comes_back(sidecar: Sidecar, space: Space, number: int) -> None:
    fill(space, 0, 20)
    value = space.retrieve(key(3))
    room = space.alloc(b"late", 10)
    assert value is not None
    sidecar.stop(number)
    assert bytes(value) == content(3)
    sidecar.start()
    for other in range(1000, 1400):  # all of the arena, if it may be written to
        with contextlib.suppress(NoRoom):
            space.put(key(other), content(other))
    assert bytes(value) == content(3), "the memory of a lease was used again"
    value.close()
    with pytest.raises(SidecarUnavailable, match="again"):
        room.store()
    assert not space.exists(b"late")

    def has_room() -> bool:
        try:
            return space.put(b"new", content(5)) or space.get(b"new") == content(5)
        except NoRoom:
            return False

    until(has_room, PATIENCE_S)
    for number in range(20):
        assert space.get(key(number)) in (None, content(number))


def test_no_sidecar(tmp_path: Path) -> None:
    with Client(tmp_path / "none", timeout_s=0.2) as client:
        space = client.space("values", 10)
        for call in (
            lambda: space.get(b"a"),
            lambda: space.put(b"a", b""),
            lambda: space.exists(b"a"),
            lambda: space.clear(),
            lambda: space.pin([b"a"], 1),
        ):
            with pytest.raises(SidecarUnavailable, match="lookaside serve --runtime-dir"):
                call()


def test_it_starts_a_sidecar(tmp_path: Path) -> None:
    with Client(
        tmp_path / "rank-0",
        autostart=True,
        binary=str(BINARY),
        sidecar_arguments=["--arena-kind=memfd", "--arena-limit=8M"],
        timeout_s=PATIENCE_S,
    ) as client:
        space = client.space("values", 1000)
        try:
            until(lambda: ready(tmp_path / "rank-0"), PATIENCE_S)
            space.put(b"a", b"1")
            assert space.get(b"a") == b"1"
        finally:
            lock = (tmp_path / "rank-0" / "lock").read_text()
            os.kill(int(lock), signal.SIGTERM)


def test_after_close(client: Client, space: Space) -> None:
    space.put(b"a", content(7))
    value = space.retrieve(b"a")
    assert value is not None
    space.close()
    space.close()
    assert bytes(value) == content(7)
    with pytest.raises(SidecarUnavailable, match="closed"):
        space.get(b"a")
    janitor = space._janitor
    assert janitor.is_alive(), "who ends the lease?"
    del value  # without a close
    janitor.join(PATIENCE_S)
    assert not janitor.is_alive()
    again = client.space("values", SIZE)
    assert again is not space and again.get(b"a") == content(7)


def test_threads(space: Space) -> None:
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in rng.integers(0, 300, 150):
                match rng.integers(0, 4):
                    case 0:
                        space.put(key(number), content(number))
                    case 1:
                        space.exists(key(number))
                    case 2:
                        data = space.get(key(number))
                        assert data in (None, content(number))
                    case _:
                        room = space.alloc(key(number))
                        if room.view is not None:
                            room.view[:] = content(number)
                        room.store() if number % 2 else room.abort()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_asyncio(sidecar: Sidecar) -> None:
    async def run() -> None:
        async with AsyncClient(sidecar.directory, timeout_s=PATIENCE_S) as client:
            space = client.space("values", SIZE)
            assert (space.name, space.value_bytes) == ("values", SIZE)
            assert await space.put(b"a", b"1")
            assert await space.put_many([(key(n), b"%d" % n) for n in range(20)]) == [True] * 20
            got = await asyncio.gather(*(space.get(key(n)) for n in range(20)))
            assert got == [b"%d" % n for n in range(20)]
            assert await space.exists(b"a") and not await space.exists(b"b")
            assert await space.exists_many([b"a", b"b"]) == [True, False]
            with await space.alloc(b"b", 5) as room:
                assert room.view is not None
                room.view[:] = b"there"
            value = await space.retrieve(b"b")
            assert value is not None
            with value:
                assert bytes(value) == b"there"
            for room in await space.alloc_many([b"c", b"d"], 1):
                room.abort()
            (none,) = await space.retrieve_many([b"c"])
            assert none is None
            await space.pin([b"a"], 10)
            await space.unpin([b"a"])
            await space.prefetch([b"a"])
            assert await space.clear() == 22

    asyncio.run(run())


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys, lookaside; before = 'lookaside.client' in sys.modules; lookaside.Client; "
        "print(before, 'torch' in sys.modules, 'vllm' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False False False\n"
