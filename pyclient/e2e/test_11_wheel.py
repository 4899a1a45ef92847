"""From the wheel to the first hit, as somebody does it who has vLLM and nothing of this repository.

A Python of its own sees vLLM and the wheel. PATH holds its commands alone. The sidecar, the doctor
and vLLM run as they are named in README, with their defaults: vLLM finds the connector by the
package's entry point, and both find the same directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from examples.stand import client, model
from examples.stand.processes import REPO, Process, eventually, free_port

WHEELS = REPO / ".cache" / "wheel" / platform.machine() / "dist"
TRANSFER = '{"kv_connector":"LookasideConnector","kv_role":"kv_both"}'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing that Python or a test run has set, but what vLLM's CPU build needs."""
    (wheel,) = WHEELS.glob("*.whl")
    venv = tmp_path / "venv"
    uv = REPO / ".cache" / "tools" / "bin" / "uv"
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, venv], check=True)
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    # 6 GB of packages are found where they are. The path files among them are not read.
    (packages / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [uv, "pip", "install", "-q", "-p", venv / "bin" / "python", "--no-deps", wheel], check=True
    )
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    return {
        "PATH": str(venv / "bin"),
        "HOME": os.environ.get("HOME", "/"),
        "XDG_RUNTIME_DIR": str(runtime),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_SERVER_DEV_MODE": "1",  # has /reset_prefix_cache
    }


class Started(Process):
    """A program that has the given environment and no more."""

    def __init__(self, log: Path, env: dict[str, str], *command: str) -> None:
        # env -i, as Process adds to the environment of the tests.
        words = ["/usr/bin/env", "-i", *(f"{k}={v}" for k, v in env.items())]
        super().__init__(command[0], [*words, *command], log)


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in reversed(started):
        process.end()


def test_from_the_wheel_to_the_first_hit(
    environment: dict[str, str], processes: list[Process], tmp_path: Path
) -> None:
    def lookaside(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(environment["PATH"]) / "lookaside", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    sidecar = Started(
        tmp_path / "sidecar.log", environment, "lookaside", "serve", "--arena-limit", "1G"
    )
    processes.append(sidecar)
    eventually(lambda: lookaside("ready").returncode == 0 or not sidecar.alive(), "the sidecar")
    assert sidecar.alive(), sidecar.tail()

    # vLLM's CPU build asks lscpu for the processors.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "lscpu").symlink_to(shutil.which("lscpu") or "/missing")
    with_tools = {**environment, "PATH": f"{environment['PATH']}:{tools}"}
    python = str(Path(environment["PATH"]) / "python")
    port = free_port()
    # `vllm serve` asks for the version of a package vllm, which the CPU build is not called.
    vllm = Started(
        tmp_path / "vllm.log", with_tools, python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model.ensure("thin")), "--served-model-name", "small", "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048",
        "--enable-prompt-tokens-details", "--prefix-caching-hash-algo", "sha256_cbor",
        "--kv-transfer-config", TRANSFER,
    )  # fmt: skip
    processes.append(vllm)
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=10.0, trust_env=False).status_code == 200
        return not vllm.alive()

    eventually(healthy, "vLLM", timeout_s=600)
    assert vllm.alive(), vllm.tail(60)

    prompt = model.prompt(1000, seed=20)
    first = client.complete(url, prompt)
    assert first.cached_tokens == 0
    client.reset_prefix_cache(url)
    again = client.complete(url, prompt)
    assert again.tokens == first.tokens
    if again.cached_tokens == 0:  # a lookup came before the store was done, or took too long
        client.reset_prefix_cache(url)
        again = client.complete(url, prompt)
    assert 800 < again.cached_tokens < 1000

    def report() -> dict[str, dict[str, str]]:
        done = lookaside("doctor", "--json", "--timeout=60s")
        return {each["id"]: each for each in json.loads(done.stdout)["findings"]}

    eventually(lambda: "use-ok" in report(), "that the sidecar is known to help")
    found = report()
    assert found["engine-ok"]["level"] == "ok" and found["sidecar-ok"]["level"] == "ok"
    assert "failure_policy recompute" in found["engine-ok"]["seen"]
    errors = [each for each in found.values() if each["level"] == "error"]
    assert not errors, errors
