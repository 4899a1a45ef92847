"""Sidecars that share whose arenas are parts of one DAX device, which a file stands in for here;
with real workers.

A page's bytes are its name, so that every page that was loaded tells whether it is the right one.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from peer import until
from test_peers import (
    Delayed,
    Host,
    end,
    history,
    prefix,
    test_load_under_way_when_the_own_sidecar_dies_fails,
    under_way,
)
from test_sidecar import BINARY
from test_worker import PAGE, PPC

__all__ = ["test_load_under_way_when_the_own_sidecar_dies_fails", "under_way"]

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


SIZE = "8M"  # of the device


def on_one_device(
    model: Path, directory: Path, count: int, size: str = SIZE, **settings: Any
) -> Host:
    """Sidecars each of which has its part of one device."""
    return Host(
        model,
        directory,
        count,
        arena_kind="dax",
        arena_dax_devices=f"{directory}/dax0.0:{size}",
        arena_dax_ranks=str(count),
        arena_dax_rank=str,
        arena_dax_allow_files="true",
        arena_dax_slab="1M",
        lookup_deadline="20s",
        **settings,
    )


@pytest.fixture
def two(model: Path, tmp_path: Path) -> Iterator[Host]:
    host = on_one_device(model, tmp_path, 2, arena_dax_hotplug="true", peers_linger="100ms")
    yield host
    host.close()


def kept(host: Host, number: int) -> None:
    """Wait until all that a sidecar holds would be found again."""

    def all_of_it() -> bool:
        status = host.sidecars[number].status()
        arena = status["arena"]
        return arena["waiting_chunks"] == 0 and arena["kept_chunks"] == status["slots"]["ready"]

    until(all_of_it)


def unverified(host: Host, number: int) -> int:
    """How many chunks a sidecar has found on its device and not checked yet."""
    return host.sidecars[number].status()["verifications"]["unverified"]


def test_each_reads_the_part_of_the_other(two: Host, tmp_path: Path) -> None:
    names = [prefix(number, 10) for number in range(2)]  # two chunks and a half
    for number in range(2):
        two.store(number, 0, names[number])
        two.know(names[number])
    for number in range(2):
        assert two.fetch(number, names[1 - number]) == 10
    for number in range(2):
        status = two.sidecars[number].status()
        assert status["pages"] == 10, "only what it stored itself"
        (lender,) = status["peers"]["lenders"]
        (device,) = lender["devices"]
        assert device["path"] == str(tmp_path / "dax0.0") and lender["borrowed_pages"] >= 10
        assert status["peers"]["lent_pages"] >= 10
    two.nothing_is_held_back()


def test_what_the_other_holds_is_not_stored(two: Host) -> None:
    names = prefix(1, 8)
    two.store(0, 0, names)
    two.know(names)
    two.store(1, 0, names)
    status = two.sidecars[1].status()
    assert status["counters"]["elsewhere_pages"] == 8 and status["pages"] == 0


@pytest.mark.parametrize("flipped", [-1, 1, 2], ids=["whole", "spoilt", "spoilt at the end"])
def test_what_a_restarted_one_finds_is_checked_and_lent(
    two: Host, tmp_path: Path, flipped: int
) -> None:
    """What a killed one had stored is a hit for the other, who asks first: but for a chunk that is
    not what it was."""
    names = prefix(1, 10)
    two.store(0, 0, names)
    kept(two, 0)
    two.sidecars[0].kill()
    assert two.fetch(1, names, "of a dead one") == 0
    if flipped >= 0:  # the page's bytes are its name, all over
        file = tmp_path / "dax0.0"
        at = file.read_bytes().index(struct.pack("<f", names[PPC * flipped]) * (PAGE // 4))
        with file.open("r+b") as device:
            device.seek(at + 100)
            device.write(b"!")
    two.sidecars[0].start()
    two.engines[0].wait_up()
    two.found_each_other()
    assert unverified(two, 0) == 3
    until(lambda: two.sidecars[1].status()["peers"]["hint_pages"] == 10)
    want = 10 if flipped < 0 else PPC * flipped
    assert two.fetch(1, names) == want
    verification = two.sidecars[0].status()["verifications"]
    assert verification == {
        "unverified": 0,
        "verified": 3 - (flipped >= 0),
        "corrupt": int(flipped >= 0),
    }
    assert two.fetch(0, names) == want
    two.store(1, want, names[want:])  # what is missing is stored again, by anybody
    two.know(names)
    assert [two.fetch(number, names, "again") for number in range(2)] == [10, 10]
    two.nothing_is_held_back()


def test_lender_that_is_killed_in_a_load_begins_when_that_has_ended(
    two: Host, under_way: Callable[[], Delayed]
) -> None:
    """Nobody writes to its part of the device while it is read; then it finds everything there, and
    lends it again."""
    slow = under_way()
    kept(two, 0)
    two.sidecars[0].kill()
    until(lambda: two.sidecars[1].status()["peers"]["borrowing"]["pages"] == 0)
    two.sidecars[0].start(wait=False)
    lender = two.sidecars[0].process
    assert lender is not None and lender.wait(30) != 0, "it has not waited"
    assert "the last owner" in two.sidecars[0].log.read_text()
    end(two.engines[1], slow)
    assert not two.engines[1].failed and not two.engines[1].invalid
    two.right(1, prefix(2, 8))
    two.sidecars[0].start()
    two.engines[0].wait_up()
    two.found_each_other()
    two.know(prefix(2, 8))
    assert two.fetch(1, prefix(2, 8), "later") == 8


def changed(host: Host, number: int, *command: str) -> subprocess.CompletedProcess[str]:
    """`lookaside dax ...` for the arena of a sidecar."""
    where = f"--runtime-dir={host.sidecars[number].directory}"
    return subprocess.run(
        [str(BINARY), "dax", *command, "--arena", where],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_device_is_removed_when_what_is_lent_there_has_come_back(
    two: Host, under_way: Callable[[], Delayed], tmp_path: Path
) -> None:
    first, second = (str(tmp_path / f"dax{number}.0") for number in range(2))
    assert changed(two, 0, "add", second, SIZE).returncode == 0
    slow = under_way()
    busy = changed(two, 0, "remove", first, "--mode=migrate")
    assert busy.returncode != 0 and "lease" in busy.stderr, busy.stderr
    end(two.engines[1], slow)
    assert not two.engines[1].failed
    two.right(1, prefix(2, 8))
    until(lambda: changed(two, 0, "remove", first, "--mode=migrate").returncode == 0)
    (lender,) = two.sidecars[1].status()["peers"]["lenders"]
    assert [device["path"] for device in lender["devices"]] == [second]
    assert two.fetch(1, prefix(2, 8), "moved") == 8


def test_device_that_is_cut_short_under_its_lender(two: Host, tmp_path: Path) -> None:
    """What is not there any more fails where it is read, without harm to who reads it; what is left
    goes on."""
    names = [prefix(1, 8), prefix(2, 8)]
    two.store(0, 0, names[0])
    two.store(1, 0, names[1])
    two.know(names[0])
    two.know(names[1])
    os.truncate(tmp_path / "dax0.0", 4 << 20)  # the second half is the second one's
    assert two.fetch(0, names[1]) == 0
    until(lambda: two.fetch(0, names[1]) == 0 and two.engines[0].held(0, *names[1]) == 0)
    assert two.fetch(1, names[0]) == 8
    assert two.fetch(0, names[0]) == 8


@pytest.mark.parametrize("seed", range(2))
def test_history(model: Path, tmp_path: Path, seed: int) -> None:
    """Stores, loads, kills, stalls and restarts of three sidecars on one small device: no page is
    ever another's."""
    host = on_one_device(
        model, tmp_path, 3, "3M", peers_linger="50ms", peers_skip_stores=str(seed % 2 == 0).lower()
    )
    # One that is stopped keeps what it has borrowed, and who is restarted waits for that for three
    # seconds only.
    history(host, random.Random(seed), beside_stopped=False)
