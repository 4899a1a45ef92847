"""A tier in a process of its own that keeps values in memory, up to a capacity.

It is the smallest useful program on lookaside.tier, and the one that the tests and the bench use:

    lookaside serve --program 'python3 examples/tier_program/memory_store.py --capacity 4G'
"""

from __future__ import annotations

import argparse
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from lookaside.tier import Call, Item, Stats, Status, Tier, run

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


LARGE = 256 << 10


def room(size: int) -> bytearray | mmap.mmap:
    """Return memory for a value.

    The pages of a mapping are made while the value is copied, which does not hold the GIL; those of
    a bytearray are made, and set to zero, before.
    """
    if size < LARGE:
        return bytearray(size)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class MemoryStore(Tier):
    """Values in memory; the least recently used are dropped for room."""

    name = "memory store"

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()  # guards what follows
        self._values: OrderedDict[bytes, bytearray | mmap.mmap] = OrderedDict()
        self._used = 0
        self._evictions = 0

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._values for key in keys]

    def put(self, items: Sequence[Item], call: Call) -> Iterator[Status]:
        for item in items:
            if item.size > self._capacity:
                yield Status.NO_ROOM
                continue
            # A value is not changed once it is in the table, so gets copy without the lock.
            value = room(item.size)
            item.copy_out(value)
            with self._lock:
                self._remove(item.key)
                self._values[item.key] = value
                self._used += len(value)
                while self._used > self._capacity:
                    self._remove(next(iter(self._values)))
                    self._evictions += 1
            yield Status.OK

    def get(self, items: Sequence[Item], call: Call) -> Iterator[Status]:
        for item in items:
            with self._lock:
                value = self._values.get(item.key)
                if value is not None:
                    self._values.move_to_end(item.key)
            yield Status.MISSING if value is None else item.fill(value)

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def clear(self, prefix: bytes) -> int:
        with self._lock:
            gone = [key for key in self._values if key.startswith(prefix)]
            for key in gone:
                self._remove(key)
            return len(gone)

    def stats(self) -> Stats:
        with self._lock:
            return Stats(self._capacity, self._used, len(self._values), self._evictions)

    def _remove(self, key: bytes) -> None:
        """Remove a value. The caller holds _lock."""
        self._used -= len(self._values.pop(key, b""))


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--capacity", default="1G")
    options, rest = parser.parse_known_args()
    text = options.capacity
    capacity = int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)
    run(MemoryStore(capacity), rest)


if __name__ == "__main__":
    main()
