"""Copies on CUDA: against a stand-in for the driver everywhere, and on a real GPU where there is
one."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookaside import _native
from lookaside.copies import ABSENT
from lookaside.cuda import CudaCopies
from lookaside.layout import PageLayout, Segment

BLOCKS, LAYERS, RUN = 16, 3, 4096
PAGE = LAYERS * RUN


def compile_fake(directory: Path, *flags: str) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = directory / f"libfake{len(flags)}.so"
    source = Path(__file__).with_name("fake_cuda.c")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        *flags,
        str(source),
        "-o",
        str(library),
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return library


class Device:
    """A KV cache and an arena on a pretended GPU. What the compute stream does is the test's to
    say."""

    def __init__(self, library: Path, **options: Any) -> None:
        self.library = library
        self.driver: Any = ctypes.CDLL(str(library))
        for name in ("fake_stream", "fake_block"):
            getattr(self.driver, name).restype = ctypes.c_void_p
        rng = np.random.default_rng(5)
        self.cache = rng.integers(0, 256, (LAYERS, BLOCKS, RUN), np.uint8)
        self.arena = np.zeros((BLOCKS, PAGE), np.uint8)
        base = self.cache.ctypes.data
        segments = tuple(Segment(base + i * BLOCKS * RUN, RUN, RUN, i * RUN) for i in range(LAYERS))
        self.layout = PageLayout(segments, PAGE, BLOCKS, 16, ((base, self.cache.nbytes),))
        self.compute = self.driver.fake_stream()
        self.copies = CudaCopies(
            self.layout, 0, library=str(library), compute_stream=lambda: self.compute, **options
        )
        self.copies.attach(1, self.arena.ctypes.data, self.arena.nbytes)

    def addresses(self, count: int) -> np.ndarray:
        return np.uint64(self.arena.ctypes.data) + np.arange(count, dtype=np.uint64) * np.uint64(
            PAGE
        )

    def pages(self, blocks: np.ndarray) -> np.ndarray:
        return self.cache[:, blocks].transpose(1, 0, 2).reshape(len(blocks), PAGE)

    def gather(self, *blocks: int) -> Any:
        return self.copies.gather(np.array(blocks), self.addresses(len(blocks)))

    def run_until(self, done: Any, patience_s: float = 60) -> bool:
        """Lets the GPU work until something holds: our thread submits when it gets to it."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            self.driver.fake_run()
            if done():
                return True
            time.sleep(0.0005)
        return False


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_fake(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(library: Path, tmp_path: Path) -> Iterator[Device]:
    # A copy of its own for each test: the stand-in keeps its state in the library.
    mine = tmp_path / "libfake.so"
    shutil.copy(library, mine)
    device = Device(mine)
    yield device
    device.driver.fake_eager(1)
    device.copies.close()
    assert device.driver.fake_contexts() == 0


def test_round_trip(fake: Device) -> None:
    blocks = np.array([7, 0, 15])
    ticket = fake.gather(7, 0, 15)
    assert not ticket.done() and ticket.error is None and not ticket.wait(0.01)
    assert fake.run_until(ticket.done) and ticket.error is None
    assert (fake.arena[:3] == fake.pages(blocks)).all() and not fake.arena[3:].any()
    assert fake.driver.fake_batches() == 1 and fake.driver.fake_copies() == 9
    want = fake.arena[:3].copy()
    ticket = fake.copies.scatter(np.array([1, 2, 3]), fake.addresses(3))
    assert fake.run_until(ticket.done) and ticket.error is None
    assert (fake.pages(np.array([1, 2, 3])) == want).all()
    assert fake.driver.fake_events() == 0


def test_pages_of_several_blocks(fake: Device) -> None:
    """Each column by its own segments; what is absent is left out."""
    base, size = fake.cache.ctypes.data, BLOCKS * RUN
    segments = (
        Segment(base, RUN, RUN, 0, 0),
        Segment(base + size, RUN, RUN, RUN, 1),
        Segment(base + 2 * size, RUN, RUN, 2 * RUN, 1),
        Segment(base, RUN, RUN, 3 * RUN, 2),
    )
    layout = PageLayout(segments, 4 * RUN, BLOCKS, 16, ((base, fake.cache.nbytes),))
    assert layout.column_bytes == (RUN, 2 * RUN, RUN)
    copies = CudaCopies(layout, 0, library=str(fake.library), compute_stream=lambda: fake.compute)
    arena = np.zeros((2, 4 * RUN), np.uint8)
    copies.attach(1, arena.ctypes.data, arena.nbytes)
    addresses = np.uint64(arena.ctypes.data) + np.arange(2, dtype=np.uint64) * np.uint64(4 * RUN)
    ticket = copies.gather(np.array([[3, 4, 5], [6, 7, 8]]), addresses)
    assert fake.run_until(ticket.done) and ticket.error is None
    cache = fake.cache
    want = [
        [cache[0, 3], cache[1, 4], cache[2, 4], cache[0, 5]],
        [cache[0, 6], cache[1, 7], cache[2, 7], cache[0, 8]],
    ]
    assert (arena == np.array(want).reshape(2, -1)).all()
    before = cache.copy()
    ticket = copies.scatter(np.array([[9, ABSENT, ABSENT], [ABSENT, 10, 11]]), addresses)
    assert fake.run_until(ticket.done) and ticket.error is None
    before[0, 9], before[1:, 10], before[0, 11] = (
        arena[0, :RUN],
        arena[1, RUN : 3 * RUN].reshape(2, RUN),
        arena[1, -RUN:],
    )
    assert (fake.cache == before).all()
    assert copies.gather(np.array([3, 4]), addresses).error
    fake.driver.fake_eager(1)
    copies.close()


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_copies_come_after_what_compute_was_given(fake: Device, direction: str) -> None:
    """The forward pass queued before a copy writes to its block; the one queued after it does not
    hold it back."""
    before = np.full(RUN, 17, np.uint8)
    target = fake.cache[0, 4]
    forward = fake.driver.fake_block(ctypes.c_void_p(fake.compute))
    compute = ctypes.c_void_p(fake.compute)
    fake.driver.fake_copy(
        compute, ctypes.c_void_p(target.ctypes.data), ctypes.c_void_p(before.ctypes.data), RUN
    )
    copy = fake.copies.gather if direction == "gather" else fake.copies.scatter
    ticket = copy(np.array([4]), fake.addresses(1))
    assert fake.driver.fake_block(compute)
    assert not fake.run_until(ticket.done, 0.05)
    assert not fake.arena.any()
    fake.driver.fake_release(ctypes.c_void_p(forward))
    assert fake.run_until(ticket.done) and ticket.error is None
    if direction == "gather":
        assert (fake.arena[0, :RUN] == before).all()
    else:
        assert not target.any()


def test_a_scatter_passes_the_forward_after_its_mark(fake: Device) -> None:
    """It waits for the forward that used its blocks, and not for the one that runs beside it."""
    compute = ctypes.c_void_p(fake.compute)
    before = fake.driver.fake_block(compute)
    mark = fake.copies.mark()
    beside = fake.driver.fake_block(compute)
    tickets = [fake.copies.scatter(np.array([4]), fake.addresses(1), mark) for _ in range(2)]
    late = fake.copies.scatter(np.array([5]), fake.addresses(1))
    assert not fake.run_until(tickets[0].done, 0.05)
    fake.driver.fake_release(ctypes.c_void_p(before))
    assert all(fake.run_until(ticket.done) and ticket.error is None for ticket in tickets)
    assert not late.done(), "it has no mark"
    fake.driver.fake_release(ctypes.c_void_p(beside))
    assert fake.run_until(late.done) and late.error is None
    assert fake.driver.fake_events() == 1
    del mark
    assert fake.driver.fake_events() == 0


def test_without_the_batch_call(library: Path, tmp_path: Path) -> None:
    for device in (
        Device(compile_fake(tmp_path, "-DFAKE_OLD_DRIVER")),
        Device(Path(shutil.copy(library, tmp_path / "libplain.so")), batched=False),
    ):
        device.driver.fake_eager(1)
        ticket = device.gather(3, 5)
        assert ticket.wait(60) and ticket.error is None
        assert (device.arena[:2] == device.pages(np.array([3, 5]))).all()
        assert device.driver.fake_batches() == 0 and device.driver.fake_copies() == 6
        device.copies.close()


def test_a_device_that_takes_no_batches(fake: Device) -> None:
    fake.driver.fake_eager(1)
    fake.driver.fake_fail(b"cuMemcpyBatchAsync", 0, 801)
    for _ in range(2):
        ticket = fake.gather(3, 5)
        assert ticket.wait(60) and ticket.error is None
    assert fake.driver.fake_batches() == 0 and fake.driver.fake_copies() == 12
    assert (fake.arena[:2] == fake.pages(np.array([3, 5]))).all()


def test_many_runs_go_in_bounded_batches(library: Path, tmp_path: Path) -> None:
    device = Device(Path(shutil.copy(library, tmp_path / "libmany.so")))
    device.driver.fake_eager(1)
    rounds = 20_000 // LAYERS
    blocks = np.resize(np.arange(BLOCKS), rounds)
    addresses = np.resize(device.addresses(BLOCKS), rounds)
    ticket = device.copies.gather(blocks, addresses)
    assert ticket.wait(60) and ticket.error is None
    assert device.driver.fake_batches() == 3 and device.driver.fake_copies() == rounds * LAYERS
    assert (device.arena == device.pages(np.arange(BLOCKS))).all()
    device.copies.close()


CALLS = [
    "cuEventCreate",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyBatchAsync",
    "cuEventQuery",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", [0, 1])
def test_every_failing_call_ends_as_the_tickets_error(fake: Device, call: str, nth: int) -> None:
    """Fail the Nth call of each kind; the copy after it goes well, and no event leaks."""
    fake.driver.fake_fail(call.encode(), nth, 700)
    failed = []
    for _ in range(3):
        ticket = fake.gather(1, 2)
        assert fake.run_until(ticket.done)
        if ticket.error is not None:
            failed.append(ticket.error)
    assert (
        len(failed) == 1 and call in failed[0] and "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in failed[0]
    )
    assert fake.driver.fake_events() == 0


def test_a_failed_copy_is_over_only_when_what_was_queued_is(library: Path, tmp_path: Path) -> None:
    """Of two runs the second is refused: the first still moves, so nobody may have the page yet."""
    device = Device(Path(shutil.copy(library, tmp_path / "libhalf.so")), batched=False)
    device.driver.fake_fail(b"cuMemcpyDtoHAsync", 1, 700)
    forward = ctypes.c_void_p(device.driver.fake_block(ctypes.c_void_p(device.compute)))
    ticket = device.gather(1)
    assert not device.run_until(ticket.done, 0.05) and ticket.error is None
    device.driver.fake_release(forward)
    assert device.run_until(ticket.done)
    assert "cuMemcpyDtoHAsync" in ticket.error
    device.copies.close()


def test_a_broken_device_never_raises_from_a_copy(fake: Device) -> None:
    under_way = fake.gather(1)
    fake.driver.fake_break(700)
    ticket = fake.gather(1)
    assert ticket.wait(60) and ticket.error
    assert under_way.wait(60) and under_way.error
    assert fake.copies.detach(1).wait(60)
    with pytest.raises(RuntimeError, match="700"):
        fake.copies.attach(2, fake.arena.ctypes.data, fake.arena.nbytes)
    fake.copies.close()
    fake.driver.fake_break(0)


def test_wrong_pairs_never_reach_the_driver(fake: Device) -> None:
    one = fake.addresses(1)
    for blocks, addresses in (([BLOCKS], one), ([0], one - np.uint64(1)), ([0, 1], one)):
        ticket = fake.copies.gather(np.array(blocks), addresses)
        assert ticket.done() and ticket.error
    assert fake.driver.fake_copies() == 0 and fake.driver.fake_events() == 0


def test_regions_are_pinned_while_attached(fake: Device) -> None:
    assert fake.driver.fake_pinned() == 1
    with pytest.raises(ValueError, match="already"):
        fake.copies.attach(1, fake.arena.ctypes.data, fake.arena.nbytes)
    assert fake.driver.fake_pinned() == 1
    fake.driver.fake_fail(b"cuMemHostRegister", 0, 700)
    with pytest.raises(RuntimeError, match="cuMemHostRegister"):
        fake.copies.attach(2, fake.arena.ctypes.data, fake.arena.nbytes)

    other = np.zeros_like(fake.arena)
    fake.copies.attach(3, other.ctypes.data, other.nbytes, read_only=True)
    assert fake.driver.fake_pinned() == 2 and fake.driver.fake_pinned_for_reading() == 1
    assert fake.copies.detach(3).done() and fake.driver.fake_pinned() == 1

    forward = ctypes.c_void_p(fake.driver.fake_block(ctypes.c_void_p(fake.compute)))
    copy = fake.gather(1)
    left = fake.copies.detach(1)
    assert not fake.run_until(left.done, 0.05) and fake.driver.fake_pinned() == 1
    refused = fake.gather(1)
    assert refused.done() and refused.error
    fake.driver.fake_release(forward)
    assert fake.run_until(left.done) and copy.done() and fake.driver.fake_pinned() == 0
    assert left.error is None and fake.copies.detach(1).done()


def test_close_gives_everything_back(library: Path, tmp_path: Path) -> None:
    device = Device(Path(shutil.copy(library, tmp_path / "libclose.so")))
    device.driver.fake_eager(1)
    ticket = device.gather(1)
    device.copies.close()
    device.copies.close()
    assert ticket.done() and ticket.error is None
    assert device.driver.fake_pinned() == 0 and device.driver.fake_events() == 0
    late = device.gather(2)
    assert late.done() and late.error
    with pytest.raises(RuntimeError, match="closed"):
        device.copies.attach(5, device.arena.ctypes.data, device.arena.nbytes)


def test_the_context_is_given_back(library: Path) -> None:
    driver: Any = ctypes.CDLL(str(library))
    before = driver.fake_retained()
    cuda = _native.Cuda(0, str(library))
    assert driver.fake_retained() == before + 1
    del cuda
    assert driver.fake_retained() == before


def test_a_driver_that_is_not_there() -> None:
    with pytest.raises(OSError, match="cannot open libnothing"):
        _native.Cuda(0, "libnothing-of-the-kind.so")
    with pytest.raises(OSError, match="has no cuInit"):
        _native.Cuda(0, "libc.so.6")


def test_a_device_that_is_not_there(library: Path) -> None:
    with pytest.raises(OSError, match="cuDeviceGet failed with 101"):
        _native.Cuda(9, str(library))


# ---- a real GPU ----


def real_device() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("NO GPU: the CUDA copies were only tested against a stand-in for the driver")
    return torch


@pytest.mark.parametrize("batched", [True, False])
def test_on_a_real_gpu(batched: bool) -> None:
    torch = real_device()
    import mmap

    from lookaside.devices import make_copies

    blocks, run = 256, 64 << 10
    cache = torch.randint(0, 256, (LAYERS, blocks, run), dtype=torch.uint8, device="cuda")
    base, page = cache.data_ptr(), LAYERS * run
    segments = tuple(Segment(base + i * blocks * run, run, run, i * run) for i in range(LAYERS))
    layout = PageLayout(segments, page, blocks, 16, ((base, cache.nbytes),))
    arena = mmap.mmap(-1, blocks * page)
    bytes_ = np.frombuffer(arena, np.uint8).reshape(blocks, LAYERS, run)
    copies = (
        CudaCopies(layout, 0, batched=batched) if not batched else make_copies(layout, cache.device)
    )
    copies.attach(1, bytes_.ctypes.data, bytes_.nbytes)
    addresses = np.uint64(bytes_.ctypes.data) + np.arange(blocks, dtype=np.uint64) * np.uint64(page)
    rng = np.random.default_rng(9)
    for _ in range(5):
        order = rng.permutation(blocks)
        # Work on the compute stream right before the gather: what it writes has to be in the arena.
        torch.cuda._sleep(20_000_000)
        cache.add_(1)
        ticket = copies.gather(order, addresses)
        cache.add_(0)
        assert ticket.wait(30) and ticket.error is None
        want = cache[:, torch.from_numpy(order).cuda()].permute(1, 0, 2).cpu().numpy()
        assert (bytes_ == want).all()
        cache.zero_()
        ticket = copies.scatter(order, addresses)
        assert ticket.wait(30) and ticket.error is None
        assert (
            cache[:, torch.from_numpy(order).cuda()].permute(1, 0, 2).cpu().numpy() == want
        ).all()
    assert copies.detach(1).wait(30)
    refused = copies.gather(order, addresses)
    assert refused.done() and refused.error
    copies.close()
