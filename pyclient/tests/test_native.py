"""The copy core: swept under sanitizers in C, then its Python face."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from lookaside import _native

HERE = Path(__file__).parent
SOURCES = HERE.parent / "lookaside"
SEED = int(os.environ.get("LOOKASIDE_TEST_SEED", "20260"))


def test_core_under_sanitizers(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "native_sweep"
    build = [
        compiler,
        "-g",
        "-O1",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-ffp-contract=off",
        "-fno-sanitize-recover=all",
    ]
    build += ["-fsanitize=address,undefined", f"-I{SOURCES}", str(HERE / "native_sweep.c")]
    build += ["-o", str(program), "-ldl", "-pthread"]
    made = subprocess.run(build, capture_output=True, text=True)
    if made.returncode != 0 and "sanitize" in made.stderr and "cannot find" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    # A process that preloads something else (a profiler, say) cannot load the sanitizer first.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    swept = subprocess.run(
        [str(program), str(SEED), "200"], capture_output=True, text=True, env=environment
    )
    assert swept.returncode == 0, f"seed {SEED}: {swept.stderr}"


def kernels() -> list[int]:
    every = (_native.MEMCPY, _native.AVX512, _native.NEON)
    return [kernel for kernel in every if _native.usable(kernel)]


def span(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def small_plan(cache: np.ndarray) -> _native.Plan:
    """Four blocks of two 8-byte runs, 16 bytes apart."""
    base = cache.ctypes.data
    return _native.Plan([(base, 16, 8, 0), (base + 64, 16, 8, 8)], 4, 16, [span(cache)])


@pytest.mark.parametrize("kernel", kernels())
def test_gather_and_scatter(kernel: int) -> None:
    cache, arena = np.arange(128, dtype=np.uint8), np.zeros(64, np.uint8)
    plan = small_plan(cache)
    assert plan.payload_bytes == 16
    plan.attach(7, *span(arena))
    addresses = np.array([48, 0], np.uint64) + np.uint64(arena.ctypes.data)
    assert plan.gather(np.array([1, 3]), addresses, kernel=kernel) == 32
    assert arena[48:64].tolist() == [*range(16, 24), *range(80, 88)]
    assert arena[0:16].tolist() == [*range(48, 56), *range(112, 120)]
    assert not arena[16:48].any()
    assert plan.scatter(np.array([0, 2]), addresses, kernel=kernel) == 32
    assert cache[0:8].tolist() == list(range(16, 24)) and cache[64:72].tolist() == list(
        range(80, 88)
    )
    assert cache[32:40].tolist() == list(range(48, 56)) and cache[96:104].tolist() == list(
        range(112, 120)
    )


def test_nothing_moves_unless_all_pairs_are_right() -> None:
    cache, arena = np.arange(128, dtype=np.uint8), np.zeros(64, np.uint8)
    before = cache.copy()
    plan = small_plan(cache)
    plan.attach(1, *span(arena))
    start = arena.ctypes.data
    good = [0, 1, 2]
    for wrong in (-1, 4, 1 << 40, -(1 << 63), (1 << 63) - 1):
        with pytest.raises(ValueError, match=r"blocks\[2\]"):
            plan.gather(np.array([0, 1, wrong]), np.full(3, start, np.uint64))
    for wrong in (0, start - 1, start + 49, start + 64, (1 << 64) - 1, (1 << 64) - 16, 1 << 63):
        addresses = np.array([start, start + 16, wrong], np.uint64)
        for copy in (plan.gather, plan.scatter):
            with pytest.raises(ValueError, match=r"addresses\[2\].*16 bytes"):
                copy(np.array(good), addresses)
    assert not arena.any() and (cache == before).all()


def test_a_page_must_lie_in_one_region() -> None:
    cache, arena = np.arange(128, dtype=np.uint8), np.zeros(64, np.uint8)
    plan = small_plan(cache)
    start = arena.ctypes.data
    plan.attach(1, start, 24)
    plan.attach(2, start + 24, 40)
    plan.gather(np.array([0, 1]), np.array([start + 8, start + 48], np.uint64))
    with pytest.raises(ValueError):
        plan.gather(np.array([0]), np.array([start + 16], np.uint64))
    assert plan.detach(1) and not plan.detach(1)
    with pytest.raises(ValueError):
        plan.gather(np.array([0]), np.array([start], np.uint64))
    plan.gather(np.array([0]), np.array([start + 24], np.uint64))


def test_wrong_arrays_are_refused() -> None:
    cache, arena = np.zeros(128, np.uint8), np.zeros(64, np.uint8)
    plan = small_plan(cache)
    plan.attach(1, *span(arena))
    blocks, addresses = np.zeros(2, np.int64), np.full(2, arena.ctypes.data, np.uint64)
    for bad in (
        blocks.astype(np.int32),
        blocks.astype(np.uint64),
        blocks.astype(float),
        blocks.reshape(1, 2),
        b"12345678",
    ):
        with pytest.raises(TypeError, match="blocks"):
            plan.gather(bad, addresses)
    for bad in (addresses.astype(np.int64), addresses.astype(np.uint32)):
        with pytest.raises(TypeError, match="addresses"):
            plan.gather(blocks, bad)
    with pytest.raises((TypeError, ValueError, BufferError)):
        plan.gather(np.zeros(4, np.int64)[::2], addresses)
    with pytest.raises(ValueError, match="2 blocks but 1 addresses"):
        plan.gather(blocks, addresses[:1])
    with pytest.raises(ValueError, match="kernel"):
        plan.gather(blocks, addresses, kernel=99)
    assert plan.gather(blocks[:0], addresses[:0]) == 0


@pytest.mark.parametrize(
    ("segments", "num_blocks", "page_bytes", "why"),
    [
        ([], 4, 16, "no segments"),
        ([(0, 16, 8, 0)], 0, 16, "num_blocks"),
        ([(0, 16, 8, 0)], (1 << 64) - 1, 16, "num_blocks"),
        ([(0, 16, 0, 0)], 4, 16, "length"),
        ([(0, 4, 8, 0)], 4, 16, "overlap"),
        ([(0, 16, 8, 9)], 4, 16, "page_bytes"),
        ([(0, 16, 8, (1 << 64) - 4)], 4, 16, "page_bytes"),
        ([(0, 16, 8, 8), (64, 16, 8, 0)], 4, 16, "before"),
        ([(0, 16, 8, 0)], 9, 16, "KV cache"),
        ([(121, 16, 8, 0)], 1, 16, "KV cache"),
        ([(0, 1 << 62, 8, 0)], 4, 16, "KV cache"),
        ([(0, 1 << 62, 8, 0)], 5, 16, "KV cache"),
    ],
)
def test_a_plan_that_reaches_too_far_is_refused(
    segments: list[tuple[int, int, int, int]], num_blocks: int, page_bytes: int, why: str
) -> None:
    cache = np.zeros(128, np.uint8)
    moved = [(base + cache.ctypes.data, *rest) for base, *rest in segments]
    with pytest.raises(ValueError, match=why):
        _native.Plan(moved, num_blocks, page_bytes, [span(cache)])


def test_malformed_plans_are_refused() -> None:
    cache = np.zeros(128, np.uint8)
    for segments in (
        None,
        [None],
        [(1, 2, 3)],
        [(1, 2, 3, "4")],
        [(-1, 2, 3, 4)],
        [(1 << 64, 2, 3, 4)],
    ):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            _native.Plan(segments, 4, 16, [span(cache)])  # type: ignore[arg-type]
    plan = small_plan(cache)
    for address, size in ((1 << 63, 1 << 63), ((1 << 64) - 8, 8), (4096, 0)):
        with pytest.raises(ValueError, match="region 3"):
            plan.attach(3, address, size)
    plan.attach(3, 4096, 8)
    with pytest.raises(ValueError, match="already"):
        plan.attach(3, 1 << 20, 8)


def test_random_plans_agree_with_numpy() -> None:
    rng = random.Random(SEED)
    for _ in range(60):
        num_blocks, segments, offset, size = rng.randint(1, 9), [], 0, rng.randint(0, 64)
        for _ in range(rng.randint(1, 5)):
            length = rng.choice([1, 63, 64, 65, 1023, 1024, 4096, 65536, rng.randint(1, 300_000)])
            stride = length + rng.choice([0, 0, 64, rng.randint(0, 99)])
            segments.append((size, stride, length, offset))
            size += stride * num_blocks
            offset += length + rng.choice([0, rng.randint(0, 70)])
        cache = np.frombuffer(rng.randbytes(size), np.uint8).copy()
        arena = np.frombuffer(rng.randbytes(offset * num_blocks + 64), np.uint8).copy()
        moved = [(base + cache.ctypes.data, *rest) for base, *rest in segments]
        plan = _native.Plan(moved, num_blocks, offset, [span(cache)])
        plan.attach(0, *span(arena))
        count = rng.randint(0, num_blocks)
        blocks = np.array(rng.sample(range(num_blocks), count), np.int64)
        pages = np.array(rng.sample(range(num_blocks), count), np.uint64) * np.uint64(
            offset
        ) + np.uint64(rng.randint(0, 64))
        addresses = pages + np.uint64(arena.ctypes.data)
        for kernel in kernels():
            for gather in (True, False):
                want_cache, want_arena = cache.copy(), arena.copy()
                for block, page in zip(blocks.tolist(), pages.tolist(), strict=True):
                    for base, stride, length, at in segments:
                        there = slice(base + block * stride, base + block * stride + length)
                        here = slice(page + at, page + at + length)
                        if gather:
                            want_arena[here] = cache[there]
                        else:
                            want_cache[there] = arena[here]
                (plan.gather if gather else plan.scatter)(blocks, addresses, kernel=kernel)
                assert (cache == want_cache).all() and (arena == want_arena).all(), f"seed {SEED}"


def test_plans_do_not_leak() -> None:
    cache = np.zeros(128, np.uint8)
    references = sys.getrefcount(_native.Plan)
    for _ in range(2000):
        plan = small_plan(cache)
        plan.attach(1, *span(cache))
        with pytest.raises(ValueError):
            _native.Plan([(0, 16, 8, 0)], 4, 16, [span(cache)])
    del plan
    assert sys.getrefcount(_native.Plan) < references + 10


# ---- bus errors ----

CUT = """
import faulthandler, os, mmap, signal, sys, threading
import numpy as np
from lookaside import _native

PAGE = 65536
cache = np.arange(4 * PAGE, dtype=np.uint8)
plan = _native.Plan(
    [(cache.ctypes.data, PAGE, PAGE, 0)], 4, PAGE, [(cache.ctypes.data, cache.nbytes)]
)
fd = os.memfd_create("cut")
os.ftruncate(fd, 4 * PAGE)
mapping = mmap.mmap(fd, 4 * PAGE)
arena = np.frombuffer(mapping, np.uint8)
address = arena.ctypes.data
blocks = np.arange(4)
addresses = np.uint64(address) + np.arange(4, dtype=np.uint64) * np.uint64(PAGE)

def attach():
    plan.attach(1, address, arena.nbytes)

def cut():
    os.ftruncate(fd, 2 * PAGE)

def copies_fail():
    for copy in (plan.gather, plan.scatter):
        for kernel in (_native.MEMCPY, _native.AVX512, _native.NEON):
            if not _native.usable(kernel):
                continue
            for first in (0, 3):
                try:
                    copy(blocks[first:], addresses[first:], kernel=kernel)
                    raise SystemExit("copied what is not there")
                except _native.BusError as error:
                    message, where = error.args
                    assert address + 2 * PAGE <= where < address + 4 * PAGE, error
                    assert hex(where) in message, error
            assert copy(blocks[:2], addresses[:2], kernel=kernel) == 2 * PAGE
            assert (arena[: 2 * PAGE] == cache[: 2 * PAGE]).all()
"""


def run(program: str, **more: str) -> subprocess.CompletedProcess:
    """Runs what follows CUT in a process of its own; no core is dumped."""
    program = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n" + CUT + program
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), **more}
    environment.pop("PYTHONFAULTHANDLER", None)
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )


def test_a_copy_from_what_is_not_there_fails_alone() -> None:
    """Again and again, on every thread, while others copy what is there."""
    done = run("""
attach()
cut()
copies_fail()
threads = [threading.Thread(target=lambda: [copies_fail() for _ in range(20)]) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert signal.SIGBUS not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
os.ftruncate(fd, 4 * PAGE)
assert plan.gather(blocks, addresses) == 4 * PAGE and (arena == cache).all()
print("lives")
""")
    assert (done.returncode, done.stdout.strip()) == (0, "lives"), done


def test_the_modes_of_arithmetic_survive() -> None:
    """A handler may begin with the default ones, and leaving it by a jump would keep them."""
    done = run("""
import ctypes, platform
upward = {"x86_64": 0x800, "aarch64": 0x400000}[platform.machine()]
one, tiny = float(sys.argv[0] and 1), 1e-30
assert one + tiny == 1
assert ctypes.CDLL("libm.so.6").fesetround(upward) == 0
assert one + tiny > 1
attach()
cut()
copies_fail()
assert one + tiny > 1, "it rounds as ever again"
print("lives")
""")
    assert (done.returncode, done.stdout.strip()) == (0, "lives"), done


@pytest.mark.parametrize(
    "how",
    [
        "arena[3 * PAGE]",
        "os.kill(os.getpid(), signal.SIGBUS)",
        "signal.raise_signal(signal.SIGBUS)",
    ],
)
@pytest.mark.parametrize("handler", ["none", "faulthandler before", "faulthandler after"])
def test_a_bus_error_outside_of_a_copy_kills_as_ever(how: str, handler: str) -> None:
    before = "faulthandler.enable()" if handler == "faulthandler before" else ""
    after = "faulthandler.enable()" if handler == "faulthandler after" else ""
    done = run(f"""
{before}
attach()
{after}
cut()
{"copies_fail()" if not after else ""}
print("copied", flush=True)
{how}
print("lives")
""")
    assert done.returncode == -signal.SIGBUS and done.stdout.strip() == "copied", done
    assert ("Fatal Python error: Bus error" in done.stderr) == (handler != "none"), done.stderr


def test_a_fault_handler_that_was_installed_later_tells_and_lets_live() -> None:
    done = run("""
attach()
faulthandler.enable()
cut()
try:
    plan.gather(blocks, addresses)
except _native.BusError as error:
    print(error.args[1])
copies_fail()
print("lives")
""")
    assert (done.returncode, done.stdout.split()) == (0, ["0", "lives"]), done
    assert "Fatal Python error: Bus error" in done.stderr


def test_other_handlers_of_bus_errors_are_called() -> None:
    done = run("""
heard = []
signal.signal(signal.SIGBUS, lambda number, frame: heard.append(number))
attach()
cut()
copies_fail()
assert not heard
os.kill(os.getpid(), signal.SIGBUS)
while not heard: pass
copies_fail()
print("lives")
""")
    assert (done.returncode, done.stdout.strip()) == (0, "lives"), done
    done = run("""
signal.signal(signal.SIGBUS, signal.SIG_IGN)
attach()
cut()
os.kill(os.getpid(), signal.SIGBUS)
copies_fail()
print("ignored", flush=True)
arena[3 * PAGE]
print("lives")
""")
    assert (done.returncode, done.stdout.strip()) == (-signal.SIGBUS, "ignored"), done
