"""What the examples' commands have in common: flags, tables that grow, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from .processes import LOGS, stop_on_signals
from .progress import say

Row = TypeVar("Row")


def flags(
    example: str, description: str, rounds: str = "", default: int = 0
) -> argparse.ArgumentParser:
    """The flags that all have; ``rounds``: what --rounds counts, where there is such a flag."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{example}", description=description)
    parser.add_argument("--json", type=Path, help="also write the table to this file as JSON")
    if rounds:
        parser.add_argument(
            "--rounds",
            type=int,
            default=default,
            help=f"{rounds}; times are medians (default {default})",
        )
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default 1)")
    parser.add_argument(
        "--keep-logs", type=Path, help="copy the logs of all processes to this directory"
    )
    return parser


class Table(Generic[Row]):
    """A table on standard output. Each row is printed as soon as it is known, the head before the
    first."""

    def __init__(self, head: str, line: Callable[[Row], str], title: str = "") -> None:
        self.rows: list[Row] = []
        self._head = ([title] if title else []) + [head, "-" * len(head)]
        self._line = line

    def add(self, row: Row) -> None:
        if not self.rows:
            print("\n".join(self._head), flush=True)
        print(self._line(row), flush=True)
        self.rows.append(row)


class Columns(Generic[Row]):
    """How rows of one kind look in a table: for each column its name, its width, and what it shows
    of a row. All is aligned to the right.

    ``equal`` adds a last column, which shows whether the outputs of a row are the same.
    """

    def __init__(
        self,
        *columns: tuple[str, int, Callable[[Row], object]],
        equal: Callable[[Row], bool] | None = None,
    ) -> None:
        self.head = " ".join(f"{name:>{width}}" for name, width, _ in columns)
        if equal is not None:
            self.head += "  outputs"
        self._columns = columns
        self._equal = equal

    def line(self, row: Row) -> str:
        """A row as text."""
        text = " ".join(f"{shown(row)!s:>{width}}" for _, width, shown in self._columns)
        if self._equal is not None:
            text += "  equal" if self._equal(row) else "  DIFFER"
        return text

    def table(self, title: str = "") -> Table[Row]:
        """An empty table of such rows."""
        return Table(self.head, self.line, title)


def seconds(value: float) -> str:
    """A time as a table shows it."""
    return f"{value:.3f} s"


def faster(slow_s: float, fast_s: float) -> str:
    """How many times as fast the second is, as a table shows it."""
    return f"{slow_s / fast_s if fast_s else 0.0:.1f}x"


@contextlib.contextmanager
def ended(name: str) -> Iterator[None]:
    """Exits with 130 if what runs within it was told to stop, and with 1 and a line, which begins
    with the name, if it has failed."""
    stop_on_signals()
    try:
        yield
    except KeyboardInterrupt:
        say("stopped; everything that was started is ended")
        sys.exit(130)
    except (RuntimeError, TimeoutError) as error:
        say(f"{name}: {error}")
        sys.exit(1)
    except Exception as error:
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{name}.log"
        log.write_text(traceback.format_exc())
        say(f"{name}: {type(error).__name__}: {error}; its log is {log}")
        sys.exit(1)


def show(
    run: Callable[[], None], keep: Path | None, result: Callable[[], dict[str, object]]
) -> None:
    """Runs, and writes the result to the file of --json, if there is one: what there is of it if
    run fails. Exits as ``ended`` does."""
    try:
        with ended("demo"):
            run()
    finally:
        if keep is not None:
            keep.write_text(json.dumps(result(), indent=2) + "\n")
