"""The copy check of `lookaside doctor --gpu`: on the stand-in for the driver, and as it is where
there is no GPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_stand_in import main as on_stand_in
from lookaside import gpucheck
from test_cuda import compile_fake, real_device

HERE = Path(__file__).parent
BINARY = HERE.parents[1] / "bin" / "lookaside"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_fake(tmp_path_factory.mktemp("cuda"))


def found(capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capfd.readouterr().out)


def doctor(python: Path, *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and what it says of copies."""
    done = subprocess.run(
        [BINARY, "doctor", "--gpu", "--json", f"--python={python}", "--gpu-timeout=5m", *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    report = json.loads(done.stdout)
    return done.returncode, [f for f in report["findings"] if f["id"].startswith("gpu-")]


def as_python(directory: Path, library: Path, harm: str) -> Path:
    """A program that runs the check on the stand-in, whatever module is asked for."""
    program = directory / "python"
    words = shlex.join([sys.executable, str(HERE / "gpu_stand_in.py"), str(library), harm])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    return program


def test_all_bytes_are_right(library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_stand_in(str(library), "none", ["--json", "--pages=4"]) == 0
    result = found(capfd)
    assert result["wrong"] == [] and result["error"] == "" and result["missing"] == ""
    assert result["device"] == "stand-in" and result["bytes"] == 4 * gpucheck.PAGE_BYTES
    for direction in ("store", "load"):
        assert result[direction]["ours"] > 0 and result[direction]["bare"] > 0
    assert on_stand_in(str(library), "none", ["--pages=1"]) == 0
    assert "wrong bytes: none" in capfd.readouterr().out


def test_wrong_bytes_are_found(library: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert on_stand_in(str(library), "bytes", ["--json", "--pages=4"]) == 1
    assert found(capfd)["wrong"] == ["GPU to host"]


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuEventRecord", "cuMemcpyBatchAsync"])
def test_a_driver_that_fails(
    library: Path, call: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "libfake.so"
    mine.write_bytes(library.read_bytes())
    arguments = ["--json", "--pages=1"]
    assert on_stand_in(str(mine), call, arguments) == 2
    result = found(capfd)
    assert call in result["error"] and "700" in result["error"] and result["missing"] == ""


@pytest.mark.parametrize(
    ("harm", "finding", "level", "code"),
    [
        ("none", ("gpu-copies", "gpu-slow"), ("ok", "warning"), (0, 3, 4)),
        ("bytes", ("gpu-bytes",), ("error",), (4,)),
        ("cuEventRecord", ("gpu-failed",), ("error",), (4,)),
    ],
)
def test_what_doctor_says(
    library: Path,
    tmp_path: Path,
    harm: str,
    finding: tuple[str, ...],
    level: tuple[str, ...],
    code: tuple[int, ...],
) -> None:
    mine = tmp_path / "libfake.so"
    mine.write_bytes(library.read_bytes())
    status, (said,) = doctor(as_python(tmp_path, mine, harm), "--gpu-args=--pages=2")
    assert said["id"] in finding and said["level"] in level and status in code
    if harm == "none":
        assert "stand-in" in said["seen"] and "bare copy" in said["seen"]


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, (said,) = doctor(Path(sys.executable))
    assert said["id"] == "gpu-none" and said["level"] == "warning" and status in (3, 4)
    assert "sees no GPU" in said["seen"] and "--gpus all" in said["fix"]


def test_a_python_without_the_connector(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'python: No module named lookaside.gpucheck' >&2\nexit 1\n")
    program.chmod(0o700)
    status, (said,) = doctor(program)
    assert said["id"] == "gpu-none" and said["level"] == "error" and status == 4
    assert "--python" in said["fix"]


def test_on_a_real_gpu(capfd: pytest.CaptureFixture[str]) -> None:
    real_device()
    assert gpucheck.main(["--json"]) == 0, capfd.readouterr()
    result = found(capfd)
    assert result["wrong"] == []
    for direction in ("store", "load"):
        assert result[direction]["ours"] > 0.5 * result[direction]["bare"], result
