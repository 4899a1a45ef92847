"""Bench `mooncake`: lookaside.tiers.mooncake, against a bare loop on Mooncake's own client.

Mooncake's master and a process with memory for its store run beside it, over TCP on the loopback.
The program is asked as the sidecar asks it: puts and gets of four values a call, two calls at a
time, each value a header of 4 KiB and its pages. The limit makes the same Mooncake calls on the
same kind of memory in this process, with nothing around them (goal 0.9). `contains` is a lookup of
64 keys.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
import subprocess
import sys
import tempfile
import time
from importlib import import_module, util
from pathlib import Path
from typing import Any

from bench._program import Pieces, Program
from bench._report import Report, arguments
from bench._tiers import REGION, compare

PATIENCE_S = 60.0
HOLDER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
if store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]):
    sys.exit("bench: the store does not start")
sys.stdin.read()
"""


class Bare:
    """Mooncake's client, and memory."""

    def __init__(self, master: str) -> None:
        self.memory = mmap.mmap(-1, REGION, mmap.MAP_SHARED)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        store: Any = import_module("mooncake.store")
        self.store = store.MooncakeDistributedStore()
        if self.store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master):
            raise SystemExit("bench: the bare client does not start")
        self.store.register_buffer(self._at, REGION)

    def put(self, *items: tuple[bytes, Pieces]) -> list[list[int]]:
        return [
            self.store.batch_put_from_multi_buffers(
                [f"bare/{key.hex()}" for key, _ in items],
                [[self._at + at for at, _ in pieces] for _, pieces in items],
                [[size for _, size in pieces] for _, pieces in items],
            )
        ]

    def get(self, *items: tuple[bytes, Pieces]) -> list[list[int]]:
        addresses, names, sources, sizes = [], [], [], []
        for key, pieces in items:
            source = 0
            for at, size in pieces:
                addresses.append(self._at + at)
                names.append([f"bare/{key.hex()}"])
                sources.append([[source]])
                sizes.append([[size]])
                source += size
        read = self.store.get_into_ranges(addresses, names, [[[0]]] * len(names), sources, sizes)
        return [[int(n != size) for n, size in zip(read, sizes, strict=True)]]

    def contains(self, *keys: bytes) -> list[int]:
        return self.store.batch_is_exist([f"bare/{key.hex()}" for key in keys])

    def clear(self) -> None:
        self.store.remove_by_regex("^bare/", True)


def free_port() -> int:
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a case (5)")
    parser.add_argument("--bytes", type=int, default=256, help="MiB of a round (256)")
    args = parser.parse_args()
    spec = util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("bench: pip install mooncake-transfer-engine-non-cuda")
    binary = Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"
    port, metrics = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    report = Report("mooncake")
    started: list[subprocess.Popen[bytes]] = []
    program = None
    with tempfile.TemporaryDirectory(prefix="lookaside-mooncake-") as directory:
        log = Path(directory, "log")
        try:
            with log.open("ab") as out:
                started.append(
                    subprocess.Popen(
                        [str(binary), f"--rpc_port={port}", "--rpc_address=127.0.0.1",
                         f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"],
                        stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    )
                )  # fmt: skip
                program = Program(
                    [sys.executable, "-m", "lookaside.tiers.mooncake", f"--master={address}",
                     f"--metrics=127.0.0.1:{metrics}"],
                    REGION, stderr=log,
                )  # fmt: skip
                bytes_held = (4 * args.bytes + 256) << 20
                started.append(
                    subprocess.Popen(
                        [sys.executable, "-c", HOLDER, address, str(bytes_held)],
                        stdin=subprocess.PIPE, stdout=out, stderr=out,
                    )
                )  # fmt: skip
            deadline = time.monotonic() + PATIENCE_S
            while program.stats().problem:
                if time.monotonic() > deadline:
                    raise SystemExit(f"bench: {program.stats().problem}\n{log.read_text()}")
                time.sleep(0.1)
            compare(report, program, Bare(address), args.rounds, args.bytes << 20)
        finally:
            if program is not None:
                program.kill()
            for process in started:
                process.kill()
                process.wait()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
