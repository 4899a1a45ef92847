"""The shipped programs below a real sidecar: values leave its arena, and come back by them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_mooncake
import test_nixl
from lookaside import Client
from peer import until
from test_client import PATIENCE_S, SIZE, Sidecar, content, key, status
from test_mooncake import Master

VALUES = 250
"""About twice what the arena of 8 MiB holds."""


class Below:
    """A sidecar with a program below it."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        config = directory / "sidecar.yaml"
        words = shlex.join(command)
        config.write_text(f"tiers:\n  - kind: program\n    command: {words!r}\n\n")
        self.sidecar = Sidecar(directory / "rank-0", f"--config={config}")

    def serving(self) -> bool:
        """Whether the program serves, and says what it has: not so before it has started."""
        tier = self.tier()
        return tier["state"] == "closed" and tier["capacity_bytes"] > 0

    def tier(self) -> dict[str, Any]:
        (tier,) = status(self.sidecar)["tiers"]
        return tier

    def fill(self, client: Client) -> None:
        """Store all values, never faster than the tier takes them."""
        space = client.space("values", SIZE)
        for begin in range(0, VALUES, 50):
            numbers = range(begin, begin + 50)
            space.put_many((key(n), content(n)) for n in numbers)
            until(lambda least=begin + 50: self.tier()["stored_chunks"] >= least, PATIENCE_S)

    @staticmethod
    def held(client: Client) -> int:
        """Look at all values, one by one; return how many are there, none of them wrong."""
        space = client.space("values", SIZE)
        found = [space.get(key(n)) for n in range(VALUES)]
        assert all(data is None or data == content(n) for n, data in enumerate(found))
        return sum(data is not None for data in found)


@test_nixl.real
def test_values_come_up_from_files_and_spoilt_ones_do_not(tmp_path: Path) -> None:
    below = Below(tmp_path, test_nixl.command(tmp_path / "kv"))
    try:
        with Client(below.sidecar.directory, timeout_s=PATIENCE_S) as client:
            until(below.serving, PATIENCE_S)
            below.fill(client)
            assert below.held(client) > 0.8 * VALUES
            assert below.tier()["loaded_chunks"] > 50
            for number, path in enumerate(sorted((tmp_path / "kv").rglob("*.kv"))):
                size = path.stat().st_size
                if number % 3 == 0:  # some bytes of its value
                    with path.open("r+b") as file:
                        file.seek(size - 100)
                        file.write(os.urandom(50))
                elif number % 3 == 1:
                    os.truncate(path, size // 2)
            assert 0 < below.held(client) < VALUES
    finally:
        below.sidecar.stop()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    it = Master(tmp_path / "master.log")
    yield it
    it.kill()


@test_mooncake.real
def test_values_come_up_from_mooncake_on_another_sidecar(tmp_path: Path, master: Master) -> None:
    command = [sys.executable, "-m", "lookaside.tiers.mooncake", *master.flags, "--segment=64M"]
    made: list[Below] = []
    try:
        for name in ("one", "other"):
            directory = tmp_path / name
            directory.mkdir()
            made.append(Below(directory, command))
            made[-1].sidecar.arguments += ("--peers-enabled=false",)
        one, other = made
        for below in made:
            until(below.serving, PATIENCE_S)
        with Client(one.sidecar.directory, timeout_s=PATIENCE_S) as client:
            one.fill(client)
        with Client(other.sidecar.directory, timeout_s=PATIENCE_S) as client:
            assert other.held(client) > 0.8 * VALUES
            assert other.tier()["loaded_chunks"] > 100
            master.kill()
            until(lambda: other.tier()["state"] != "closed", PATIENCE_S)
            other.held(client)
    finally:
        for below in made:
            below.sidecar.stop()
