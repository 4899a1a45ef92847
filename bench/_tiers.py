"""A program that is a tier beside a bare loop on the engine that it uses, in alternating rounds."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from bench._program import HEADER, Pieces
from bench._report import Report

ITEMS = 4
"""Values of a call."""
DEPTH = 2
"""Calls at a time."""
SIZES = (1 << 20, 4 << 20)
REGION = 64 << 20


class Side(Protocol):
    """The program, or the bare loop. Every result is a list of statuses first, 0 for a success."""

    def put(self, *items: tuple[bytes, Pieces]) -> Any: ...
    def get(self, *items: tuple[bytes, Pieces]) -> Any: ...
    def contains(self, *keys: bytes) -> Any: ...
    def clear(self) -> Any: ...


def compare(report: Report, program: Side, bare: Side, rounds: int, round_bytes: int) -> None:
    """Add put and get in GB/s, of values of some sizes, and a lookup of 64 keys in µs."""
    sides = {"program": program, "bare": bare}
    with ThreadPoolExecutor(DEPTH) as threads:
        for size in SIZES:
            found: dict[tuple[str, str], list[float]] = {}
            calls = [
                [b"%d" % (call * ITEMS + item) for item in range(ITEMS)]
                for call in range(round_bytes // size // ITEMS)
            ]

            def do(
                method: Callable[..., Any],
                size: int = size,
                calls: Sequence[Sequence[bytes]] = calls,
            ) -> float:
                lanes = itertools.cycle(range(DEPTH))

                def one(keys: Sequence[bytes], lane: int) -> None:
                    statuses = method(*zip(keys, _pieces(lane, size), strict=True))[0]
                    if any(statuses):
                        raise SystemExit(f"bench: {statuses}")

                begun = time.perf_counter()
                list(threads.map(one, calls, lanes))
                return len(calls) * ITEMS * size / (time.perf_counter() - begun) / 1e9

            for number in range(rounds + 1):
                # The first warms up. Who is first changes with each.
                order = list(sides.items())
                for name, side in order if number % 2 else reversed(order):
                    put, get = do(side.put), do(side.get)
                    if number:
                        found.setdefault(("put", name), []).append(put)
                        found.setdefault(("get", name), []).append(get)
                    side.clear()
            for what in ("put", "get"):
                label = f"{what}.{size >> 20}M"
                report.rounds(label, "GB/s", found[what, "program"], found[what, "bare"])
    keys = [b"%d" % number for number in range(64)]
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, side in sides.items():
            times.setdefault(name, []).append(_median(side.contains, keys))
    report.rounds("contains.64", "us", times["program"], times["bare"])


def _pieces(lane: int, size: int) -> list[Pieces]:
    """A header and the pages for each value of a call, where no other call has its own."""
    half = REGION // DEPTH
    headers = lane * half
    pages = headers + ITEMS * HEADER
    return [((headers + n * HEADER, HEADER), (pages + n * size, size)) for n in range(ITEMS)]


def _median(call: Callable[..., Any], keys: Sequence[bytes]) -> float:
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        call(*keys)
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)
