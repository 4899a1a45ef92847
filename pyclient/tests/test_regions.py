"""Mapping what the sidecar hands over, and letting go of it only when nobody copies."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lookaside.control import Control
from lookaside.mapping import RegionError, map_region, populate, unmap
from lookaside.regions import Hold, RegionSet
from peer import until

SIZE = 4 << 20


@pytest.fixture
def fd() -> Iterator[int]:
    each = os.memfd_create("region", os.MFD_CLOEXEC)
    os.ftruncate(each, SIZE)
    yield each
    os.close(each)


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping at address; empty if there is none."""
    here = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if "-" in line.split(" ")[0] and line[0] in "0123456789abcdef":
                low, high = (int(x, 16) for x in line.split(" ")[0].split("-"))
                here = low <= address < high
            elif here and line.startswith("VmFlags:"):
                return line.split()[1:]
    return []


def held(regions: RegionSet) -> Hold:
    hold = regions.acquire()
    assert hold is not None
    return hold


def counts_of(address: int) -> dict[str, int]:
    """What the kernel counts of the mapping that begins at address, in KiB."""
    counts: dict[str, int] = {}
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            if line.startswith(f"{address:x}-"):
                counts = {"here": 1}
            elif counts and line.endswith(" kB\n"):
                name, value, _ = line.split()
                counts[name.removesuffix(":")] = int(value)
            elif counts and line.startswith("VmFlags"):
                break
    return counts


class Ended:
    def wait(self, timeout_s: float) -> bool:
        return True


class Stuck:
    """A device that lets go of a region only when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        return self.over.wait(timeout_s)


class Device:
    """Counts what is attached; fails when told to."""

    def __init__(self) -> None:
        self.attached: dict[int, tuple[int, int]] = {}
        self.attaching: list[int] = []  # addresses
        self.for_reading: set[int] = set()
        self.fail = False
        self.on_detach: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()

    def attach(self, region_id: int, address: int, size: int, read_only: bool = False) -> None:
        self.attaching.append(address)
        if read_only:
            self.for_reading.add(region_id)
        self.gate.wait(60)
        if self.fail:
            raise RuntimeError("out of pinned memory")
        self.attached[region_id] = (address, size)

    def detach(self, region_id: int) -> Ended:
        self.on_detach()
        del self.attached[region_id]
        return Ended()


@pytest.mark.parametrize("huge", [False, True])
def test_mapping_is_the_memory_behind_the_fd(fd: int, huge: bool) -> None:
    address = map_region(fd, SIZE, huge)
    assert not huge or address % (2 << 20) == 0
    assert populate(address, SIZE)
    os.pwrite(fd, b"written", SIZE - 7)
    assert ctypes.string_at(address + SIZE - 7, 7) == b"written"
    ctypes.memmove(address, b"back", 4)
    assert os.pread(fd, 4, 0) == b"back"
    flags = flags_of(address)
    assert {"rd", "wr", "sh", "dc"} <= set(flags), "shared, and not given to children"
    unmap(address, SIZE)
    assert not flags_of(address)


def test_reservation_around_a_huge_mapping_is_given_back(fd: int) -> None:
    def total() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0])

    before = total()
    for _ in range(20):
        unmap(map_region(fd, SIZE, True), SIZE)
    assert total() <= before + SIZE // 4096


@pytest.mark.parametrize("size", [0, -4096, 4095, SIZE + 4096])
def test_sizes_that_cannot_be_right_are_refused(fd: int, size: int) -> None:
    """One beyond the object would make a later copy die of SIGBUS."""
    with pytest.raises(RegionError):
        map_region(fd, size, False)


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("page_size", [4096, 64 << 10, 2 << 20, 8 << 20])
def test_a_part_of_what_is_behind_the_fd_is_mapped(fd: int, huge: bool, page_size: int) -> None:
    os.ftruncate(fd, 12 << 20)
    address = map_region(fd, SIZE, huge, offset=8 << 20, page_size=page_size)
    assert address % max(page_size, 2 << 20 if huge else 0) == 0
    assert populate(address, SIZE, write=False)
    os.pwrite(fd, b"first", 8 << 20)
    os.pwrite(fd, b"final", (12 << 20) - 5)
    assert (
        ctypes.string_at(address, 5) == b"first"
        and ctypes.string_at(address + SIZE - 5, 5) == b"final"
    )
    unmap(address, SIZE)
    assert not flags_of(address)


@pytest.mark.parametrize(
    ("offset", "page_size"),
    [
        (-4096, 4096),
        (4096, 2 << 20),
        (4096, 4096),
        (1 << 62, 4096),
        (0, 0),
        (0, -4096),
        (0, 12288),
        (512, 512),
    ],
)
def test_offsets_that_cannot_be_right_are_refused(fd: int, offset: int, page_size: int) -> None:
    with pytest.raises(RegionError):
        map_region(fd, SIZE, False, offset=offset, page_size=page_size)


def test_a_device_tells_no_size(fd: int) -> None:
    """Its fstat says 0; /dev/zero maps as one."""
    device = os.open("/dev/zero", os.O_RDWR)
    try:
        address = map_region(device, SIZE, True, page_size=2 << 20)
    finally:
        os.close(device)
    assert address % (2 << 20) == 0
    ctypes.memmove(address + SIZE - 4, b"last", 4)
    unmap(address, SIZE)


def test_filling_the_tables_of_a_file_leaves_it_clean(tmp_path: Path) -> None:
    """Else all of it would be written back."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.write(file, bytes(SIZE))
    os.fsync(file)
    regions = RegionSet()
    regions.add(0, file, SIZE, huge=False, background=False, write=False)
    hold = held(regions)
    address = hold.locate(0, 0, SIZE, 0)
    counts = counts_of(address)
    assert counts["Rss"] == SIZE >> 10 and counts["Private_Dirty"] + counts["Shared_Dirty"] == 0
    hold.release()
    regions.close()
    os.close(file)


@pytest.mark.parametrize("huge", [False, True])
def test_a_region_for_reading_is_not_written(fd: int, huge: bool) -> None:
    """Another sidecar's comes with an fd that allows no more."""
    os.pwrite(fd, b"theirs", SIZE - 6)
    device = Device()
    regions = RegionSet(device)
    only_reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    with pytest.raises(RegionError):
        regions.add(0, only_reading, SIZE, huge=huge, background=False)
    regions.add(0, only_reading, SIZE, huge=huge, background=False, read_only=True)
    os.close(only_reading)
    hold = held(regions)
    address = hold.locate(0, 0, SIZE, 0)
    assert ctypes.string_at(address + SIZE - 6, 6) == b"theirs"
    flags = set(flags_of(address))
    assert {"rd", "dc"} <= flags and not {"wr", "mw"} & flags, "nor can it be made writable"
    os.pwrite(fd, b"later", 0)
    assert ctypes.string_at(address, 5) == b"later", "the very memory"
    assert len(device.for_reading) == 1
    with pytest.raises(RegionError, match="reading"):
        hold.locate(0, 0, 1, 0, write=True)
    hold.release()
    regions.close()
    assert not flags_of(address)


def test_locate_stays_inside(fd: int) -> None:
    regions = RegionSet()
    regions.add(7, fd, SIZE, huge=False, background=False)
    hold = held(regions)
    base = hold.locate(7, 0, SIZE, 0)
    assert hold.locate(7, SIZE - 1, 1, 0) == base + SIZE - 1
    for offset, size in [(-1, 1), (0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), (0, -1)]:
        with pytest.raises(RegionError):
            hold.locate(7, offset, size, 0)
    with pytest.raises(RegionError, match="not mapped"):
        hold.locate(8, 0, 1, 0)
    with pytest.raises(RegionError, match="twice"):
        regions.add(7, fd, SIZE, huge=False, background=False)
    regions.close()
    hold.release()


def test_closed_set_keeps_its_mappings_until_the_last_hold(fd: int) -> None:
    device = Device()
    regions = RegionSet(device)
    regions.add(0, fd, SIZE, huge=False, background=False)
    assert len(device.attached) == 1
    first, second = held(regions), held(regions)
    address = first.locate(0, 0, 1, 0)
    regions.close()
    assert regions.acquire() is None
    assert not regions.wait_unmapped(0)
    first.release()
    assert flags_of(address), "a hold that has located nothing yet may"
    assert second.locate(0, 0, 1, 0) == address
    ctypes.memmove(address, b"still here", 10)
    assert len(device.attached) == 1
    second.release()
    assert regions.wait_unmapped(0)
    assert not flags_of(address) and not device.attached
    regions.close()
    with pytest.raises(RegionError):
        regions.add(1, fd, SIZE, huge=False, background=False)


@pytest.mark.parametrize("how", ["at once", "late", "never"])
def test_unmapped_is_told_when_nothing_touches_the_memory(
    fd: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lookaside.regions._DETACH_PATIENCE_S", 0.05)
    device, stuck, told = Device(), Stuck(), threading.Event()
    if how == "late":
        monkeypatch.setattr(device, "detach", lambda region_id: stuck)
    elif how == "never":
        monkeypatch.setattr(device, "detach", lambda region_id: 1 / 0)
    regions = RegionSet(device, told.set)
    regions.add(0, fd, SIZE, huge=False, background=False)
    hold = held(regions)
    address = hold.locate(0, 0, 1, 0)
    regions.close()
    assert not told.is_set(), "it is held"
    hold.release()
    if how != "at once":
        assert not told.wait(0.2) and not regions.wait_unmapped(0)
        assert flags_of(address), "unmapped under a device"
    if how == "never":
        unmap(address, SIZE)
        return
    stuck.over.set()
    assert told.wait(30) and regions.wait_unmapped(0)
    assert not flags_of(address)


def test_region_in_the_background_is_not_ready_before_it_is_attached(fd: int) -> None:
    device = Device()
    device.gate.clear()
    regions = RegionSet(device)
    regions.add(0, fd, SIZE, huge=False, background=True)
    hold = held(regions)
    with pytest.raises(RegionError, match="not ready"):
        hold.locate(0, 0, 1, 0.01)
    hold.release()
    regions.close()
    assert not regions.wait_unmapped(0.01), "unmapped under the thread that attaches it"
    device.gate.set()
    assert regions.wait_unmapped(30)
    assert not device.attached


@pytest.mark.parametrize("background", [False, True])
def test_region_that_cannot_be_attached_is_never_used(fd: int, background: bool) -> None:
    device = Device()
    device.fail = True
    regions = RegionSet(device)
    if background:
        regions.add(0, fd, SIZE, huge=False, background=True)
    else:
        with pytest.raises(RegionError, match="pinned"):
            regions.add(0, fd, SIZE, huge=False, background=False)
    hold = held(regions)
    with pytest.raises(RegionError, match="pinned"):
        hold.locate(0, 0, 1, 30)
    hold.release()
    regions.close()
    assert regions.wait_unmapped(30)


def test_removed_region_is_unmapped_when_the_last_copy_there_has_ended(fd: int) -> None:
    device, told = Device(), threading.Event()
    regions = RegionSet(device)
    for region in (1, 2):
        regions.add(region, fd, SIZE, huge=False, background=False)
    first, second, other = held(regions), held(regions), held(regions)
    address, kept = first.locate(1, 0, 1, 0), other.locate(2, 0, 1, 0)
    assert second.locate(1, 4096, 1, 0) == address + 4096
    regions.remove(1, told.set)
    late = held(regions)
    for hold in (first, other, late):
        with pytest.raises(RegionError, match="not mapped"):
            hold.locate(1, 0, 1, 0)
    assert regions.bytes_mapped == SIZE
    first.release()
    ctypes.memmove(address, b"still here", 10)
    assert flags_of(address) and len(device.attached) == 2 and not told.is_set()
    seen: list[int] = []
    device.on_detach = lambda: seen.append(len(flags_of(address)))
    second.release()
    assert told.wait(30), "the holds that are left were never told of it"
    assert not flags_of(address) and len(device.attached) == 1 and seen and seen[0], (
        "detached first"
    )
    ctypes.memmove(kept, b"and this one stays", 18)
    regions.close()
    other.release()
    assert not regions.wait_unmapped(0)
    late.release()
    assert regions.wait_unmapped(30) and not flags_of(kept)


@pytest.mark.parametrize("copies", [0, 1])
def test_set_closed_while_a_region_leaves(
    fd: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over when the region has gone, too, and says so once. A region that is removed later is
    not told of."""
    device, stuck, over, told = Device(), Stuck(), [], []
    monkeypatch.setattr(device, "detach", lambda handle: stuck if handle == left else Ended())
    regions = RegionSet(device, lambda: over.append(1))
    for region in (1, 2):
        regions.add(region, fd, SIZE, huge=False, background=False)
    left = min(device.attached)
    hold = held(regions)
    addresses = [hold.locate(region, 0, 1, 0) for region in (1, 2)]
    if not copies:
        hold.release()
    regions.remove(1, lambda: told.append(1))
    regions.close()
    regions.close()
    regions.remove(2, lambda: told.append(2))
    assert not regions.wait_unmapped(0.1) and all(flags_of(address) for address in addresses)
    if copies:
        hold.release()
    assert not regions.wait_unmapped(0.1) and flags_of(addresses[0]), "unmapped under a device"
    assert not told
    stuck.over.set()
    assert regions.wait_unmapped(30) and not any(flags_of(address) for address in addresses)
    assert told == [1] and over == [1]


def test_removed_while_it_is_prepared(fd: int) -> None:
    device, told = Device(), threading.Event()
    device.gate.clear()
    regions = RegionSet(device)
    regions.add(0, fd, SIZE, huge=False, background=True)
    assert regions.bytes_mapped == SIZE
    until(lambda: device.attaching)
    address = device.attaching[0]
    regions.remove(0, told.set)
    assert not told.wait(0.1) and flags_of(address), "unmapped under the thread that attaches it"
    device.gate.set()
    assert told.wait(30)
    assert not flags_of(address) and not device.attached
    regions.close()
    assert regions.wait_unmapped(30)


def test_whoever_waits_for_a_region_that_is_removed_gets_an_error(fd: int) -> None:
    device, told = Device(), threading.Event()
    regions = RegionSet(device)
    device.gate.clear()
    device.fail = True
    regions.add(0, fd, SIZE, huge=False, background=True)
    hold = held(regions)
    failed: list[RegionError] = []

    def locate() -> None:
        try:
            hold.locate(0, 0, 1, 60)
        except RegionError as error:
            failed.append(error)

    thread = threading.Thread(target=locate)
    thread.start()
    until(lambda: regions._regions[0].holds == 2)
    regions.remove(0, told.set)
    device.gate.set()
    thread.join()
    assert failed and not told.is_set()
    hold.release()
    assert told.wait(30)


def test_removing_what_never_was_is_told_at_once() -> None:
    regions, told = RegionSet(), []
    regions.remove(5, lambda: told.append(5))
    assert told == [5]


def test_region_that_a_device_keeps_stays_mapped(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, told, over = Device(), threading.Event(), threading.Event()
    tried = threading.Event()

    def fails(handle: int) -> Ended:
        tried.set()
        raise RuntimeError("the driver has crashed")

    monkeypatch.setattr(device, "detach", fails)
    regions = RegionSet(device, over.set)
    regions.add(0, fd, SIZE, huge=False, background=False)
    hold = held(regions)
    address = hold.locate(0, 0, 1, 0)
    hold.release()
    regions.remove(0, told.set)
    assert tried.wait(30)
    regions.close()
    assert not told.wait(0.1) and not over.is_set() and flags_of(address)
    unmap(address, SIZE)


def test_regions_come_and_go_under_copies(fd: int) -> None:
    """Nobody that was told an address meets an access violation, and every removal ends."""
    regions, stop, told = RegionSet(Device()), threading.Event(), []
    copied = [0, 0]
    before = Path("/proc/self/maps").read_text().count("memfd:region")

    def copier(which: int) -> None:
        rng = random.Random(which)
        while not stop.is_set():
            hold = held(regions)
            for region in rng.sample(range(4), 3):
                try:
                    address = hold.locate(
                        rounds[region] * 4 + region, rng.randrange(SIZE // 4096) * 4096, 4096, 1
                    )
                except RegionError:
                    continue
                ctypes.memmove(address, b"copied", 6)
                copied[which] += 1
            hold.release()

    rounds = [0] * 4
    for region in range(4):
        regions.add(region, fd, SIZE, huge=False, background=False)
    threads = [threading.Thread(target=copier, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(1, 40):
        for region in range(4):
            gone = (turn - 1) * 4 + region
            regions.remove(gone, lambda gone=gone: told.append(gone))
            regions.add(turn * 4 + region, fd, SIZE, huge=False, background=bool(turn % 2))
            rounds[region] = turn
    until(lambda: len(told) == 39 * 4)
    until(lambda: all(copied))
    stop.set()
    for thread in threads:
        thread.join()
    assert sorted(told) == list(range(39 * 4))
    regions.close()
    assert regions.wait_unmapped(30)
    assert Path("/proc/self/maps").read_text().count("memfd:region") == before


def test_handles_never_return(fd: int) -> None:
    """Region ids begin anew with a sidecar, while the old set may still be in use."""
    device = Device()
    first, second = RegionSet(device), RegionSet(device)
    first.add(0, fd, SIZE, huge=False, background=False)
    second.add(0, fd, SIZE, huge=False, background=False)
    assert len(device.attached) == 2
    first.close()
    assert len(device.attached) == 1
    second.close()


def control_fd(magic: bytes = b"LOOKASID", layout: int = 1, size: int = 4096) -> int:
    fd = os.memfd_create("control", os.MFD_CLOEXEC)
    os.pwrite(fd, struct.pack("<8sIIQQQQ", magic, layout, 2, 99, 1, 1000, 10), 0)
    os.ftruncate(fd, size)
    return fd


def test_control_region_is_read_where_it_lies() -> None:
    fd = control_fd()
    control = Control(fd)
    assert (control.state, control.generation) == (Control.DRAINING, 99)
    assert (control.capacity_bytes, control.used_bytes) == (1000, 10)
    os.pwrite(fd, struct.pack("<I", 3), 12)
    assert control.state == Control.CLOSED
    os.close(fd)
    assert control.state == Control.CLOSED
    control.close()
    control.close()


@pytest.mark.parametrize(
    "wrong", [{"magic": b"SOMEBODY"}, {"layout": 2}, {"size": 64}, {"size": 0}]
)
def test_what_is_no_control_region_is_refused(wrong: dict) -> None:
    fd = control_fd(**wrong)
    try:
        with pytest.raises(RegionError):
            Control(fd)
    finally:
        os.close(fd)
