"""Bench `nixl`: lookaside.tiers.nixl, against a bare loop on NIXL's own agent.

Both write and read files of the same directory by NIXL's POSIX plug-in, past the page cache. The
program is asked as the sidecar asks it: puts and gets of four values a call, two calls at a time,
each value a header of 4 KiB and its pages. The limit makes the same NIXL calls in this process,
with nothing around them but opening and renaming the files (goal 0.9). `contains` is a lookup of 64
keys; its limit is a stat of each file.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lookaside.tiers.nixl import Settings, make_agent

from bench._program import Pieces, Program
from bench._report import Report, arguments
from bench._tiers import REGION, compare


class Bare:
    """An agent, memory and a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.memory = mmap.mmap(-1, REGION, mmap.MAP_SHARED)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.agent: Any = make_agent(Settings(directory, 1))
        self.agent.register_memory([(self._at, REGION, 0, "")], "DRAM", backends=["POSIX"])

    def put(self, *items: tuple[bytes, Pieces]) -> list[list[int]]:
        self._move("WRITE", items, os.O_RDWR | os.O_CREAT | os.O_TRUNC, ".tmp")
        for key, _ in items:
            name = key.hex()
            os.rename(self.directory / f"{name}.tmp", self.directory / name)
        return [[0]]

    def get(self, *items: tuple[bytes, Pieces]) -> list[list[int]]:
        self._move("READ", items, os.O_RDONLY, "")
        return [[0]]

    def contains(self, *keys: bytes) -> list[bool]:
        return [os.path.exists(self.directory / key.hex()) for key in keys]

    def clear(self) -> None:
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def _move(self, operation: str, items: Any, flags: int, suffix: str) -> None:
        agent, posix = self.agent, ["POSIX"]
        under_way = []
        for key, pieces in items:
            fd = os.open(self.directory / f"{key.hex()}{suffix}", flags | os.O_DIRECT, 0o600)
            total = sum(size for _, size in pieces)
            registered = agent.register_memory([(0, total, fd, "")], "FILE", backends=posix)
            ends = itertools.accumulate(size for _, size in pieces)
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs([(self._at + at, n, 0) for at, n in pieces], "DRAM"),
                agent.get_xfer_descs(
                    [(end - n, n, fd) for end, (_, n) in zip(ends, pieces, strict=True)], "FILE"
                ),
                agent.name,
                backends=posix,
            )
            agent.transfer(handle)
            under_way.append((handle, registered, fd))
        for handle, registered, fd in under_way:
            wait = 20e-6
            while agent.check_xfer_state(handle) != "DONE":
                time.sleep(wait)
                wait = min(1.5 * wait, 1e-3)
            agent.release_xfer_handle(handle)
            agent.deregister_memory(registered, backends=posix)
            os.close(fd)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a case (5)")
    parser.add_argument("--bytes", type=int, default=256, help="MiB of a round (256)")
    parser.add_argument("--directory", type=Path, help="where the files are (a temporary one)")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    report = Report("nixl")
    with tempfile.TemporaryDirectory(prefix="lookaside-nixl-", dir=args.directory) as directory:
        program = Program(
            [sys.executable, "-m", "lookaside.tiers.nixl", f"--directory={directory}/program",
             "--capacity=8G"],
            REGION, stderr=Path(directory, "log"),
        )  # fmt: skip
        try:
            compare(report, program, Bare(Path(directory, "bare")), args.rounds, args.bytes << 20)
        finally:
            program.kill()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
