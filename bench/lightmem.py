"""Bench `lightmem`: LightMem's interface on a sidecar, beside a bare loop on the same disk.

Pages of 64 KiB are written and read by blocks of 1 to 64 MiB with 1 to 16 workers. A write ends
when all of it is on disk. A cold read begins with an empty arena, a warm one finds all of it there.
The limit of a write and of a cold read is a loop that does nothing else: threads that write or read
a preallocated file with O_DIRECT in pieces of 2 MiB, as many threads as the sidecar has for a disk,
from shared memory of 4 KiB pages, which is what an arena is made of where the host gives no others.
The limit of a warm read is memcpy in one thread. Rounds alternate with those of the limits.

`query` asks for 400,000 hashes, and `query.longest_gil` is how long it kept another thread from
running at most; the limit is the same while this thread sleeps. `idle_cpu` is what the sidecar and
this process use while nothing is asked, in percent of a core.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lookaside.light_mem import PyLocalCacheService, PyState, PyTask

from bench._report import Report, arguments

BINARY = Path(__file__).resolve().parents[1] / "bin" / "lookaside"
PAGE = 64 << 10
PIECE = 2 << 20
LOOP_THREADS = 4
HASHES = 400_000
IDLE_S = 5.0


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


class Loop:
    """The bare loop: a file of its own, and buffers that nobody else touches."""

    def __init__(self, directory: Path, size: int) -> None:
        self.size = size
        self.fd = os.open(directory / "loop", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, size)
        memory = os.memfd_create("loop")
        os.ftruncate(memory, LOOP_THREADS * PIECE)
        self.buffers = [
            mmap.mmap(memory, PIECE, offset=which * PIECE) for which in range(LOOP_THREADS)
        ]
        os.close(memory)
        for buffer in self.buffers:
            buffer.write(os.urandom(PIECE))
        self.write()  # blocks that were never written read as zeros, without the disk

    def write(self) -> None:
        self._run(os.pwritev)
        os.fdatasync(self.fd)

    def read(self) -> None:
        self._run(os.preadv)

    def _run(self, call: Callable[..., int]) -> None:
        def work(which: int) -> None:
            for at in range(which * PIECE, self.size, LOOP_THREADS * PIECE):
                if call(self.fd, [self.buffers[which]], at) != PIECE:
                    raise SystemExit("bench: the loop met the end of its file")

        threads = [threading.Thread(target=work, args=(which,)) for which in range(LOOP_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Service:
    """A service with a fresh file. Its tensor has room for one round."""

    def __init__(self, directory: Path, block_mb: int, workers: int, pages: int) -> None:
        os.environ["LIGHTMEM_MAX_BLOCK_SIZE_MB"] = str(block_mb)
        self.kv = torch.randint(0, 256, (pages, PAGE), dtype=torch.uint8)
        self.rows = torch.randperm(pages).to(torch.int32)
        self.file = directory / f"cache-{block_mb}-{workers}"
        self.service = PyLocalCacheService(
            self.kv, str(self.file), storage_size=4 * pages * PAGE, num_worker=workers
        )
        self.run = Path(f"{self.file}.lookaside/run")

    def fresh(self) -> list[int]:
        return [random.getrandbits(128) for _ in range(len(self.kv))]

    def do(self, hashes: list[int], mode: str) -> None:
        task: PyTask = self.service.create(hashes, self.rows, mode)
        while not task.ready():
            time.sleep(0.0005)
        if any(state is not PyState.Finished for state in task.state()):
            raise SystemExit(f"bench: {mode}: not all blocks are finished")

    def empty_arena(self) -> None:
        subprocess.run(
            [str(BINARY), "clear", "--all", "--yes", f"--runtime-dir={self.run}", "--tier=arena"],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def pid(self) -> int:
        return int((self.run / "lock").read_text().split()[0])

    def close(self) -> None:
        pid = self.pid()
        self.service.close()
        os.kill(pid, 15)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


def longest_gil(call: Callable[[], object]) -> float:
    """How long a call keeps another thread that wants to run from it, in seconds."""
    gaps, stop = [0.0], threading.Event()
    begun = threading.Event()

    def other() -> None:
        last = time.perf_counter()
        begun.set()
        while not stop.is_set():
            time.sleep(0)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    before = sys.getswitchinterval()
    sys.setswitchinterval(1.0)  # nobody takes the GIL from its holder: it is given up
    thread = threading.Thread(target=other)
    try:
        thread.start()
        begun.wait()
        gaps.clear()
        call()
        longest = max(gaps)
    finally:
        sys.setswitchinterval(before)
        stop.set()
        thread.join()
    return longest


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(report: Report, directory: Path, block_mb: int, workers: int, args) -> None:
    pages = args.megabytes * (1 << 20) // PAGE
    size = pages * PAGE
    service = Service(directory, block_mb, workers, pages)
    loop = Loop(directory, size)
    values: dict[str, list[float]] = {name: [] for name in ("write", "read_cold", "read_warm")}
    limits: dict[str, list[float]] = {name: [] for name in values}
    spare = torch.empty_like(service.kv)
    spare.zero_()
    try:
        for _ in range(args.rounds):
            hashes = service.fresh()
            values["write"].append(size / timed(lambda h=hashes: service.do(h, "w")) / 1e9)
            limits["write"].append(size / timed(loop.write) / 1e9)
            service.empty_arena()
            values["read_cold"].append(size / timed(lambda h=hashes: service.do(h, "r")) / 1e9)
            limits["read_cold"].append(size / timed(loop.read) / 1e9)
            values["read_warm"].append(size / timed(lambda h=hashes: service.do(h, "r")) / 1e9)
            copy = timed(lambda: ctypes.memmove(spare.data_ptr(), service.kv.data_ptr(), size))
            limits["read_warm"].append(size / copy / 1e9)
        for name, each in values.items():
            report.rounds(f"{name}.{block_mb}M.{workers}w", "GB/s", each, limits[name])
        if args.others:
            others(report, service, args)
    finally:
        service.close()
        os.close(loop.fd)
        (directory / "loop").unlink()


def others(report: Report, service: Service, args) -> None:
    hashes = [random.getrandbits(128) for _ in range(HASHES)]
    query = service.service.query
    query(hashes)
    report.rounds("query.400k", "ms", [timed(lambda: query(hashes)) * 1e3 for _ in range(9)])
    held = [longest_gil(lambda: query(hashes)) * 1e3 for _ in range(9)]
    idle = [longest_gil(lambda: time.sleep(0.1)) * 1e3 for _ in range(9)]
    report.rounds("query.longest_gil", "ms", held, idle)
    time.sleep(1.0)
    pids = (os.getpid(), service.pid())
    before = sum(map(cpu_s, pids))
    time.sleep(IDLE_S)
    report.add("idle_cpu", (sum(map(cpu_s, pids)) - before) / IDLE_S * 100, "%")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a case (5)")
    parser.add_argument("--megabytes", type=int, default=512, help="of a round (512)")
    parser.add_argument(
        "--cases", default="1:4,4:4,16:4,64:1,64:4,64:16", help="BLOCK_MB:WORKERS,…"
    )
    parser.add_argument(
        "--directory", help="on the disk that is measured; default: a temporary one"
    )
    args = parser.parse_args()
    os.environ.setdefault("LOOKASIDE_LIGHT_MEM_BINARY", str(BINARY))
    report = Report("lightmem")
    cases = [tuple(map(int, case.split(":"))) for case in args.cases.split(",")]
    with tempfile.TemporaryDirectory(prefix="lookaside-lightmem-", dir=args.directory) as where:
        for number, (block_mb, workers) in enumerate(cases):
            args.others = number == len(cases) - 1
            measure(report, Path(where), block_mb, workers, args)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
