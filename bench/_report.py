"""What a bench's JSON has in common: its name, its cases, and the machine and commit that they were measured on.

Every bench writes {"benchmark", "cases": [{"name", "value", "unit", "limit", ...}]}, each figure beside its limit of
the same run. `bench/run` then adds the machine, by running this file on what was written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

REPO = Path(__file__).resolve().parents[1]


class Report:
    """The figures of one run. Not for use from several threads."""

    def __init__(self, bench: str, text: str) -> None:
        self.bench = bench
        self.text = text
        self.cases: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        limit: float | None = None,
        better: Literal["less", "more"] = "less",
        limit_is: str = "",
    ) -> None:
        """One figure. ``limit`` is what it may not pass, in its unit; ``limit_is`` says where that comes from."""
        case: dict[str, Any] = {"name": name, "value": value, "unit": unit}
        if limit is not None:
            held = value <= limit if better == "less" else value >= limit
            case.update(limit=limit, better=better, limit_is=limit_is, held=held)
        self.cases.append(case)

    def finish(self, path: str | Path | None = None) -> int:
        """Prints the table, writes the JSON where asked. Returns 0: a missed limit is for the reader to judge."""
        print(f"{self.bench}: {self.text}")
        width = max((len(r["name"]) for r in self.cases), default=0)
        for r in self.cases:
            line = f"  {r['name']:<{width}}  {r['value']:>12.4g} {r['unit']:<6}"
            if "limit" in r:
                sign = "<=" if r["better"] == "less" else ">="
                verdict = "held" if r["held"] else "MISSED"
                line += f"  {sign} {r['limit']:.4g} {r['unit']} ({r['limit_is']}): {verdict}"
            print(line)
        if path:
            Path(path).write_text(json.dumps({"benchmark": self.bench, "cases": self.cases}, indent=2) + "\n")
        return 0


def stamp(name: str, path: Path) -> None:
    """Adds machine, commit and time to a bench's JSON in a file."""
    report = json.loads(path.read_text())
    if not isinstance(report, dict) or "benchmark" not in report:
        report = {"benchmark": name, "result": report}  # what `lookaside bench` prints
    report["machine"] = machine()
    report["commit"] = _output("git", "-C", str(REPO), "describe", "--always", "--dirty")
    report["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    path.write_text(json.dumps(report, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """What of this machine decides the figures."""
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split(":", 1)[1].split() for line in info.splitlines() if line.startswith("flags")), [])
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in flags,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "shmem_thp": _selected("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "free_huge_pages": _read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"),
    }


def arguments(text: str) -> argparse.ArgumentParser:
    """A parser with the options that every bench has."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--json", help="also write the figures to this file")
    return parser


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
    stamp(sys.argv[1], Path(sys.argv[2]))
