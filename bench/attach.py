"""Bench `attach`: how long a second client takes to connect to a sidecar and map 1 GiB of its
arena.

A sidecar with 1 GiB of arena is started on a directory of its own, a first worker connects, and
then second ones come and go. Measured is what a worker does before it can copy: the handshake,
mapping every region, filling its page tables. The limit of 20 ms is for huge pages (hugetlb, or
transparent ones where the host permits them for shared memory); on a host that has neither, the
same is measured with 4 KiB pages and the case says so. `bare` is one mmap and one
MADV_POPULATE_WRITE of as much memory of the same kind, by itself. Times are milliseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from lookaside import wire
from lookaside.endpoint import EndpointError, open_endpoint
from lookaside.handshake import SessionOptions
from lookaside.mapping import map_region, populate, unmap
from lookaside.mappings import Mappings
from lookaside.regions import RegionSet
from lookaside.session import Session, Subscriber

from bench._report import Report, arguments

BINARY = Path(__file__).resolve().parents[1] / "bin" / "lookaside"
SIZE = 1 << 30
LIMIT_MS = 20.0
PATIENCE_S = 30.0
HUGE = ("hugetlb", "thp")


class Mapper(Subscriber):
    """Maps what a session hands over, as the worker role does."""

    def __init__(self) -> None:
        self.mappings = Mappings()
        self.regions = RegionSet(self.mappings)
        self.kind = ""

    def on_region(self, session: Session, region: wire.RegionAdded, fd: int) -> None:
        self.kind = region.kind
        self.regions.add(
            region.region,
            fd,
            region.size,
            huge=region.kind in HUGE,
            background=False,
            offset=region.offset,
        )

    def on_lost(self, session: Session) -> None:
        self.regions.close()
        self.mappings.close()


def connect(endpoint: str, engine_id: str) -> tuple[Session, Mapper, float]:
    """A worker's session with everything mapped, and the milliseconds that it took."""
    mapper = Mapper()
    session = Session(
        SessionOptions(
            endpoint=endpoint,
            role="worker",
            engine_id=engine_id,
            rank=0,
            page_tokens=16,
            page_bytes=1 << 20,
            pages_per_chunk=16,
            digest_bytes=32,
        )
    )
    session.subscribe(mapper)
    begin = time.perf_counter_ns()
    session.start()
    if not session.wait_connected(PATIENCE_S):
        raise SystemExit(f"bench: no session: {session.refused}")
    took = (time.perf_counter_ns() - begin) / 1e6
    if mapper.regions.bytes_mapped < SIZE:
        raise SystemExit(f"bench: only {mapper.regions.bytes_mapped} bytes were mapped")
    return session, mapper, took


def bare(kind: str) -> float:
    """Milliseconds of mapping and populating 1 GiB that another mapping has populated already."""
    flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if kind == "hugetlb" else 0)
    fd = os.memfd_create("bench", flags)
    try:
        os.ftruncate(fd, SIZE)
        first = map_region(fd, SIZE, kind in HUGE)
        populate(first, SIZE)
        begin = time.perf_counter_ns()
        second = map_region(fd, SIZE, kind in HUGE)
        populate(second, SIZE)
        took = (time.perf_counter_ns() - begin) / 1e6
        unmap(second, SIZE)
        unmap(first, SIZE)
        return took
    finally:
        os.close(fd)


def arena_kind(endpoint: str) -> dict[str, Any]:
    address = (Path(endpoint) / "admin.addr").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/v1/status", timeout=PATIENCE_S) as answer:
        return json.load(answer)["arena"]


def figures(kind: str, attached: list[float], bare: list[float]) -> Report:
    """What is reported of the rounds of second clients, and of those of bare mappings."""
    report = Report("attach")
    # Without huge pages the 20 ms are not promised.
    report.rounds(f"second_client_1GiB.{kind}", "ms", attached, LIMIT_MS if kind in HUGE else None)
    report.rounds(f"bare_mmap_and_populate_1GiB.{kind}", "ms", bare)
    return report


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=15, help="second clients that come and go (15)"
    )
    parser.add_argument("--kind", default="auto", help="arena.kind of the sidecar (auto)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lookaside-attach-") as root:
        endpoint = os.path.join(root, "endpoint")
        process = subprocess.Popen(
            [
                str(BINARY),
                "serve",
                f"--runtime-dir={endpoint}",
                f"--arena-limit={SIZE}",
                f"--arena-initial={SIZE}",
                f"--arena-kind={args.kind}",
                "--log-level=error",
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    open_endpoint(endpoint).close()
                    break
                except EndpointError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise SystemExit("bench: the sidecar did not start") from None
                    time.sleep(0.01)
            first, mapper, cold = connect(endpoint, "first")
            kind = mapper.kind
            print(f"  arena of {kind}: {arena_kind(endpoint).get('reason', '')}", file=sys.stderr)
            times: list[float] = []
            for number in range(args.rounds):
                session, _, took = connect(endpoint, f"second-{number}")
                times.append(took)
                session.close()
            first.close()
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        floor = [bare(kind) for _ in range(3)]
    print(f"  first client {cold:.2f} ms", file=sys.stderr)
    return figures(kind, times, floor).finish(args.json)


if __name__ == "__main__":
    raise SystemExit(main())
