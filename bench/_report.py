"""What a bench prints: one form for all of them, and the machine and commit that it was measured
on.

A bench prints a table to stderr and, last, one JSON object to stdout: {"benchmark", "cases":
[{"name", "value", "unit", "limit", "ratio", "spread"}]}. `--json FILE` writes the same, with
machine, commit and time, to a file. `lookaside-bench` leaves these three out; run on such a file,
this one adds them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Case:
    """One figure. Without a limit, what is measured against one is None too."""

    name: str
    value: float
    unit: str
    limit: float | None
    """In the same unit, of the same run."""
    ratio: float | None
    """Value to limit."""
    spread: float | None
    """The distance between the quartiles of the rounds' own ratios."""


class Report:
    """The figures of one run. Not for use from several threads."""

    def __init__(self, benchmark: str) -> None:
        self.benchmark = benchmark
        self.cases: list[Case] = []

    def rounds(
        self,
        name: str,
        unit: str,
        values: Sequence[float],
        limits: Sequence[float] | float | None = None,
    ) -> None:
        """The median of a figure's rounds, beside that of their limits: one a round, or one for
        all.

        The spread is that of the rounds' own ratios: what slows a whole round down slows both of
        its sides. Raises ValueError where values and limits are not of the same rounds,
        StatisticsError where there are no rounds.
        """
        value = statistics.median(values)
        if limits is None:
            self.add(name, value, unit)
            return
        if isinstance(limits, (int, float)):
            limits = [limits] * len(values)
        ratios = [each / its_limit for each, its_limit in zip(values, limits, strict=True)]
        limit = statistics.median(limits)
        self.add(name, value, unit, limit, value / limit, spread(ratios))

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        limit: float | None = None,
        ratio: float | None = None,
        spread: float | None = None,
    ) -> None:
        """A figure that is no median of rounds. Raises ValueError unless it has limit, ratio and
        spread, or none."""
        if len({part is None for part in (limit, ratio, spread)}) > 1:
            raise ValueError(f"{name}: limit {limit}, ratio {ratio}, spread {spread}")
        against = (None if part is None else _short(part) for part in (limit, ratio, spread))
        self.cases.append(Case(name, _short(value), unit, *against))

    def finish(self, path: str | Path | None = None) -> int:
        """Prints the table and the JSON, and writes that to a file where asked. Returns 0: it
        judges no figure."""
        width = max((len(case.name) for case in self.cases), default=0)
        print(
            f"{'':<{width}}  {'value':>12} {'':<8}{'limit':>12}{'ratio':>9}{'spread':>9}",
            file=sys.stderr,
        )
        for case in self.cases:
            line = f"{case.name:<{width}}  {case.value:>12.5g} {case.unit:<8}"
            if case.limit is not None:
                line += f"{case.limit:>12.5g}{case.ratio:>9.3f}{case.spread:>9.3f}"
            print(line.rstrip(), file=sys.stderr)
        sys.stderr.flush()
        report: dict[str, Any] = {
            "benchmark": self.benchmark,
            "cases": [asdict(case) for case in self.cases],
        }
        print(json.dumps(report), flush=True)
        if path:
            _write(Path(path), report)
        return 0


def spread(values: Sequence[float]) -> float:
    """The distance between the quartiles; of a single value it is 0."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def machine() -> dict[str, Any]:
    """What of this machine decides the figures."""
    info = Path("/proc/cpuinfo").read_text()
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in info.splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    flags = next(
        (line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")),
        [],
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in flags,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "shmem_thp": _selected("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "free_huge_pages": _read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
    }


def arguments(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every bench has."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", help="also write the figures to this file, with machine, commit and time"
    )
    return parser


def _write(path: Path, report: dict[str, Any]) -> None:
    """Writes a bench's JSON with where and when it was measured."""
    stamp = {
        "machine": machine(),
        "commit": _output("git", "-C", str(REPO), "describe", "--always", "--dirty"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    path.write_text(json.dumps(report | stamp, indent=2) + "\n")


def _short(value: float) -> float:
    """Five digits: no bench is more exact than that."""
    return float(f"{value:.5g}")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _selected(path: str) -> str:
    text = _read(path)
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else text


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{command[0]}: {error}", file=sys.stderr)
        return ""


if __name__ == "__main__":
    _write(Path(sys.argv[-1]), json.loads(Path(sys.argv[-1]).read_text()))
