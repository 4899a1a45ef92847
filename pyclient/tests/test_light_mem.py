"""lookaside.light_mem with real sidecars: LightMem's semantics, and what LightMem does not do.

Pages have their hash as content, so that a page that was read says whose it is.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lookaside import pages as lookaside_pages
from lookaside.light_mem import PyLocalCacheService, PyState, PyTask, _endpoint_in
from peer import until
from readiness import ready

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "bin" / "lookaside"
PAGE = 16 << 10
PAGES = 512
PER_BLOCK = 64  # 1 MiB
STORAGE = 192 << 20
PATIENCE_S = 120.0
SEED = int(os.environ.get("LOOKASIDE_TEST_SEED", "20261124"))


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTMEM_MAX_BLOCK_SIZE_MB", "1")
    monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_BINARY", str(BINARY))
    monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_ARENA", "64M")
    monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_ARGUMENTS", "--arena-kind=memfd --log-level=warn")
    monkeypatch.setattr("lookaside.autostart._FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr("lookaside.autostart._LAST_PAUSE_S", 0.2)
    monkeypatch.setattr("lookaside.light_mem._QUERY_PATIENCE_S", PATIENCE_S)


class Files:
    """The caches of one test, whose sidecars end with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.services: list[PyLocalCacheService] = []

    def path(self, name: str = "cache") -> Path:
        return self.directory / name

    def store(self, name: str = "cache") -> Path:
        return self.directory / f"{name}.lookaside"

    def open(self, name: str = "cache", **more: object) -> Service:
        made = Service(self.path(name), **more)
        self.services.append(made)
        return made

    def pid(self, name: str = "cache") -> int:
        return int((self.store(name) / "run" / "lock").read_text().split()[0])

    def signal(self, number: int, name: str = "cache") -> None:
        """Signal a sidecar, and wait until it is gone."""
        pid = self.pid(name)
        os.kill(pid, number)
        until(lambda: not is_running(pid), PATIENCE_S)

    def end(self) -> None:
        for service in self.services:
            service.close()
        for store in self.directory.glob("*.lookaside"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int((store / "run" / "lock").read_text().split()[0]), signal.SIGKILL)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    it = Files(tmp_path_factory.mktemp("lm"))
    try:
        yield it
    finally:
        it.end()


class Service(PyLocalCacheService):
    """A service with a tensor of its own, whose pages a test fills and checks."""

    def __init__(self, path: Path, pages: int = PAGES, **more: object) -> None:
        self.kv = torch.zeros((pages, PAGE), dtype=torch.uint8)
        arguments = {"storage_size": STORAGE, "num_shard": 4, "num_worker": 4, **more}
        super().__init__(self.kv, str(path), **arguments)  # type: ignore[arg-type]

    def fill(self, hashes: Sequence[int], rows: Sequence[int]) -> None:
        for each, row in zip(hashes, rows, strict=True):
            self.kv[row] = content(each)

    def write(self, hashes: Sequence[int], rows: Sequence[int] | None = None) -> PyTask:
        rows = range(len(hashes)) if rows is None else rows
        self.fill(hashes, rows)
        return ended(self.create(hashes, int32(rows), "w"))

    def read(self, hashes: Sequence[int], rows: Sequence[int] | None = None) -> PyTask:
        """Read into cleared pages; check that each finished block is what it should be."""
        rows = list(range(len(hashes)) if rows is None else rows)
        self.kv[rows] = 0
        task = ended(self.create(hashes, int32(rows), "r"))
        for block, state in enumerate(task.state()):
            if state is PyState.Finished:
                some = slice(block * PER_BLOCK, (block + 1) * PER_BLOCK)
                for each, row in zip(hashes[some], rows[some], strict=True):
                    assert torch.equal(self.kv[row], content(each)), f"block {block}, page {row}"
        return task


def int32(rows: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(rows), dtype=torch.int32)


def content(page_hash: int) -> torch.Tensor:
    word = np.frombuffer(page_hash.to_bytes(16, "big"), np.uint8)
    return torch.from_numpy(np.tile(word, PAGE // 16))


def prefix(seed: int, pages: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(128) for _ in range(pages)]


def ended(task: PyTask) -> PyTask:
    until(task.ready, PATIENCE_S)
    assert task.data_safe()
    return task


def finished(task: PyTask) -> bool:
    return all(state is PyState.Finished for state in task.state())


# ---- LightMem's semantics ----


def test_what_is_written_is_read(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, 3 * PER_BLOCK + 10)
    rows = random.Random(2).sample(range(PAGES), len(hashes))
    assert service.query(hashes) == [False] * 4, "a bool a block, the last one is partly filled"
    task = service.write(hashes, rows)
    assert task.state() == [PyState.Finished] * 4 and task.page_already_list == []
    assert service.query(hashes) == [True] * 4
    again = random.Random(3).sample(range(PAGES), len(hashes))
    assert finished(service.read(hashes, again))


def test_states_are_numbers_as_in_lightmem() -> None:
    assert {state.name: state.value for state in PyState} == {
        "Initial": 0,
        "Working": 1,
        "Finished": 2,
        "Aborted": 3,
    }


def test_blocks_are_bounded_by_the_environment(
    files: Files, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for text, pages in (("2", 128), ("", 4096), ("nonsense", 4096), ("0", 4096)):
        monkeypatch.setenv("LIGHTMEM_MAX_BLOCK_SIZE_MB", text)
        service = files.open()
        assert service._n == pages and service._block_size == pages * PAGE
        assert len(service.query(prefix(1, 4097))) == -(-4097 // pages)
        service.close()
    assert "LIGHTMEM_MAX_BLOCK_SIZE_MB is 'nonsense'" in caplog.text


@pytest.mark.parametrize(
    ("block", "page", "chunk"),
    [
        (1024, 65536, 32),
        (16, 65536, 16),
        (409, 163_840, 409),  # a prime
        (65536, 1024, 2048),
        (1, 3 << 20, 1),
        (6710, 10_000, 305),
        (8191, 256, 1),  # a prime that is no chunk
    ],
)
def test_chunks_divide_blocks(block: int, page: int, chunk: int) -> None:
    assert lookaside_pages.pages_per_chunk(block, page) == chunk


def test_a_query_counts_each_block_by_itself(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, 3 * PER_BLOCK)
    # Without its first block: the blocks before start_pos are left out, and their pages too.
    service.fill(hashes, range(len(hashes)))
    rows = int32(range(len(hashes)))
    task = ended(service.create(hashes, rows, "w", start_pos=PER_BLOCK + 5))
    assert task.state() == [PyState.Finished] * 2
    assert service.query(hashes) == [False, True, True]
    read = service.read(hashes)
    assert read.state() == [PyState.Aborted, PyState.Finished, PyState.Finished]
    assert not service.kv[:PER_BLOCK].any(), "pages of a block that is not held were written"


def test_start_pos(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, 2 * PER_BLOCK + 3)
    rows = int32(range(len(hashes)))
    service.write(hashes)
    service.kv.zero_()
    task = ended(service.create(hashes, rows, "r", 2 * PER_BLOCK + 1))
    assert task.state() == [PyState.Finished]
    assert not service.kv[: 2 * PER_BLOCK].any()
    assert torch.equal(service.kv[2 * PER_BLOCK + 2], content(hashes[-1]))
    assert ended(service.create(hashes, rows, "r", 1000)).state() == []
    with pytest.raises(ValueError, match="start_pos is -1"):
        service.create(hashes, rows, "r", -1)


def test_nothing_is_a_task_that_is_ready(files: Files) -> None:
    service = files.open()
    assert service.query([]) == []
    for mode in ("w", "r"):
        task = service.create([], int32([]), mode)
        assert task.ready() and task.data_safe() and task.state() == []
        assert task.page_already_list == []
        assert service.active_threads(mode) == 0


def test_prefixes_are_shared_by_the_page(files: Files) -> None:
    service = files.open()
    short = prefix(1, PER_BLOCK + 20)
    service.write(short)
    longer = short + prefix(2, 30)
    assert service.query(longer) == [True, False]
    task = service.write(longer)
    assert finished(task)
    assert sorted(task.page_already_list) == list(range(PER_BLOCK)), "whole blocks only"
    # Another request that leaves the prefix within the block, and a shorter one.
    other = short[: PER_BLOCK + 7] + prefix(3, 9)
    service.write(other)
    for hashes in (short, longer, other, short[: PER_BLOCK + 3]):
        assert service.query(hashes) == [True, True]
        assert finished(service.read(hashes))


def test_pages_that_are_held_already(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, 2 * PER_BLOCK)
    rows = random.Random(1).sample(range(PAGES), len(hashes))
    assert service.write(hashes[:PER_BLOCK], rows[:PER_BLOCK]).page_already_list == []
    task = service.write(hashes, rows)
    assert task.page_already_list == rows[:PER_BLOCK]
    assert service.read(hashes).page_already_list == []


def test_the_source_may_change_once_it_is_safe(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, PAGES)
    service.fill(hashes, range(PAGES))
    task = service.create(hashes, int32(range(PAGES)), "w")
    until(task.data_safe, PATIENCE_S)
    service.kv.fill_(255)
    assert finished(ended(task))
    assert finished(service.read(hashes))


def test_an_abort_leaves_the_tensor_alone(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, PAGES)
    service.write(hashes)
    for _ in range(5):
        service.kv.zero_()
        task = service.create(hashes, int32(range(PAGES)), "r")
        service.abort(task)
        before = service.kv.clone()
        assert task.ready() and task.data_safe()
        states = task.state()
        assert set(states) <= {PyState.Finished, PyState.Aborted}
        assert service.active_threads("r") == 0
        assert finished(service.read(hashes[:PER_BLOCK], range(PAGES - PER_BLOCK, PAGES)))
        assert torch.equal(service.kv[: PAGES - PER_BLOCK], before[: PAGES - PER_BLOCK])
        service.abort(task)
        assert task.state() == states, "what has ended stays as it is"
    new = prefix(2, PAGES)
    service.fill(new, range(PAGES))
    task = service.create(new, int32(range(PAGES)), "w")
    service.abort(task)
    assert task.data_safe() and task.ready()
    service.kv.fill_(7)  # it is not read any more: what is held of it is what was there
    service.read(new)


def test_active_threads_count_tasks(files: Files) -> None:
    service = files.open()
    os.kill(files.pid(), signal.SIGSTOP)
    try:
        rows = int32(range(PER_BLOCK))
        tasks = [service.create(prefix(n, PER_BLOCK), rows, "r") for n in range(3)]
        assert service.active_threads("r") == 3 and service.active_threads("w") == 0
        assert not any(task.ready() or task.data_safe() for task in tasks)
        service.abort(tasks[0])
        assert service.active_threads("r") == 2
    finally:
        os.kill(files.pid(), signal.SIGCONT)
    for task in tasks:
        ended(task)
    assert service.active_threads("r") == 0
    with pytest.raises(RuntimeError, match="mode is 'x'"):
        service.active_threads("x")


# ---- what is refused ----


def test_a_page_that_the_tensor_does_not_have_is_refused(files: Files) -> None:
    service = files.open()
    for bad in (-1, PAGES, 2**31 - 1):
        for mode in ("w", "r"):
            with pytest.raises(ValueError, match=f"the page {bad}: the tensor has pages 0 to 511"):
                service.create(prefix(1, 3), int32([0, bad, 1]), mode)
    assert service.active_threads("w") == service.active_threads("r") == 0


def test_arguments_that_never_work(files: Files) -> None:
    service = files.open()
    hashes = prefix(1, 3)
    with pytest.raises(RuntimeError, match='it must be "w" to write or "r" to read'):
        service.create(hashes, int32(range(3)), "invalid")
    with pytest.raises(RuntimeError, match="must be int32"):
        service.create(hashes, torch.arange(3), "w")
    with pytest.raises(RuntimeError, match=r"shape \[2\] for 3 hashes"):
        service.create(hashes, int32(range(2)), "w")
    with pytest.raises(RuntimeError, match="one row of the tensor for each"):
        service.create(hashes, int32(range(4)).view(2, 2), "w")
    for bad in ([-1], [2**128], ["1"], [None]):
        with pytest.raises(ValueError, match="integers of 128 bits"):
            service.query(bad)  # type: ignore[arg-type]


def test_tensors_that_cannot_be_used(files: Files) -> None:
    for tensor, match in (
        (torch.zeros((2, 3, 256), dtype=torch.uint8), "shape"),
        (torch.zeros((2, 256), dtype=torch.float16), "uint8"),
        (torch.zeros((4, 256), dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros((4, 255), dtype=torch.uint8), "256 bytes or more"),
        (torch.zeros((0, 256), dtype=torch.uint8), "one at least"),
        (torch.zeros((4, 256), dtype=torch.uint8, device="meta"), "on the CPU"),
    ):
        with pytest.raises(ValueError, match=match):
            PyLocalCacheService(tensor, str(files.path()), STORAGE)


def test_settings_that_cannot_work(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="below the 1048576 bytes of one block"):
        files.open(storage_size=1 << 19)
    with pytest.raises(RuntimeError, match="num_shard"):
        files.open(num_shard=0)
    with pytest.raises(ValueError, match="num_worker"):
        files.open(num_worker=0)
    with pytest.raises(RuntimeError, match="has room for"):
        files.open(storage_size=1 << 60)
    files.path("file").write_text("no directory")
    with pytest.raises(RuntimeError, match="Not a directory"):
        files.open("file/cache")
    monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_ARGUMENTS", "--arena-kind=nonsense")
    with pytest.raises(RuntimeError, match=r"cannot be started: .*arena.kind"):
        files.open()


# ---- what LightMem does not do ----


def test_a_restart_loses_nothing(files: Files) -> None:
    hashes = prefix(1, 2 * PER_BLOCK + 9)
    with contextlib.closing(files.open()) as service:
        assert finished(service.write(hashes))
    files.signal(signal.SIGTERM)
    service = files.open()
    assert service.query(hashes) == [True] * 3
    assert finished(service.read(hashes))


def test_killed_sidecars_are_followed_by_others(files: Files) -> None:
    service = files.open()
    written: list[list[int]] = []
    for n in range(3):
        hashes = prefix(n, PER_BLOCK + 9)
        assert finished(service.write(hashes))
        written.append(hashes)
        files.signal(signal.SIGKILL)
        # A task waits for the next sidecar, which this process starts.
        for each in written:
            assert finished(service.read(each))


CHILD = """
import signal, sys, torch
sys.path[:0] = {path!r}
import test_light_mem as t
service = t.Service(t.Path({file!r}))
hashes = t.prefix(1, 2 * t.PER_BLOCK + 9)
assert t.finished(service.write(hashes))
print("written", flush=True)
signal.pause()
"""


def test_what_is_finished_survives_the_death_of_all(files: Files) -> None:
    child = CHILD.format(path=sys.path, file=str(files.path()))
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    os.kill(process.pid, signal.SIGSTOP)  # it gives the sidecar's memory back to nobody
    files.signal(signal.SIGKILL)
    process.kill()
    process.wait()
    service = files.open()
    hashes = prefix(1, 2 * PER_BLOCK + 9)
    assert service.query(hashes) == [True] * 3
    assert finished(service.read(hashes))


def test_two_processes_share_a_path(files: Files) -> None:
    service = files.open()
    child = CHILD.format(path=sys.path, file=f"{files.directory}/./cache")
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        mine = prefix(7, PER_BLOCK)
        assert finished(service.write(mine))
        assert process.stdout.readline() == b"written\n"
        hashes = prefix(1, 2 * PER_BLOCK + 9)
        assert service.query(hashes) == [True] * 3
        assert finished(service.read(hashes)) and finished(service.read(mine))
    finally:
        process.kill()
        process.wait()
    assert finished(service.read(hashes)), "the other one's death changed something"


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_disk_without_room_is_refused(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted_as("size=40m", files, monkeypatch)
    with pytest.raises(RuntimeError, match=r"cannot be started: .*and 40MiB are free"):
        files.open()


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_disk_that_fails_at_the_start_finishes_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted_as("ro", files, monkeypatch)
    service = files.open()
    hashes = prefix(1, PER_BLOCK + 5)
    assert service.write(hashes).state() == [PyState.Aborted] * 2
    service.read(hashes)


def mounted_as(options: str, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the sidecar see a small file system in the place of the disk."""
    disk = files.store() / "disk"
    disk.mkdir(parents=True)
    inside = f'mount -t tmpfs -o {options} none {disk} && exec {BINARY} "$@"'
    path = files.path("wrapper")
    path.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{inside}' sh \"$@\"\n")
    path.chmod(0o755)
    monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_BINARY", str(path))


def test_a_disk_that_fills_up_changes_nothing(files: Files) -> None:
    """The storage is allocated at the start. So a disk that fills up later changes nothing."""
    service = files.open()
    taken = sum(p.stat().st_blocks * 512 for p in (files.store() / "disk").rglob("*"))
    assert taken >= STORAGE * 9 // 10, "the storage is not allocated"
    hashes = prefix(1, PAGES)
    assert finished(service.write(hashes)) and finished(service.read(hashes))


def test_a_disk_that_is_gone_finishes_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are removed under the sidecar: no restart would find what it writes there."""
    service = files.open()
    before, after = prefix(1, PAGES), prefix(2, PAGES)
    assert finished(service.write(before))
    for path in (files.store() / "disk").rglob("*"):
        if path.is_file():
            path.unlink()
    monkeypatch.setattr(lookaside_pages, "PATIENCE_S", 0.5)

    def refused() -> bool:  # once the sidecar has noticed
        states = service.write(prefix(random.getrandbits(32), PER_BLOCK)).state()
        return states == [PyState.Aborted]

    until(refused, PATIENCE_S)
    assert service.write(after).state() == [PyState.Aborted] * 8
    service.read(after)  # of the memory, perhaps; what is read is right
    service.read(before)


def test_more_than_the_storage_forgets(files: Files) -> None:
    """The storage is bounded. Old blocks go, and nothing that is read is another's."""
    service = files.open(storage_size=64 << 20)
    written = [prefix(n, PAGES) for n in range(20)]  # 160 MiB
    for hashes in written:
        assert finished(service.write(hashes))
    kept = [all(service.query(hashes)) for hashes in written]
    assert kept[-1] and not all(kept)
    states = [finished(service.read(hashes)) for hashes in written]
    assert states[-1]
    taken = sum(p.stat().st_blocks * 512 for p in (files.store() / "disk").rglob("*"))
    assert taken <= 80 << 20


def test_more_than_the_memory_is_read(files: Files) -> None:
    service = files.open()
    written = [prefix(n, PAGES) for n in range(16)]  # 128 MiB, the arena has 64
    for hashes in written:
        assert finished(service.write(hashes))
    tasks = []
    for hashes in written:
        assert service.query(hashes) == [True] * 8
        tasks.append(service.create(hashes, int32(range(PAGES)), "r"))
    assert all(finished(ended(task)) for task in tasks)
    for hashes in written:
        assert finished(service.read(hashes))


def test_queries_let_other_threads_run(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes the GIL from its holder here: other threads run when it is given up."""
    service = files.open()
    hashes = prefix(1, 400_000)
    before = sys.getswitchinterval()
    turns, stop = 0, False

    def other() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=other)
    thread.start()
    sys.setswitchinterval(1000.0)
    try:
        begun = turns
        service.query(hashes)
        seen = turns - begun
    finally:
        sys.setswitchinterval(before)
        stop = True
        thread.join()
    assert seen > 400_000 // 4096


def test_a_service_that_nobody_has_ends(files: Files) -> None:
    service = files.open()
    tensor = weakref.ref(service.kv)
    threads = list(service._blocks._threads)
    task = service.create(prefix(1, PER_BLOCK), int32(range(PER_BLOCK)), "w")
    files.services.clear()
    del service
    gc.collect()
    ended(task)
    until(lambda: not any(thread.is_alive() for thread in threads), PATIENCE_S)
    until(lambda: tensor() is None, PATIENCE_S)


def test_tasks_of_a_closed_service_are_aborted(files: Files) -> None:
    service = files.open()
    os.kill(files.pid(), signal.SIGSTOP)
    task = service.create(prefix(1, PER_BLOCK), int32(range(PER_BLOCK)), "r")
    service.close()
    os.kill(files.pid(), signal.SIGCONT)
    assert task.ready() and task.state() == [PyState.Aborted]
    assert service.query(prefix(1, 1)) == [False]
    late = service.create(prefix(1, 1), int32([0]), "w")
    assert late.ready() and late.state() == [PyState.Aborted]
    service.close()


def test_a_named_sidecar(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disk, finished is what other sidecars' clients get: held in memory."""
    endpoint = files.path("rank-0")
    process = subprocess.Popen(
        [BINARY, "serve", "--runtime-dir", endpoint, "--arena-limit", "32M", "--arena-kind",
         "memfd", "--log-level", "warn"]
    )  # fmt: skip
    try:
        until(lambda: ready(endpoint), PATIENCE_S)
        monkeypatch.setenv("LOOKASIDE_LIGHT_MEM_ENDPOINT", str(endpoint))
        service = files.open()
        assert not files.store().exists()
        hashes = prefix(1, PER_BLOCK)
        assert finished(service.write(hashes)) and finished(service.read(hashes))
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    with pytest.raises(RuntimeError, match="rank-0 does not answer"):
        monkeypatch.setattr("lookaside.light_mem._START_PATIENCE_S", 0.0)
        files.open()


def test_long_paths_have_their_sockets_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    assert len(_endpoint_in(deep)) < 100 and str(deep) not in _endpoint_in(deep)
    link = tmp_path / "link"
    link.symlink_to(deep)
    assert _endpoint_in(link.resolve()) == _endpoint_in(deep)


# ---- random histories ----


@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_random_histories(files: Files, seed: int) -> None:
    """Two services write and read prefixes that branch; their sidecar is killed now and then.

    What is finished is held from then on, because the storage has room for all of it. What is read
    is what its hash names. A block that nobody wrote is never found.
    """
    rng = random.Random(seed)
    print(f"seed {seed}")
    services = [files.open(), files.open(num_worker=1)]
    trunks = [prefix(rng.getrandbits(32), 5 * PER_BLOCK) for _ in range(3)]
    known: set[int] = set()  # hashes of pages that are held for certain
    tried: set[int] = set()  # of pages that somebody began to write
    for _ in range(60):
        service = rng.choice(services)
        trunk = rng.choice(trunks)
        hashes = trunk[: rng.randrange(1, len(trunk))]
        if rng.random() < 0.3:
            hashes = hashes + prefix(rng.getrandbits(32), rng.randrange(1, 40))
            if rng.random() < 0.5:
                trunks[rng.randrange(len(trunks))] = hashes
        starts = range(0, len(hashes), PER_BLOCK)
        ends = [hashes[start : start + PER_BLOCK][-1] for start in starts]
        rows = rng.sample(range(PAGES), len(hashes)) if len(hashes) <= PAGES else None
        if rows is None:
            continue
        act = rng.choices(("write", "abort", "read", "query", "kill"), (8, 2, 8, 4, 1))[0]
        if act == "write":
            tried.update(hashes)
            assert finished(service.write(hashes, rows)), f"seed {seed}"
            known.update(hashes)
        elif act == "abort":
            tried.update(hashes)
            service.fill(hashes, rows)
            task = service.create(hashes, int32(rows), "w")
            if rng.random() < 0.5:
                time.sleep(rng.random() / 100)
            service.abort(task)
            for start, state in zip(starts, task.state(), strict=True):
                if state is PyState.Finished:
                    known.update(hashes[start : start + PER_BLOCK])
        elif act == "kill":
            files.signal(signal.SIGKILL)
        else:
            if act == "read":
                there = [state is PyState.Finished for state in service.read(hashes, rows).state()]
            else:
                there = service.query(hashes)
            for end, found in zip(ends, there, strict=True):
                assert not found or end in tried, f"seed {seed}: a block that nobody wrote"
                if act == "read":
                    assert found or end not in known, f"seed {seed}: a block is lost"


# ---- the alias, and a program that was written for LightMem ----


def test_the_example_runs_unchanged(files: Files, tmp_path: Path) -> None:
    """With the distribution that has the module light_mem, as it is installed."""
    source = ROOT / "packaging" / "light_mem"
    built, where = tmp_path / "built", tmp_path / "site"
    shutil.copytree(source, built)
    subprocess.run(
        [sys.executable, "-c", "import setuptools.build_meta as b; print(b.build_wheel('.'))"],
        cwd=built, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = built.glob("lookaside_light_mem-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "light_mem",
            f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info",
        }
        archive.extractall(where)
    environment = {**os.environ, "PYTHONPATH": f"{where}:{os.environ.get('PYTHONPATH', '')}"}
    environment["PYTHONPATH"] += f":{ROOT / 'pyclient'}:{ROOT}"
    said = []
    for more in ([], ["--read"]):
        said.append(
            subprocess.run(
                [sys.executable, "-m", "examples.kv_on_disk", str(files.directory), *more],
                cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
            ).stdout
        )  # fmt: skip
        files.signal(signal.SIGTERM)
    assert "held before, by block: [False, False, False, False, False]" in said[0]
    assert "held before, by block: [True, True, True, True, True]" in said[1]
    for each in said:
        assert "states: ['Finished', 'Finished', 'Finished', 'Finished', 'Finished']" in each


def test_a_program_that_ends_with_its_service_ends_well(files: Files) -> None:
    """The service is collected as main returns, when the interpreter is about to end."""
    program = """
import sys, torch
from lookaside.light_mem import PyLocalCacheService

def main():
    tensor = torch.zeros((64, 4096), dtype=torch.uint8)
    service = PyLocalCacheService(tensor, sys.argv[1], storage_size=64 << 20, num_worker=2)
    service.query([1, 2, 3])

main()
"""
    paths = f"{ROOT / 'pyclient'}:{os.environ.get('PYTHONPATH', '')}"
    for _ in range(3):
        subprocess.run(
            [sys.executable, "-c", program, str(files.directory / "cache")],
            env={**os.environ, "PYTHONPATH": paths}, check=True, timeout=120,
        )  # fmt: skip
