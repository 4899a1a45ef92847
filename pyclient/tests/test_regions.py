"""Mapping what the sidecar hands over, keeping it, and unmapping it only when nobody copies."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lookaside.control import Control
from lookaside.mapping import RegionError, map_region, populate, unmap
from lookaside.mappings import Attachable, Mappings
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


def unkept(
    device: Attachable | None = None, on_idle: Callable[[], None] | None = None
) -> RegionSet:
    """A set whose mappings end with it."""
    mappings = Mappings(device)
    mappings.close()
    return RegionSet(mappings, on_idle)


def unmapped(regions: RegionSet) -> bool:
    """Wait for the end of a closed set and of its mappings."""
    return regions.wait_idle(30) and regions._mappings.wait_unmapped(30)


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
    assert total() <= before + SIZE // mmap.PAGESIZE


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
    regions = unkept()
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
    regions = unkept(device)
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
    until(lambda: not flags_of(address))


def test_locate_stays_inside(fd: int) -> None:
    regions = unkept()
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
    regions = unkept(device)
    regions.add(0, fd, SIZE, huge=False, background=False)
    assert len(device.attached) == 1
    first, second = held(regions), held(regions)
    address = first.locate(0, 0, 1, 0)
    regions.close()
    assert regions.acquire() is None
    assert not regions.wait_idle(0)
    first.release()
    assert flags_of(address), "a hold that has located nothing yet may"
    assert second.locate(0, 0, 1, 0) == address
    ctypes.memmove(address, b"still here", 10)
    assert len(device.attached) == 1
    second.release()
    assert regions.wait_idle(0)
    assert not flags_of(address) and not device.attached
    regions.close()
    with pytest.raises(RegionError):
        regions.add(1, fd, SIZE, huge=False, background=False)


@pytest.mark.parametrize("how", ["at once", "late", "never"])
def test_memory_is_idle_before_a_device_gives_it_back(
    fd: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that has ended moves nothing more, so its sidecar need not wait for the unpinning."""
    monkeypatch.setattr("lookaside.mappings._DETACH_PATIENCE_S", 0.05)
    device, stuck, told, asked = Device(), Stuck(), threading.Event(), threading.Event()

    def detach(region_id: int) -> Stuck:
        asked.set()
        if how == "never":
            raise RuntimeError("the driver has crashed")
        return stuck

    if how != "at once":
        monkeypatch.setattr(device, "detach", detach)
    regions = unkept(device, told.set)
    regions.add(0, fd, SIZE, huge=False, background=False)
    hold = held(regions)
    address = hold.locate(0, 0, 1, 0)
    regions.close()
    assert not told.is_set() and not regions.wait_idle(0), "it is held"
    hold.release()
    assert told.is_set() and regions.wait_idle(0)
    if how != "at once":
        assert asked.wait(30) and not regions._mappings.wait_unmapped(0.2)
        assert flags_of(address), "unmapped under a device"
    if how == "never":
        unmap(address, SIZE)
        return
    stuck.over.set()
    assert unmapped(regions) and not flags_of(address)


def test_region_in_the_background_is_not_ready_before_it_is_attached(fd: int) -> None:
    device = Device()
    device.gate.clear()
    regions = unkept(device)
    regions.add(0, fd, SIZE, huge=False, background=True)
    hold = held(regions)
    with pytest.raises(RegionError, match="not ready"):
        hold.locate(0, 0, 1, 0.01)
    hold.release()
    regions.close()
    assert not regions.wait_idle(0.01), "unmapped under the thread that attaches it"
    device.gate.set()
    assert unmapped(regions)
    assert not device.attached


@pytest.mark.parametrize("background", [False, True])
def test_region_that_cannot_be_attached_is_never_used(fd: int, background: bool) -> None:
    device = Device()
    device.fail = True
    regions = unkept(device)
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
    assert unmapped(regions)


def test_removed_region_is_unmapped_when_the_last_copy_there_has_ended(fd: int) -> None:
    device, told = Device(), threading.Event()
    regions = unkept(device)
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
    assert not regions.wait_idle(0)
    late.release()
    assert unmapped(regions) and not flags_of(kept)


@pytest.mark.parametrize("copies", [0, 1])
def test_set_closed_while_a_region_leaves(
    fd: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over when the region has gone, too, and says so once. A region that is removed later is
    not told of."""
    device, stuck, over, told = Device(), Stuck(), [], []
    monkeypatch.setattr(device, "detach", lambda handle: stuck if handle == left else Ended())
    regions = unkept(device, lambda: over.append(1))
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
    assert not regions.wait_idle(0.1) and all(flags_of(address) for address in addresses)
    if copies:
        hold.release()
    assert not regions.wait_idle(0.1) and flags_of(addresses[0]), "unmapped under a device"
    assert not told
    stuck.over.set()
    assert unmapped(regions) and not any(flags_of(address) for address in addresses)
    assert told == [1] and over == [1]


def test_removed_while_it_is_prepared(fd: int) -> None:
    device, told = Device(), threading.Event()
    device.gate.clear()
    regions = unkept(device)
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
    assert unmapped(regions)


def test_whoever_waits_for_a_region_that_is_removed_gets_an_error(fd: int) -> None:
    device, told = Device(), threading.Event()
    regions = unkept(device)
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
    regions, told = unkept(), []
    regions.remove(5, lambda: told.append(5))
    assert told == [5]


def test_region_that_a_device_keeps_stays_mapped(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, told, over = Device(), threading.Event(), threading.Event()
    tried = threading.Event()

    def fails(handle: int) -> Ended:
        tried.set()
        raise RuntimeError("the driver has crashed")

    monkeypatch.setattr(device, "detach", fails)
    regions = unkept(device, over.set)
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
    regions, stop, told = unkept(Device()), threading.Event(), []
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
    assert unmapped(regions)
    assert Path("/proc/self/maps").read_text().count("memfd:region") == before


def test_handles_never_return(fd: int) -> None:
    """Region ids begin anew with a sidecar, while the old set may still be in use."""
    device = Device()
    first, second = unkept(device), unkept(device)
    first.add(0, fd, SIZE, huge=False, background=False)
    second.add(0, fd, SIZE, huge=False, background=False)
    assert len(device.attached) == 2
    first.close()
    assert len(device.attached) == 1
    second.close()


# ---- mappings that outlive their session ----


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def same(regions: RegionSet, region: int = 0) -> int:
    """The address of a region that is ready."""
    hold = held(regions)
    address = hold.locate(region, 0, 1, 30)
    hold.release()
    return address


def test_the_next_session_takes_over_what_is_mapped(fd: int) -> None:
    fds, device = open_fds(), Device()
    mappings = Mappings(device)
    first = RegionSet(mappings)
    assert not first.add(7, fd, SIZE, huge=False, background=False, memory=True)
    address, handles = same(first, 7), list(device.attached)
    first.close()
    assert first.wait_idle(0) and flags_of(address) and list(device.attached) == handles
    given_back = mappings.held()
    assert [os.fstat(each).st_ino for each in given_back] == [os.fstat(fd).st_ino]
    for each in given_back:
        os.close(each)
    second = RegionSet(mappings)
    # By another descriptor, another number, and by the thread of a handshake or a later one.
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    told = threading.Event()
    assert second.add(0, again, SIZE, huge=False, background=True, memory=True, then=told.set)
    os.close(again)
    assert told.is_set() and same(second) == address
    assert device.attaching == [address] and list(device.attached) == handles, "attached anew"
    assert not mappings.held(), "it is the session's"
    mappings.drop_kept()
    assert mappings.wait_unmapped(0) and flags_of(address)
    second.close()
    mappings.drop_kept()
    assert mappings.wait_unmapped(30)
    assert not flags_of(address) and not device.attached and open_fds() <= fds


@pytest.mark.parametrize("what", ["file", "offset", "size", "page"])
def test_other_bytes_are_mapped_anew(fd: int, what: str) -> None:
    os.ftruncate(fd, 2 * SIZE)
    device = Device()
    mappings = Mappings(device)
    first = RegionSet(mappings)
    first.add(0, fd, SIZE, huge=False, background=False)
    address = same(first)
    first.close()
    second = RegionSet(mappings)
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    os.ftruncate(other, 2 * SIZE)
    page = 4096
    while what == "page" and address % page == 0:
        page *= 2  # the region must lie at a multiple of it now
    assert not second.add(
        0,
        other if what == "file" else fd,
        SIZE // 2 if what == "size" else SIZE,
        huge=False,
        background=False,
        offset=SIZE if what == "offset" else 0,
        page_size=page,
    )
    os.close(other)
    assert same(second) != address and flags_of(address)
    mappings.drop_kept()
    assert mappings.wait_unmapped(30) and not flags_of(address)
    second.close()
    mappings.close()
    assert mappings.wait_unmapped(30) and not device.attached


def test_a_file_that_has_shrunk_is_not_taken_over(fd: int) -> None:
    mappings = Mappings()
    first, second = RegionSet(mappings), RegionSet(mappings)
    first.add(0, fd, SIZE, huge=False, background=False)
    first.close()
    os.ftruncate(fd, SIZE - 4096)
    with pytest.raises(RegionError, match="holds"):
        second.add(0, fd, SIZE, huge=False, background=False)
    second.close()
    mappings.close()
    assert mappings.wait_unmapped(30)


def test_copies_of_the_session_before_go_on_in_what_the_next_one_has(fd: int) -> None:
    over: list[int] = []
    mappings = Mappings(Device())
    first = RegionSet(mappings, lambda: over.append(1))
    first.add(0, fd, SIZE, huge=False, background=False)
    copy = held(first)
    address = copy.locate(0, 0, SIZE, 0)
    first.close()
    second = RegionSet(mappings, lambda: over.append(2))
    assert second.add(5, fd, SIZE, huge=False, background=False) and same(second, 5) == address
    assert not over, "its sidecar would reuse what it was granted"
    told = threading.Event()
    second.remove(5, told.set)
    mappings.drop_kept()
    assert not told.wait(0.1) and flags_of(address), "unmapped under a copy"
    ctypes.memmove(address, b"still here", 10)
    copy.release()
    assert told.wait(30) and not flags_of(address) and over == [1]
    second.close()
    assert over == [1, 2]


def test_what_is_not_wanted_any_more_goes_with_its_last_copy(fd: int) -> None:
    mappings = Mappings(Device())
    first = RegionSet(mappings)
    first.add(0, fd, SIZE, huge=False, background=False)
    copy = held(first)
    address = copy.locate(0, 0, SIZE, 0)
    first.close()
    mappings.drop_kept()
    assert flags_of(address), "unmapped under a copy"
    second = RegionSet(mappings)
    assert not second.add(0, fd, SIZE, huge=False, background=False), "it is going"
    copy.release()
    until(lambda: not flags_of(address))
    second.close()
    mappings.close()
    assert mappings.wait_unmapped(30)


def test_only_what_is_the_sidecars_own_memory_is_given_back(fd: int) -> None:
    mappings = Mappings(Device())
    first = RegionSet(mappings)
    first.add(0, fd, SIZE, huge=False, background=False)  # of a device
    first.add(1, fd, SIZE // 2, huge=False, background=False, read_only=True)  # another sidecar's
    addresses = [same(first, 0), same(first, 1)]
    first.close()
    until(lambda: not flags_of(addresses[1]))
    assert flags_of(addresses[0]) and not mappings.held()
    mappings.close()
    assert mappings.wait_unmapped(30) and not flags_of(addresses[0])


def test_no_more_is_given_back_than_a_hello_carries() -> None:
    mappings = Mappings()
    regions = RegionSet(mappings)
    for index in range(70):
        each = os.memfd_create("region", os.MFD_CLOEXEC)
        os.ftruncate(each, mmap.PAGESIZE)
        regions.add(index, each, mmap.PAGESIZE, huge=False, background=False, memory=True)
        os.close(each)
    regions.close()
    given_back = mappings.held()
    assert len(given_back) == 64
    for each in given_back:
        os.close(each)
    mappings.close()
    assert mappings.wait_unmapped(30)


@pytest.mark.parametrize("fails", [False, True])
def test_taken_over_while_it_is_being_attached(fd: int, fails: bool) -> None:
    device = Device()
    device.gate.clear()
    mappings = Mappings(device)
    first, second = RegionSet(mappings), RegionSet(mappings)
    first.add(0, fd, SIZE, huge=False, background=True)
    until(lambda: device.attaching)
    first.close()
    told = threading.Event()
    assert second.add(0, fd, SIZE, huge=False, background=True, then=told.set)
    hold = held(second)
    with pytest.raises(RegionError, match="not ready"):
        hold.locate(0, 0, 1, 0.01)
    assert not told.is_set() and not first.wait_idle(0)
    device.fail = fails
    device.gate.set()
    assert told.wait(30) and first.wait_idle(30)
    if fails:
        with pytest.raises(RegionError, match="pinned"):
            hold.locate(0, 0, 1, 30)
    else:
        assert hold.locate(0, 0, 1, 30) == device.attaching[0]
    hold.release()
    second.close()
    third = RegionSet(mappings)
    device.fail = False
    assert third.add(0, fd, SIZE, huge=False, background=False) is not fails, "it had failed"
    third.close()
    mappings.close()
    assert mappings.wait_unmapped(30) and not device.attached


def test_forked_child_has_no_descriptor_of_the_memory(fd: int) -> None:
    """Else the memory of a worker that has died would live as long as its child."""
    device = Device()
    mappings = Mappings(device)
    regions = RegionSet(mappings)
    regions.add(0, fd, SIZE, huge=False, background=False, memory=True)
    hold = held(regions)
    address, inode = hold.locate(0, 0, SIZE, 0), os.fstat(fd).st_ino
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            other = mmap.mmap(-1, SIZE)  # may lie where the region would
            inodes = set()
            for each in os.listdir("/proc/self/fd"):
                with contextlib.suppress(FileNotFoundError):  # that of the listing
                    if int(each) != fd:
                        inodes.add(os.stat(f"/proc/self/fd/{each}").st_ino)
            hold.release()
            regions.close()
            mappings.close()
            other[:] = b"x" * SIZE  # nothing of it was unmapped
            os.write(write, b"none" if inode not in inodes and not mappings.held() else b"some")
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 8) == b"none"
    os.close(read)
    os.waitpid(child, 0)
    assert flags_of(address) and len(device.attached) == 1
    hold.release()
    regions.close()
    assert len(mappings._kept) == 1
    mappings.close()
    assert mappings.wait_unmapped(30)


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
