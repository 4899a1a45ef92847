"""How a demo ends: its rows are kept, and an error is a line that names a log."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.stand import client, command
from examples.stand.processes import REPO, Process, Server, Stand

SETUP = REPO / "scripts" / "setup.sh"


class SilentServer(Server):
    """Takes requests and answers none."""

    def __init__(self, log: Path, port: int) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        log.write_text("what it said\n")
        Process.__init__(self, "vLLM b", ["sleep", "1000"], log)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_server_that_does_not_answer_ends_in_a_line_and_keeps_the_rows(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("examples.stand.processes.LOGS", tmp_path / "logs")
    monkeypatch.setattr("examples.stand.command.stop_on_signals", lambda: None)
    table = command.Table("number", lambda row: f"row {row}")
    printed: list[str] = []

    def run() -> None:
        with Stand(tmp_path) as stand:
            server = SilentServer(stand.directory / "vllm-b.log", port)
            stand._processes.append(server)
            table.add(1)
            printed.append(capsys.readouterr().out)  # before anything else is measured
            client.complete(server.base_url, [1], timeout_s=0.1)
            table.add(2)

    with pytest.raises(SystemExit) as ended:
        command.show(run, tmp_path / "rows.json", lambda: {"rows": table.rows})
    assert ended.value.code == 1
    assert printed == ["number\n------\nrow 1\n"]
    (line,) = capsys.readouterr().err.splitlines()
    log = tmp_path / "logs" / "vllm-b.log"
    assert line.startswith(
        "demo: vLLM b has not answered a request (ReadTimeout"
    ) and line.endswith(f"its log is {log}")
    assert log.read_text() == "what it said\n"
    assert json.loads((tmp_path / "rows.json").read_text()) == {"rows": [1]}


def test_an_unknown_part_is_refused() -> None:
    done = subprocess.run([SETUP, "demos"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "redis, mooncake or test" in done.stderr


def test_a_surprise_ends_in_a_line_that_names_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("examples.stand.command.LOGS", tmp_path / "logs")
    monkeypatch.setattr("examples.stand.command.stop_on_signals", lambda: None)

    def run() -> None:
        raise KeyError("tiers")

    with pytest.raises(SystemExit) as ended:
        command.show(run, None, dict)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    log = tmp_path / "logs" / "demo.log"
    assert line == f"demo: KeyError: 'tiers'; its log is {log}"
    assert "Traceback" in log.read_text()


def test_a_step_that_fails_keeps_its_log(tmp_path: Path) -> None:
    step = [REPO / "scripts" / "step", "build: a/b", "sh", "-c", "echo why; exit 3"]
    shown = subprocess.run(step, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 3 and shown.stderr.endswith("failed after 0 s:\nwhy\n")
    kept = subprocess.run(
        step,
        env={**os.environ, "STEP_LOGS": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    (line,) = kept.stderr.splitlines()
    log = Path(line.rsplit(" ", 1)[1])
    assert kept.returncode == 3 and line.startswith("build: a/b ... failed after 0 s; its log is ")
    assert log.parent == tmp_path / "logs" and log.read_text() == "why\n"


def test_the_demo_needs_neither_a_compiler_nor_redis_nor_the_tests_tools(tmp_path: Path) -> None:
    """In a tree of its own, whose tools note what they are asked for."""
    asked = tmp_path / "asked"
    tree, bin = tmp_path / "tree", tmp_path / "bin"
    (tree / "scripts").mkdir(parents=True)
    bin.mkdir()
    for name in ("setup.sh", "step"):
        (tree / "scripts" / name).write_bytes((REPO / "scripts" / name).read_bytes())
        (tree / "scripts" / name).chmod(0o755)
    for name in ("requirements.lock", "requirements-test.lock", "go.mod"):
        (tree / name).write_bytes((REPO / name).read_bytes())
    tools = tree / ".cache" / "tools" / "bin"
    tools.mkdir(parents=True)

    def pretend(path: Path, also: str = "") -> None:
        path.write_text(f'#!/bin/sh\necho {path.name} "$@" >>{asked}\n{also}\n')
        path.chmod(0o755)

    for path in (bin / "apt-get", bin / "sudo", tools / "go"):
        pretend(path)
    pretend(
        tools / "uv",
        also='[ "$1" != venv ] || '
        f"{{ mkdir -p .venv/bin && ln -s {sys.executable} .venv/bin/python; }}",
    )
    real = "bash sh env dirname mkdir ln cat sha256sum cut flock mktemp rm grep"
    for name in real.split():
        (bin / name).symlink_to(shutil.which(name) or "/missing")
    (bin / "python3").symlink_to(sys.executable)

    def setup(*parts: str) -> tuple[str, list[str]]:
        asked.unlink(missing_ok=True)
        done = subprocess.run(
            [tree / "scripts" / "setup.sh", *parts],
            env={"PATH": str(bin), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return asked.read_text() if asked.exists() else "", done.stderr.splitlines()

    first, lines = setup("demo")
    assert "requirements.lock" in first and "ziglang" in first
    unneeded = ("gcc", "libzmq", "redis", "versitygw", "requirements-test.lock")
    assert not any(word in first for word in unneeded)
    assert all(line.startswith("setup: ") and line.rsplit(" ", 1)[1] == "s" for line in lines), (
        lines
    )
    assert setup("demo") == ("", []), "nothing is missing any more"
    with_redis, _ = setup("demo", "redis")
    assert "redis-server" in with_redis and "versitygw" not in with_redis
    everything, _ = setup()
    tools = ("gcc", "libzmq3-dev", "redis-server", "versitygw", "requirements-test.lock")
    assert all(word in everything for word in tools)
