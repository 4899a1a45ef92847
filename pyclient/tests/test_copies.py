"""Copies on the CPU: splitting, threads, tickets, and regions that leave while copies run."""

import mmap
import os
import platform
import threading
import time

import numpy as np
import pytest
from lookaside import _native, copies
from lookaside.copies import AllOf, CpuCopies, Ticket, finished
from lookaside.devices import make_copies
from lookaside.layout import PageLayout, Segment

PAGE = 256 << 10
BLOCKS = 64


class Bench:
    """A KV cache of two layers, an arena, and copies between them."""

    def __init__(self, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)
        self.cache = rng.integers(0, 256, (2, BLOCKS, PAGE // 2), np.uint8)
        self.arena = np.zeros((BLOCKS, PAGE), np.uint8)
        base, layer = self.cache.ctypes.data, self.cache.nbytes // 2
        segments = (
            Segment(base, PAGE // 2, PAGE // 2, 0),
            Segment(base + layer, PAGE // 2, PAGE // 2, PAGE // 2),
        )
        self.layout = PageLayout(segments, PAGE, BLOCKS, 16, ((base, self.cache.nbytes),))
        self.copies = make_copies(self.layout, "cpu")
        self.copies.attach(1, self.arena.ctypes.data, self.arena.nbytes)

    def pages(self, blocks: np.ndarray) -> np.ndarray:
        return self.cache[:, blocks].transpose(1, 0, 2).reshape(len(blocks), PAGE)

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        return np.uint64(self.arena.ctypes.data) + slots.astype(np.uint64) * np.uint64(PAGE)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.copies.close()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 33, BLOCKS])
def test_gather_is_over_when_it_returns(bench: Bench, count: int) -> None:
    blocks = np.random.default_rng(count).permutation(BLOCKS)[:count]
    ticket = bench.copies.gather(blocks, bench.addresses(np.arange(count)))
    assert ticket.done() and ticket.error is None
    assert (bench.arena[:count] == bench.pages(blocks)).all() and not bench.arena[count:].any()


@pytest.mark.parametrize("count", [0, 1, 33, BLOCKS])
def test_scatter_lands_whatever_becomes_of_the_arrays(bench: Bench, count: int) -> None:
    bench.arena[:] = np.random.default_rng(count).integers(0, 256, bench.arena.shape, np.uint8)
    blocks = np.random.default_rng(count + 1).permutation(BLOCKS)[:count]
    mine, addresses = blocks.copy(), bench.addresses(np.arange(count))
    ticket = bench.copies.scatter(mine, addresses)
    mine[:], addresses[:] = -1, 0
    assert ticket.wait(60) and ticket.done() and ticket.error is None
    assert (bench.pages(blocks) == bench.arena[:count]).all()


def test_a_wrong_copy_is_an_error_on_its_ticket(bench: Bench) -> None:
    before = bench.cache.copy()
    for copy in (bench.copies.gather, bench.copies.scatter):
        for blocks, slots in (([0, BLOCKS], [0, 1]), ([0, 1], [0, BLOCKS]), ([0, 1], [0])):
            ticket = copy(np.array(blocks), bench.addresses(np.array(slots)))
            assert ticket.done() and ticket.error
        ticket = copy(np.array([0.5]), bench.addresses(np.array([0])))
        assert ticket.done() and ticket.error
    assert not bench.arena.any() and (bench.cache == before).all()


def test_detached_regions_are_refused(bench: Bench) -> None:
    assert bench.copies.detach(1).wait(60)
    ticket = bench.copies.gather(np.array([0]), bench.addresses(np.array([0])))
    assert ticket.error and "no attached region" in ticket.error
    assert bench.copies.detach(1).done()
    bench.copies.attach(1, bench.arena.ctypes.data, bench.arena.nbytes)
    assert bench.copies.gather(np.array([0]), bench.addresses(np.array([0]))).error is None


def test_detach_waits_for_copies_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    held = threading.Event()
    run = CpuCopies._run

    def slow(self, *arguments) -> None:
        held.wait(60)
        run(self, *arguments)

    monkeypatch.setattr(CpuCopies, "_run", slow)
    copy = bench.copies.scatter(np.array([0]), bench.addresses(np.array([0])))
    left = bench.copies.detach(1)
    assert not copy.done() and copy.error is None
    assert not left.done() and not left.wait(0.01)
    held.set()
    # The copy had been accepted but found its region gone before it began: refused, not torn.
    assert left.wait(60) and copy.done() and copy.error


def test_a_gather_does_not_queue_behind_scatters(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    run = CpuCopies._run
    main = threading.get_ident()

    def slow(self, *arguments) -> None:
        if threading.get_ident() != main:
            held.wait(60)
        run(self, *arguments)

    monkeypatch.setattr(CpuCopies, "_run", slow)
    scatters = [
        bench.copies.scatter(np.array([i]), bench.addresses(np.array([40 + i]))) for i in range(4)
    ]
    blocks = np.arange(8, 8 + 36)
    ticket = bench.copies.gather(blocks, bench.addresses(np.arange(36)))
    assert ticket.done() and ticket.error is None and not any(s.done() for s in scatters)
    assert (bench.arena[:36] == bench.pages(blocks)).all()
    held.set()
    assert all(s.wait(60) and s.error is None for s in scatters)


def test_closed_copies_fail_and_do_not_raise(bench: Bench) -> None:
    bench.copies.close()
    for count in (1, BLOCKS):
        ticket = bench.copies.scatter(np.arange(count), bench.addresses(np.arange(count)))
        assert ticket.done() and ticket.error == "copies are closed"
    assert bench.copies.gather(np.array([0]), bench.addresses(np.array([0]))).done()
    ticket = bench.copies.gather(np.arange(BLOCKS), bench.addresses(np.arange(BLOCKS)))
    assert ticket.done() and ticket.error == "copies are closed"
    bench.copies.close()


def test_threads_may_copy_and_regions_come_and_go() -> None:
    bench = Bench()
    pages = bench.pages(np.arange(BLOCKS)).copy()
    stop, wrong = threading.Event(), []

    def copier(which: int) -> None:
        rng = np.random.default_rng(which)
        while not stop.is_set():
            # Disjoint slots and blocks by thread; region 2 covers the whole arena too, so copies go
            # on meanwhile.
            mine = rng.permutation(np.arange(which, BLOCKS, 2))[: rng.integers(1, 20)]
            gathered = bench.copies.gather(mine, bench.addresses(mine))
            scattered = bench.copies.scatter(mine, bench.addresses(mine))
            if not (scattered.wait(60) and gathered.error is None and scattered.error is None):
                wrong.append((gathered.error, scattered.error))

    bench.copies.attach(2, bench.arena.ctypes.data, bench.arena.nbytes)
    threads = [threading.Thread(target=copier, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        assert bench.copies.detach(1).wait(60)
        bench.copies.attach(1, bench.arena.ctypes.data, bench.arena.nbytes)
    stop.set()
    for thread in threads:
        thread.join()
    bench.copies.close()
    assert not wrong
    assert (bench.pages(np.arange(BLOCKS)) == pages).all()


def test_memory_that_is_not_there_fails_the_copy_that_meets_it(bench: Bench) -> None:
    """In whichever of its threads; each part that did says where."""
    fd = os.memfd_create("cut", os.MFD_CLOEXEC)
    os.ftruncate(fd, BLOCKS * PAGE)
    mapping = mmap.mmap(fd, BLOCKS * PAGE)
    start = np.frombuffer(mapping, np.uint8).ctypes.data
    bench.copies.attach(2, start, BLOCKS * PAGE)
    blocks = np.arange(BLOCKS)
    addresses = np.uint64(start) + blocks.astype(np.uint64) * np.uint64(PAGE)
    os.ftruncate(fd, BLOCKS // 4 * PAGE)
    for copy in (bench.copies.gather, bench.copies.scatter):
        ticket = copy(blocks, addresses)
        assert ticket.wait(60) and ticket.error is not None and "bus error" in ticket.error
        assert len(ticket.faults) == 2 and all(
            start + BLOCKS // 4 * PAGE <= fault < start + BLOCKS * PAGE for fault in ticket.faults
        )
        good = copy(blocks[: BLOCKS // 4], addresses[: BLOCKS // 4])
        assert good.wait(60) and good.error is None and good.faults == ()
    ticket = bench.copies.gather(blocks, bench.addresses(blocks))
    assert ticket.error is None and (bench.arena == bench.pages(blocks)).all()
    assert bench.copies.detach(2).wait(60)
    os.close(fd)


def test_tickets_of_parts() -> None:
    first, second = Ticket(), Ticket()
    both = AllOf([first, second])
    first._finish("first broke")
    assert not both.done() and both.error is None and not both.wait(0.01)
    second._finish("second broke")
    assert both.wait(0) and both.error == "first broke"
    assert AllOf([]).done() and AllOf([]).error is None
    assert finished().done() and finished("x").error == "x"


def test_kernel_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copies.KERNEL_ENV, "memcpy")
    assert copies.copy_kernel() == _native.MEMCPY
    bench = Bench()
    assert bench.copies.gather(np.array([5]), bench.addresses(np.array([0]))).error is None
    assert (bench.arena[0] == bench.pages(np.array([5]))[0]).all()
    bench.copies.close()
    for name in ("avx1024", "neon" if platform.machine() == "x86_64" else "avx512"):
        monkeypatch.setenv(copies.KERNEL_ENV, name)
        with pytest.raises(ValueError, match=f"{copies.KERNEL_ENV}.*'memcpy'"):
            copies.copy_kernel()
    monkeypatch.delenv(copies.KERNEL_ENV)
    assert copies.copy_kernel() == (
        _native.AVX512 if _native.usable(_native.AVX512) else _native.MEMCPY
    )


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="xpu:0"):
        make_copies(Bench().layout, "xpu:0")
