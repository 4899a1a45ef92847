"""Bench `client`: lookaside.Client, against a bare round trip on the same kind of socket.

A sidecar with values of 1 MiB is asked whether it holds one (`exists`) and for a view of it
(`retrieve`), which is what a program does for each value that it uses. The limit is a bare round
trip: a Ping and its Pong on a session socket, sent and received by one thread of Python with no
session around it (goal 1.5). `exists` leaves its lease to the `retrieve` that follows, so that both
take one round trip. `batch` is the time for each of 16 values that are asked for at once. `alloc`
and `store` write nothing. `spaced` has 100 us of computing between two calls, of both sides: a
program does something with a value. Without it, the sidecar's threads spin for the bare loop's next
message and are asleep when that of a client comes, which is later by what Python does in between.
Rounds alternate with those of the limit; times are microseconds.
"""

from __future__ import annotations

import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lookaside import Client, wire
from lookaside.client import Space
from lookaside.endpoint import EndpointError, open_endpoint
from lookaside.handshake import SessionOptions, greet
from lookaside.line import Line

from bench._report import Report, arguments

BINARY = Path(__file__).resolve().parents[1] / "bin" / "lookaside"
SIZE = 1 << 20
PATIENCE_S = 30.0
BATCH = 16
SPACE_S = 100e-6


class Bare:
    """A session without anything around it: a socket that says Ping and reads the Pong."""

    def __init__(self, endpoint: str) -> None:
        self.line = Line(open_endpoint(endpoint))
        greet(
            self.line,
            SessionOptions(
                endpoint=endpoint,
                role="worker",
                engine_id="bare",
                rank=0,
                page_tokens=1,
                page_bytes=4096,
                pages_per_chunk=1,
                digest_bytes=32,
            ),
        )
        self.socket = self.line.socket
        self.socket.setblocking(True)
        self.buffer = bytearray(wire.MAX_PACKET_BYTES)
        self.number = 0
        # Whatever comes first: the Welcome and its regions.
        while select.select([self.socket], [], [], 0.5)[0]:
            _, fds, _, _ = socket.recv_fds(self.socket, wire.MAX_PACKET_BYTES, 8)
            for fd in fds:
                os.close(fd)

    def __call__(self) -> None:
        self.number += 1
        self.socket.send(wire.encode(wire.Ping(self.number)))
        while True:
            count = self.socket.recv_into(self.buffer)
            message = wire.decode(memoryview(self.buffer)[:count])
            if isinstance(message, wire.Pong) and message.id == self.number:
                return


def timed(call: Callable[[], object], count: int, space_s: float) -> float:
    """The median of count calls, in microseconds, with space_s of computing between them."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        while time.perf_counter() - begun < space_s:
            pass
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def cases(space: Space) -> dict[str, tuple[Callable[[], object], int, float]]:
    """What is measured, how many each call is, and the time between two calls."""
    keys = [b"%d" % number for number in range(BATCH)]
    for key in keys:
        space.put(key, bytes(SIZE))
    fresh = iter(range(1 << 62))

    def both() -> None:
        if not space.exists(keys[0]):
            raise SystemExit("bench: the value is gone")
        value = space.retrieve(keys[0])
        assert value is not None
        value.close()

    def retrieve() -> None:
        value = space.retrieve(keys[0])
        assert value is not None
        value.close()

    def batch() -> None:
        for value in space.retrieve_many(keys):
            assert value is not None
            value.close()

    def store() -> None:
        space.alloc(b"fresh %d" % next(fresh)).store()

    return {
        "exists_and_retrieve": (both, 1, 0.0),
        "exists_and_retrieve.spaced": (both, 1, SPACE_S),
        "retrieve": (retrieve, 1, 0.0),
        "retrieve.spaced": (retrieve, 1, SPACE_S),
        f"retrieve.batch_{BATCH}": (batch, BATCH, 0.0),
        "alloc_and_store": (store, 1, 0.0),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a case (15)")
    parser.add_argument("--calls", type=int, default=300, help="calls of a round (300)")
    args = parser.parse_args()
    report = Report("client")
    with tempfile.TemporaryDirectory(prefix="lookaside-client-") as endpoint:
        process = subprocess.Popen(
            [str(BINARY), "serve", f"--runtime-dir={endpoint}", "--arena-limit=256M",
             "--arena-initial=256M", "--log-level=error"],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
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
            with Client(endpoint, timeout_s=PATIENCE_S) as client:
                space = client.space("bench", SIZE)
                bare = Bare(endpoint)
                for name, (call, each, space_s) in cases(space).items():
                    own, limit = [], []
                    for _ in range(args.rounds):
                        own.append(timed(call, args.calls, space_s) / each)
                        limit.append(timed(bare, args.calls, space_s))
                    report.rounds(name, "us", own, limit)
        finally:
            process.terminate()
            process.wait(15)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())
