"""Mapping what the sidecar hands over, and letting go of it only when nobody copies."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator

import pytest
from lookaside.regions import Control, RegionError, RegionSet, map_region, populate, unmap

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
        self.fail = False
        self.gate = threading.Event()
        self.gate.set()

    def attach(self, region_id: int, address: int, size: int) -> None:
        self.gate.wait(10)
        if self.fail:
            raise RuntimeError("out of pinned memory")
        self.attached[region_id] = (address, size)

    def detach(self, region_id: int) -> Ended:
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


def test_locate_stays_inside(fd: int) -> None:
    regions = RegionSet()
    regions.add(7, fd, SIZE, huge=False, background=False)
    assert regions.acquire()
    base = regions.locate(7, 0, SIZE, 0)
    assert regions.locate(7, SIZE - 1, 1, 0) == base + SIZE - 1
    for offset, size in [(-1, 1), (0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (1 << 63, 1), (0, -1)]:
        with pytest.raises(RegionError):
            regions.locate(7, offset, size, 0)
    with pytest.raises(RegionError, match="not mapped"):
        regions.locate(8, 0, 1, 0)
    with pytest.raises(RegionError, match="twice"):
        regions.add(7, fd, SIZE, huge=False, background=False)
    regions.close()
    regions.release()


def test_closed_set_keeps_its_mappings_until_the_last_hold(fd: int) -> None:
    device = Device()
    regions = RegionSet(device)
    regions.add(0, fd, SIZE, huge=False, background=False)
    assert len(device.attached) == 1
    assert regions.acquire() and regions.acquire()
    address = regions.locate(0, 0, 1, 0)
    regions.close()
    assert not regions.acquire()
    assert not regions.wait_unmapped(0)
    regions.release()
    ctypes.memmove(address, b"still here", 10)
    assert len(device.attached) == 1
    regions.release()
    assert regions.wait_unmapped(0)
    assert not flags_of(address) and not device.attached
    regions.close()
    with pytest.raises(RegionError):
        regions.add(1, fd, SIZE, huge=False, background=False)


@pytest.mark.parametrize("how", ["at once", "late", "never"])
def test_unmapped_is_told_when_nothing_touches_the_memory(fd: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lookaside.regions._DETACH_PATIENCE_S", 0.05)
    device, stuck, told = Device(), Stuck(), threading.Event()
    if how == "late":
        monkeypatch.setattr(device, "detach", lambda region_id: stuck)
    elif how == "never":
        monkeypatch.setattr(device, "detach", lambda region_id: 1 / 0)
    regions = RegionSet(device, told.set)
    regions.add(0, fd, SIZE, huge=False, background=False)
    assert regions.acquire()
    address = regions.locate(0, 0, 1, 0)
    regions.close()
    assert not told.is_set(), "it is held"
    regions.release()
    if how != "at once":
        assert not told.wait(0.2) and not regions.wait_unmapped(0)
        assert flags_of(address), "unmapped under a device"
    if how == "never":
        unmap(address, SIZE)
        return
    stuck.over.set()
    assert told.wait(5) and regions.wait_unmapped(0)
    assert not flags_of(address)


def test_region_in_the_background_is_not_ready_before_it_is_attached(fd: int) -> None:
    device = Device()
    device.gate.clear()
    regions = RegionSet(device)
    regions.add(0, fd, SIZE, huge=False, background=True)
    assert regions.acquire()
    with pytest.raises(RegionError, match="not ready"):
        regions.locate(0, 0, 1, 0.01)
    regions.release()
    regions.close()
    assert not regions.wait_unmapped(0.01), "unmapped under the thread that attaches it"
    device.gate.set()
    assert regions.wait_unmapped(5)
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
    assert regions.acquire()
    with pytest.raises(RegionError, match="pinned"):
        regions.locate(0, 0, 1, 5)
    regions.release()
    regions.close()
    assert regions.wait_unmapped(5)


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


@pytest.mark.parametrize("wrong", [{"magic": b"SOMEBODY"}, {"layout": 2}, {"size": 64}, {"size": 0}])
def test_what_is_no_control_region_is_refused(wrong: dict) -> None:
    fd = control_fd(**wrong)
    try:
        with pytest.raises(RegionError):
            Control(fd)
    finally:
        os.close(fd)
