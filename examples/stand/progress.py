"""What a demo says while it runs, on standard error: a line for each step, with its time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """A line: what is being done, and, once that has ended, how long it took."""
    print(text, end=" ... ", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say(f"not done, after {time.monotonic() - started:.0f} s")
        raise
    say(f"{time.monotonic() - started:.0f} s")
