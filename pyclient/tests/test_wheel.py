"""The wheel that scripts/wheel.sh has built for this machine: what is in it, and that it runs where
nothing else is installed.

``make test-py`` builds it first. The end-to-end proof, with a real vLLM, is e2e/test_11_wheel.py.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[2]
ARCH = platform.machine()
BUILT = sorted((ROOT / ".cache" / "wheel" / ARCH / "dist").glob("*.whl"))

pytestmark = pytest.mark.skipif(
    not BUILT, reason=f"scripts/wheel.sh {ARCH} has not built the wheel"
)


@pytest.fixture(scope="module")
def wheel() -> Path:
    (wheel,) = BUILT
    return wheel


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the wheel and what pip installs with it, and nothing of this one but the
    packages that the wheel asks for."""
    directory = tmp_path_factory.mktemp("venv") / "v"
    uv = ROOT / ".cache" / "tools" / "bin" / "uv"
    subprocess.run([uv, "venv", "-q", "-p", sys.executable, directory], check=True)
    subprocess.run(
        [uv, "pip", "install", "-q", "-p", directory / "bin" / "python", wheel], check=True
    )
    return directory


def run(venv: Path, *command: str, **more: Any) -> str:
    """Runs a command of the venv. Nothing else is on PATH."""
    return subprocess.run(
        [shutil.which(command[0], path=str(venv / "bin")) or command[0], *command[1:]],
        env={"PATH": str(venv / "bin")},
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        timeout=60,
        **more,
    ).stdout


def test_its_tags_are_what_auditwheel_finds(wheel: Path) -> None:
    assert wheel.name.endswith(f"-cp311-abi3-manylinux_2_28_{ARCH}.whl")
    told = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", wheel],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "1000"},
    ).stdout
    told = " ".join(told.split())
    constrained = re.search(rf'"manylinux_2_(\d+)_{ARCH}"', told)
    assert constrained and int(constrained.group(1)) <= 28, told
    libraries = set(re.findall(r"\blib[\w-]+\.so\.\d+", told))
    assert libraries <= {"libc.so.6", "libdl.so.2", "libpthread.so.0"}, told


def test_the_sidecar_needs_no_library(unpacked: Path) -> None:
    (sidecar,) = unpacked.glob("*.data/scripts/lookaside")
    with sidecar.open("rb") as file:
        elf = ELFFile(file)
        assert elf["e_machine"] == {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}[ARCH]
        assert not elf.get_section_by_name(".dynamic")
        assert not [each for each in elf.iter_segments() if each["p_type"] == "PT_INTERP"]


def test_it_holds_no_path_of_the_machine_that_built_it(unpacked: Path) -> None:
    for path in unpacked.rglob("*"):
        if path.is_file():
            assert str(ROOT).encode() not in path.read_bytes(), path


def test_the_bill_of_materials_names_every_part_with_its_licence(unpacked: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    (path,) = unpacked.glob("*.dist-info/sboms/*.cdx.json")
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(path.read_text())
    assert error is None, str(error)[:2000]
    parts = {part["name"]: part for part in json.loads(path.read_text())["components"]}
    for name in ("libzmq", "musl", "libcxx", "std", "uplot", "github.com/spf13/cobra"):
        (licence,) = parts[name]["licenses"]
        assert len(licence["license"]["text"]["content"]) > 500, name
    assert all(part["licenses"] for part in parts.values())
    # What `go version -m` finds in the binary is what is listed.
    (sidecar,) = unpacked.glob("*.data/scripts/lookaside")
    go = shutil.which("go", path=f"{ROOT / '.cache/tools/bin'}:{os.environ['PATH']}")
    assert go is not None
    told = subprocess.run([go, "version", "-m", sidecar], text=True, stdout=subprocess.PIPE)
    modules = {line.split()[1] for line in told.stdout.splitlines() if "\tdep\t" in line}
    assert len(modules) > 30 and modules <= parts.keys()


def test_it_runs_where_nothing_else_is(venv: Path) -> None:
    version = run(venv, "lookaside", "version")
    assert re.fullmatch(r"lookaside \S+ \(commit \S+\) go\S+ libzmq 4\.3\.\d linux/\w+\n", version)
    page = (venv / "share" / "man" / "man1" / "lookaside-serve.1").read_text()
    assert "arena" in page
    told = run(
        venv,
        "python",
        "-c",
        "import lookaside._native, lookaside.session, importlib.metadata as m; "
        "print(lookaside._native.__file__, "
        "[e.value for e in m.entry_points(group='vllm.general_plugins')])",
    )
    assert str(venv) in told and "_native.abi3.so" in told and "lookaside.plugin:register" in told


class Serving:
    """A sidecar of the wheel."""

    def __init__(self, venv: Path, directory: Path) -> None:
        self.directory = directory / "rank-0"
        self.process = subprocess.Popen(
            [venv / "bin" / "lookaside", "serve", f"--runtime-dir={self.directory}",
             "--arena-limit=64M"],
            env={"PATH": str(venv / "bin")},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        address = self.directory / "admin.addr"
        while not address.exists():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        self.base = f"http://{address.read_text().strip()}"

    def floods(self) -> int:
        return httpx.get(f"{self.base}/v1/status", trust_env=False).json()["lookups"]["floods"]

    def own_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+) kB", status)
        assert found
        return int(found.group(1)) << 10


@pytest.fixture
def serving(venv: Path, tmp_path: Path) -> Iterator[Serving]:
    tmp_path.chmod(0o700)
    serving = Serving(venv, tmp_path)
    yield serving
    serving.process.terminate()
    assert serving.process.wait(60) == 0


def test_the_guard_sees_a_message_that_never_ends(serving: Serving) -> None:
    """musl does not say how much memory libzmq has allocated: packaging/libzmq/heap.cpp counts.

    ZMTP is spoken here byte by byte, as a libzmq of this end would send whole messages only.
    """
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(serving.directory / "lookup.sock"))
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + (4).to_bytes(4, "big") + b"PUSH"
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        megabyte = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # more will follow
        sent, deadline = 0, time.monotonic() + 120
        try:
            while True:
                peer.sendall(megabyte)
                sent += 1
                assert sent < 1024 and time.monotonic() < deadline, "nobody ends it"
                assert serving.own_bytes() < 1 << 30, f"{sent} MiB sent"
        except (BrokenPipeError, ConnectionResetError):
            pass
        while not serving.floods():
            assert time.monotonic() < deadline, f"{sent} MiB sent"
            time.sleep(0.01)
    assert sent >= 128
