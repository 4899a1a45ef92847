"""Bench `lookup`: a Python client asking a sidecar with 1 M pages indexed, against a bare ZMQ echo.

Three servers run for the length of the bench: the sidecar, the same with threads that copy memory
at full speed meanwhile, and an echo that answers as little. The echo is sent the very bytes of the
lookups and answers with as many bytes as a lookup's answer has (`echo_whole` cases: with the
message itself). Lookups and echoes alternate; a round's own ratio is that of its two medians. What
is asked for is all held, which is the longest walk of the index, and each answer is checked. Leases
are given back between the rounds.

Last, one client asks for 64 pages while another process, with a session of its own, asks for 65,536
pages at a time, 64 times in a row, without end: what is held (a prefix of 65,536 pages), and what
is not.

Times are microseconds. The limit of a p50 is the echo's, of p99.9 under copies 2 ms; the latter's
spread is that of the rounds' p99 / limit, as a round is too short for its own p99.9.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq
from lookaside import wire
from lookaside.handshake import SessionOptions
from lookaside.lookups import Lookup, LookupClient
from lookaside.session import Session

from bench._report import Report, arguments, spread

BINARY = Path(__file__).resolve().parents[1] / "bin" / "lookaside-bench"
SIZES = (64, 1024, 4096)
PATIENCE_S = 60.0
TAIL_LIMIT_US = 2000.0
NEIGHBOUR_LIMIT_US = 5000.0


@contextlib.contextmanager
def serving(*command: str) -> Iterator[dict[str, Any]]:
    """A process of lookaside-bench; yields the line of JSON that it begins with."""
    process = subprocess.Popen(
        [str(BINARY), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(
                f"bench: lookaside-bench {' '.join(command)} ended with {process.wait()}"
            )
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Asker:
    """A scheduler's client of one lookup server."""

    def __init__(self, server: dict[str, Any]) -> None:
        self.pages_per_prefix = server["pages_per_prefix"]
        self.prefixes = server["prefixes"]
        self._session = Session(
            SessionOptions(
                endpoint=server["endpoint"],
                role="scheduler",
                engine_id=server["engine_id"],
                rank=server["rank"],
                page_tokens=server["page_tokens"],
                page_bytes=0,
                pages_per_chunk=server["pages_per_chunk"],
                digest_bytes=server["digest_bytes"],
            )
        )
        self._client = LookupClient([self._session], PATIENCE_S, 0)
        self._session.start()
        if not self._session.wait_connected(PATIENCE_S):
            raise SystemExit(f"bench: no session with the lookup server: {self._session.refused}")
        self._out: list[Lookup] = []

    def prefix(self, number: int, pages: int) -> bytes:
        """The hashes of the first pages of one of the prefixes that the server holds."""
        digests = (
            hashlib.sha256(number.to_bytes(8, "little") + page.to_bytes(8, "little")).digest()
            for page in range(pages)
        )
        return b"".join(digests)

    def ask(self, hashes: bytes) -> float:
        """Microseconds of one lookup, of which all must be held."""
        begin = time.perf_counter_ns()
        lookup = self._client.start(0, b"", hashes)
        hits = self._client.wait(lookup, PATIENCE_S)
        took = time.perf_counter_ns() - begin
        if hits != len(hashes) // 32:
            raise SystemExit(f"bench: {hits} of {len(hashes) // 32} pages found")
        self._out.append(lookup)
        return took / 1e3

    def give_back(self) -> None:
        """Free all leases, outside of any measurement."""
        for lookup in self._out:
            lookup.cancel()
        self._out.clear()
        time.sleep(0.005)

    def close(self) -> None:
        self._client.close()
        self._session.close()


class Echo:
    """A client of the bare echo."""

    def __init__(self, server: dict[str, Any]) -> None:
        self._context = zmq.Context()
        self._push = self._context.socket(zmq.PUSH)
        self._pull = self._context.socket(zmq.PULL)
        self._push.connect(server["push"])
        self._pull.connect(server["pull"])
        self._pull.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))

    def ask(self, message: bytes) -> float:
        """Microseconds of one round trip."""
        begin = time.perf_counter_ns()
        self._push.send(message)
        self._pull.recv()
        return (time.perf_counter_ns() - begin) / 1e3

    def close(self) -> None:
        self._context.destroy(0)


def message_of(hashes: bytes) -> bytes:
    """The bytes that a lookup of these pages sends; its numbers are as long as real ones."""
    return wire.encode(wire.Lookup(1 << 63, bytes(16), 1 << 47, 0, b"", hashes, 5000, 0))


ANSWER_BYTES = len(wire.encode(wire.LookupResult(1 << 47, 4096, 65536)))


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def paired(
    report: Report,
    asker: Asker,
    echoes: dict[str, Echo],
    pages: int,
    rounds: int,
    pairs: int,
    rng: random.Random,
) -> None:
    """p50 of lookups beside that of every echo, in alternation."""
    prefixes = [
        asker.prefix(number, pages)
        for number in rng.sample(range(asker.prefixes), min(8, asker.prefixes))
    ]
    message = message_of(prefixes[0])
    for _ in range(50):
        asker.ask(prefixes[0])
        for echo in echoes.values():
            echo.ask(message)
    asker.give_back()
    own: list[float] = []
    others: dict[str, list[float]] = {name: [] for name in echoes}
    for _ in range(rounds):
        times: list[float] = []
        bare: dict[str, list[float]] = {name: [] for name in echoes}
        for _ in range(pairs):
            turns: list[tuple[list[float], Callable[[bytes], float], bytes]] = [
                (times, asker.ask, rng.choice(prefixes)),
                *((bare[name], echo.ask, message) for name, echo in echoes.items()),
            ]
            rng.shuffle(turns)
            for into, ask, what in turns:
                into.append(ask(what))
        asker.give_back()
        own.append(statistics.median(times))
        for name in echoes:
            others[name].append(statistics.median(bare[name]))
    for name in echoes:
        report.rounds(f"p50.{pages}_pages.{name}", "us", own, others[name])


def tail(
    report: Report, asker: Asker, pages: int, rounds: int, lookups: int, rng: random.Random
) -> None:
    """p99.9 of lookups from a server that copies memory meanwhile."""
    prefixes = [
        asker.prefix(number, pages)
        for number in rng.sample(range(asker.prefixes), min(8, asker.prefixes))
    ]
    times: list[float] = []
    per_round: list[float] = []
    for _ in range(rounds):
        chunk = []
        for start in range(0, lookups, 100):
            chunk += [asker.ask(rng.choice(prefixes)) for _ in range(min(100, lookups - start))]
            asker.give_back()
        times += chunk
        per_round.append(quantile(chunk, 0.99) / TAIL_LIMIT_US)
    value = quantile(times, 0.999)
    print(
        f"  {pages} pages under copies, {len(times)} lookups: p50 {statistics.median(times):.0f}, "
        f"p99 {quantile(times, 0.99):.0f}, p99.9 {value:.0f}, worst {max(times):.0f} us",
        file=sys.stderr,
    )
    name = f"p99.9.{pages}_pages.under_copies"
    report.add(name, value, "us", TAIL_LIMIT_US, value / TAIL_LIMIT_US, spread(per_round))


def flood(server: dict[str, Any], kind: str) -> None:
    """Asks for as much as one lookup may, again and again, until the standard input ends."""
    asker = Asker(server)
    pages = asker.pages_per_prefix
    hashes = (
        asker.prefix(0, pages)
        if kind.startswith("held")
        else random.Random(1).randbytes(32 * pages)
    )
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    asked = 0
    while not ended.is_set():
        lookups = [asker._client.start(0, b"", hashes) for _ in range(64)]
        for lookup in lookups:
            asker._client.wait(lookup, PATIENCE_S)
            lookup.cancel()
        asked += len(lookups)
        if asked == len(lookups):
            print("flooding", flush=True)
    print(asked, flush=True)
    asker.close()


def beside(report: Report, server: dict[str, Any], kind: str, seconds: float) -> None:
    """p50 and p99.9 of short lookups beside a client that floods the sidecar with long ones."""
    asker = Asker(server)
    hashes = asker.prefix(1, 64)
    command = [
        sys.executable,
        "-m",
        "bench.lookup",
        "--flood",
        kind,
        "--server",
        json.dumps(server),
    ]
    flooder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert flooder.stdin is not None and flooder.stdout is not None
    alone = [asker.ask(hashes) for _ in range(500)]
    asker.give_back()
    flooder.stdout.readline()
    times: list[float] = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        times += [asker.ask(hashes) for _ in range(20)]
        asker.give_back()
    took = time.monotonic() - begin
    flooder.stdin.close()
    asked = int(flooder.stdout.readline())
    flooder.wait(PATIENCE_S * 4)
    asker.close()
    print(
        f"  64 pages beside {asked / took:.0f} lookups/s of {asker.pages_per_prefix} ({kind}), "
        f"{len(times)} lookups: "
        f"p50 {statistics.median(times):.0f} (alone {statistics.median(alone):.0f}), p99 "
        f"{quantile(times, 0.99):.0f}, "
        f"p99.9 {quantile(times, 0.999):.0f}, worst {max(times):.0f} us",
        file=sys.stderr,
    )
    value = quantile(times, 0.99)
    report.add(
        f"p99.64_pages.beside_{kind}",
        value,
        "us",
        NEIGHBOUR_LIMIT_US,
        value / NEIGHBOUR_LIMIT_US,
        0.0,
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000, help="pages indexed (1000000)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a case (15)")
    parser.add_argument("--pairs", type=int, default=60, help="lookups of a round (60)")
    parser.add_argument(
        "--tail", type=int, default=1500, help="lookups of a round under copies (1500)"
    )
    parser.add_argument(
        "--copy-threads", type=int, default=4, help="threads that copy meanwhile (4)"
    )
    parser.add_argument(
        "--beside", type=float, default=5.0, help="seconds beside a client that floods (5)"
    )
    parser.add_argument("--only-beside", action="store_true", help="nothing but that")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.flood:
        flood(json.loads(args.server), args.flood)
        return 0
    rng = random.Random(args.seed)
    report = Report("lookup")
    if not args.only_beside:
        against_an_echo(args, report, rng)
    for pages_per_chunk in (16, 1):
        with serving(
            "lookup-server",
            "--pages=131072",
            "--prefix-pages=65536",
            f"--pages-per-chunk={pages_per_chunk}",
        ) as server:
            for kind in ("held", "not_held"):
                beside(report, server, f"{kind}_{pages_per_chunk}", args.beside)
    return report.finish(args.json)


def against_an_echo(args: argparse.Namespace, report: Report, rng: random.Random) -> None:
    pages = f"--pages={args.pages}"
    with (
        serving("echo", f"--reply-bytes={ANSWER_BYTES}") as short,
        serving("echo") as whole,
        serving("lookup-server", pages) as server,
    ):
        asker, echoes = Asker(server), {"echo": Echo(short), "echo_whole": Echo(whole)}
        for size in SIZES:
            paired(report, asker, echoes, size, args.rounds, args.pairs, rng)
        asker.close()
        for echo in echoes.values():
            echo.close()
    with serving("lookup-server", pages, f"--copy-threads={args.copy_threads}") as server:
        asker = Asker(server)
        for size in SIZES:
            tail(report, asker, size, args.rounds, args.tail, rng)
        asker.close()


if __name__ == "__main__":
    raise SystemExit(main())
