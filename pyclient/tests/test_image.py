"""The sidecar's image, built by scripts/image.sh and run in a chroot, which works in containers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "bin" / "lookaside"
PROGRAM = "/usr/local/bin/lookaside"
USER = 1000

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root has an image's users here"),
    pytest.mark.skipif(not shutil.which("buildah"), reason="there is no buildah"),
    pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built"),
]


class Images:
    """buildah with a storage of its own."""

    def __init__(self, directory: Path) -> None:
        configuration = directory / "storage.conf"
        configuration.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{directory}/images"\n'
            f'runroot = "{directory}/run"\n'
        )
        self.environ = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(configuration),
            "BUILDAH_ISOLATION": "chroot",
            "BUILDER": "buildah",
        }

    def buildah(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            ["buildah", *arguments], env=self.environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"buildah {arguments}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def start(self, container: str, volume: Path, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["buildah", "run", "-v", f"{volume}:/run/lookaside", container, "--", *command],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("storage"))


@pytest.fixture(scope="module")
def image(images: Images) -> str:
    done = subprocess.run(
        [ROOT / "scripts" / "image.sh"],
        env={**images.environ, "IMAGE": "localhost/tried"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    version = subprocess.run(
        [BINARY, "version"], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    return f"localhost/tried:{version}"


@pytest.fixture
def container(images: Images, image: str) -> Iterator[str]:
    name = images.buildah("from", image)
    yield name
    images.buildah("rm", name)


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory of the image's user, which can reach it."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        directory = Path(parent) / "v"
        directory.mkdir(mode=0o700)
        os.chown(directory, USER, USER)
        yield directory


def test_what_the_image_says(images: Images, image: str) -> None:
    described: dict[str, Any] = json.loads(images.buildah("inspect", "--type", "image", image))
    config = described["Docker"]["config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == [PROGRAM]
    assert config["Cmd"] == ["serve"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"] == ["CMD", PROGRAM, "ready"]
    assert list(config["Volumes"]) == ["/run/lookaside"]
    labels = {
        name.removeprefix("org.opencontainers.image."): text
        for name, text in config["Labels"].items()
    }
    assert labels["title"] == "Lookaside"
    assert labels["licenses"] == "Apache-2.0"
    assert image.endswith(":" + labels["version"])
    assert labels["revision"]
    assert labels["created"].endswith("Z")


def test_the_image_has_the_binary_and_nothing_else(images: Images, container: str) -> None:
    root = Path(images.buildah("mount", container))
    files = {str(path.relative_to(root)): path for path in root.rglob("*") if not path.is_dir()}
    assert list(files) == ["usr/local/bin/lookaside"]
    program = files["usr/local/bin/lookaside"]
    assert not program.stat().st_mode & (stat.S_ISUID | stat.S_ISGID | 0o022)
    with program.open("rb") as opened:
        binary = ELFFile(opened)
        assert not [s for s in binary.iter_segments() if s["p_type"] == "PT_INTERP"]
    sockets = (root / "run/lookaside").stat()
    assert (sockets.st_uid, sockets.st_gid) == (USER, USER)
    assert stat.S_IMODE(sockets.st_mode) == 0o700


def test_it_runs_is_healthy_and_drains(images: Images, container: str, volume: Path) -> None:
    before = images.start(container, volume, PROGRAM, "ready")
    said, _ = before.communicate(timeout=60)
    assert before.returncode == 1
    assert "no sidecar runs" in said

    serving = images.start(
        container, volume, PROGRAM, "serve", "--arena-limit=16M", "--arena-kind=memfd"
    )
    try:
        check = images.start(container, volume, PROGRAM, "ready", "--wait=1m")
        said, _ = check.communicate(timeout=90)
        assert check.returncode == 0 and said.startswith("ok"), said
        asked = subprocess.run(
            [BINARY, "status", "--json", "--runtime-dir", volume / "rank-0"],
            check=True,
            capture_output=True,
            text=True,
        )
        assert json.loads(asked.stdout)["state"] == "serving"
        (sidecar,) = [
            process
            for process in psutil.Process(serving.pid).children(recursive=True)
            if process.cmdline()[:2] == [PROGRAM, "serve"]
        ]
        assert sidecar.uids().real == sidecar.uids().effective == USER
        sidecar.send_signal(signal.SIGTERM)
        said, _ = serving.communicate(timeout=60)
        assert serving.returncode == 0, said
    finally:
        if serving.poll() is None:
            for process in psutil.Process(serving.pid).children(recursive=True):
                process.kill()
            serving.kill()
            serving.wait()
