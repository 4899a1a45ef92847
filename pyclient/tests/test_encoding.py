"""Encoded pages: each codec against a reference in numpy, its bounds, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lookaside import _native
from lookaside.copies import CpuCopies
from lookaside.encoding import CODECS, encode
from lookaside.layout import PageLayout, Segment

GOLDEN = Path(__file__).parents[2] / "tiers" / "serde" / "testdata" / "quantised.json"
GROUP = 128
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = {
    name: kernel
    for name, kernel in {
        "plain": _native.MEMCPY,
        "avx2": _native.AVX2,
        "avx512": _native.AVX512,
        "neon": _native.NEON,
    }.items()
    if _native.usable(kernel)
}
BLOCKS = 3


def numbers(dtype: str, count: int, kind: str, seed: int = 1) -> torch.Tensor:
    """As keys and values are ("kv": a scale for each of 64 channels), or as hard as can be."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=count)
    if kind == "kv":
        x *= np.exp(rng.normal(size=64))[np.arange(count) % 64]
    elif kind == "outliers":
        x *= np.where(rng.random(count) < 0.01, 100, 1)
    elif kind == "magnitudes":
        x *= np.exp2(rng.integers(-20, 12, count))
    elif kind == "denormals":
        x *= float(torch.finfo(getattr(torch, dtype)).tiny) / 4
    elif kind == "zeros":
        x *= rng.random(count) < 0.5
    elif kind == "nothing":
        x *= 0
    elif kind == "largest":
        x = np.sign(x) * float(torch.finfo(getattr(torch, dtype)).max)
    return torch.from_numpy(x).to(torch.float64).to(getattr(torch, dtype))


KINDS = ("kv", "outliers", "magnitudes", "denormals", "zeros", "nothing", "largest")


class Cache:
    """Two layers of a KV cache, whose runs are or are not whole groups, and an arena."""

    def __init__(self, tensor: torch.Tensor, compress: str, runs: tuple[int, int]) -> None:
        size = tensor.element_size()
        one, two = (run * size for run in runs)
        self.one, self.two = runs
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.cache = tensor
        base = tensor.data_ptr()
        segments = (
            Segment(base, one, one, 0),
            Segment(base + BLOCKS * one, two, two, one),
        )
        plain = PageLayout(
            segments, one + two, BLOCKS, 16, ((base, tensor.numel() * size),), {"layout": "x"}
        )
        self.layout, reason = encode(plain, compress, {"layer": tensor})
        assert reason is None, reason
        self.copies = CpuCopies(self.layout)
        self.arena = np.zeros((BLOCKS, self.layout.page_bytes), np.uint8)
        self.copies.attach(1, self.arena.ctypes.data, self.arena.nbytes)
        self.where = np.uint64(self.arena.ctypes.data) + np.arange(BLOCKS, dtype=np.uint64) * (
            np.uint64(self.layout.page_bytes)
        )

    def block(self, number: int) -> torch.Tensor:
        """The elements of a block, as its page has them."""
        first = self.cache[number * self.one : (number + 1) * self.one]
        rest = self.cache[BLOCKS * self.one :]
        return torch.cat([first, rest[number * self.two : (number + 1) * self.two]])


def there_and_back(cache: Cache, kernel: int) -> list[torch.Tensor]:
    """What the blocks are after they were stored and loaded."""
    cache.copies._kernel = kernel
    blocks = np.arange(BLOCKS)
    gathered = cache.copies.gather(blocks, cache.where)
    assert gathered.done() and (gathered.error, gathered.unfit) == (None, ())
    cache.cache.zero_()
    scattered = cache.copies.scatter(blocks, cache.where)
    assert scattered.wait(60) and scattered.error is None
    return [cache.block(number) for number in blocks]


def grouped(x: np.ndarray) -> np.ndarray:
    """In groups, the last one filled up with zeros."""
    return np.pad(x, (0, -len(x) % GROUP)).reshape(-1, GROUP)


E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ][:127]
)


def reference(x: np.ndarray, compress: str) -> tuple[np.ndarray, np.ndarray]:
    """The scales and the codes of a block, by the definition in tiers/serde/quantised.go."""
    rows = grouped(x.astype(np.float32))
    most = np.float32(127 if compress == "int8" else 448)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        scales = np.abs(rows).max(axis=1) / most
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0)).astype(np.float32)
        scales = np.where(np.isinf(inverse), np.float32(0), scales)
        inverse = np.where(np.isinf(inverse), np.float32(0), inverse)
        scaled = rows * inverse[:, None]
    if compress == "int8":
        return scales, np.rint(scaled).astype(np.int8).view(np.uint8)
    wide = np.abs(scaled).astype(np.float64)
    above = np.searchsorted(E4M3, wide).clip(1, 126)
    below = above - 1
    nearer = wide - E4M3[below] - (E4M3[above] - wide)
    codes = np.where((nearer < 0) | ((nearer == 0) & (below % 2 == 0)), below, above)
    return scales, (codes | np.signbit(scaled) << 7).astype(np.uint8)


RUNS = ((512, 1024), (100, 77), (1, 3), (128 * 9 + 5, 640), (2048, 127))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compress", ["int8", "fp8"])
def test_rounding_codecs(compress: str, dtype: str, kind: str, runs: tuple[int, int]) -> None:
    """All kernels write the reference's bytes; what they read back is within the bounds."""
    tensor = numbers(dtype, BLOCKS * sum(runs), kind)
    before = tensor.clone()
    seen: list[list[torch.Tensor]] = []
    for kernel in KERNELS.values():
        tensor.copy_(before)
        cache = Cache(tensor, compress, runs)
        blocks = [cache.block(number) for number in range(BLOCKS)]
        after = there_and_back(cache, kernel)
        for number, (was, now) in enumerate(zip(blocks, after, strict=True)):
            x = was.to(torch.float32).numpy()
            scales, codes = reference(x, compress)
            page = cache.arena[number]
            groups = len(scales)
            assert (page[: 4 * groups].view(np.float32) == scales).all()
            assert (page[4 * groups : 132 * groups] == codes.ravel()).all()
            wrong = np.abs(now.to(torch.float64).numpy() - x.astype(np.float64))
            tiny = float(torch.finfo(was.dtype).tiny)
            rounding = np.abs(x) * float(torch.finfo(was.dtype).eps) + tiny
            largest = grouped(np.abs(x)).max(axis=1).repeat(GROUP)[: len(x)].astype(np.float64)
            if compress == "int8":  # half a step of the group's
                bound = largest / 127 / 2
            else:  # half of the last of three bits of mantissa, or of the smallest number
                bound = np.maximum(np.abs(x) / 16, largest / 448 / 1024)
            # And the rounding to the elements' own type.
            assert (wrong <= bound * 1.001 + rounding).all()
        cache.copies.close()
        seen.append(after)
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "magnitudes"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lossless(dtype: str, kind: str, runs: tuple[int, int]) -> None:
    """Every bit comes back, of infinities and NaNs too; pages are as small as is said."""
    tensor = numbers(dtype, BLOCKS * sum(runs), kind)
    if kind == "largest":  # an infinity is as near to these as the next smaller power of two
        tensor[::1000] = float("inf")
        tensor[::1001] = float("nan")
    before = tensor.clone()
    for kernel in KERNELS.values():
        tensor.copy_(before)
        cache = Cache(tensor, "lossless", runs)
        blocks = [cache.block(number) for number in range(BLOCKS)]
        after = there_and_back(cache, kernel)
        for was, now in zip(blocks, after, strict=True):
            assert (was.view(torch.uint8) == now.view(torch.uint8)).all()
        cache.copies.close()
    raw = sum(runs) * tensor.element_size()
    if runs == (512, 1024):
        ratio = raw / cache.layout.page_bytes
        assert ratio == pytest.approx({"bfloat16": 1.31, "float32": 1.13}[dtype], abs=0.02)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("compress", "spoil"),
    [("int8", "inf"), ("fp8", "nan"), ("int8", "-inf"), ("lossless", "magnitudes")],
)
def test_what_a_codec_cannot_keep_is_named(compress: str, spoil: str, kernel: int) -> None:
    """Of three pages one cannot be kept: it is named, and the others are as they should be."""
    runs = (512, 1024)
    tensor = numbers("bfloat16", BLOCKS * sum(runs), "kv")
    if spoil == "magnitudes":
        tensor[512:1024] = numbers("bfloat16", 512, "magnitudes")
    else:
        tensor[700] = float(spoil)
    cache = Cache(tensor, compress, runs)
    cache.copies._kernel = kernel
    blocks = np.array([2, 1, 0])
    ticket = cache.copies.gather(blocks, cache.where)
    assert ticket.done() and ticket.error is None and ticket.unfit == (1,)
    alone = Cache(tensor, compress, runs)
    alone.copies._kernel = kernel
    assert alone.copies.gather(blocks[[0, 2]], alone.where[[0, 2]]).unfit == ()
    assert (alone.arena[[0, 2]] == cache.arena[[0, 2]]).all()
    for each in (alone, cache):
        each.copies.close()


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_garbage_in_the_arena_is_an_error_or_other_numbers(kernel: int) -> None:
    """Whatever a client has written there: nothing but the blocks that were named is written."""
    for compress in CODECS:
        tensor = numbers("bfloat16", BLOCKS * 1500, "kv")
        cache = Cache(tensor, compress, (512, 988))
        cache.copies._kernel = kernel
        untouched = cache.block(0).clone()
        for seed in range(20):
            rng = np.random.default_rng(seed)
            cache.arena[:] = rng.integers(0, 256, cache.arena.shape, np.uint8)
            ticket = cache.copies.scatter(np.array([1]), cache.where[:1])
            assert ticket.wait(60)
            assert (ticket.error is None) == (compress != "lossless")
            assert torch.equal(cache.block(0), untouched)
        cache.copies.close()


def test_absent_blocks_and_columns() -> None:
    """A page of two blocks, one of which vLLM does not have: the other one is encoded alone."""
    tensor = numbers("bfloat16", 4 * 256, "kv")
    base, size = tensor.data_ptr(), 512
    segments = (Segment(base, size, size, 0, 0), Segment(base, size, size, size, 1))
    plain = PageLayout(segments, 2 * size, 4, 16, ((base, tensor.numel() * 2),))
    layout, reason = encode(plain, "int8", {"layer": tensor})
    assert reason is None and layout.column_bytes == (320, 320) and layout.page_bytes == 640
    copies = CpuCopies(layout)
    arena = np.zeros((2, 640), np.uint8)
    copies.attach(1, arena.ctypes.data, arena.nbytes)
    where = np.array([arena.ctypes.data, arena.ctypes.data + 640], np.uint64)
    tensor[256 + 3] = float("nan")  # in block 1
    rows = np.array([[0, 2], [3, 1]])
    assert copies.gather(rows, where).unfit == (1,)
    arena[:] = 0
    assert copies.gather(np.array([[0, -1], [-1, 3]]), where).unfit == ()
    assert arena[0, :320].any() and not arena[0, 320:].any()
    assert not arena[1, :320].any() and arena[1, 320:].any()
    copies.close()


def refusal(compress: str, **changes: Any) -> str:
    layout = PageLayout((Segment(0, 256, 256, 0),), 256, 1, 16, ((0, 256),), {"a": "b"})
    states = changes.pop("states", 0)
    fields = {"device": "cpu", "dtype": torch.bfloat16, **changes}
    tensors = {"layer": SimpleNamespace(**fields)}
    if "second" in fields:
        tensors["second"] = SimpleNamespace(device="cpu", dtype=fields["second"])
    given = replace(layout, states=states)
    same, reason = encode(given, compress, tensors)
    assert same is given and reason is not None
    return reason


def test_what_cannot_be_encoded_stays_as_it_is() -> None:
    assert "host memory" in refusal("int8", device="cuda:0")
    assert "--kv-cache-dtype fp8" in refusal("lossless", device="cuda:0")
    assert "state" in refusal("fp8", states=1)
    assert "uint8" in refusal("int8", dtype=torch.uint8)
    assert "float8_e4m3fn" in refusal("fp8", dtype=torch.float8_e4m3fn)
    assert "different elements" in refusal("fp8", second=torch.float32)
    assert "float16" in refusal("lossless", dtype=torch.float16)


def test_the_space_says_how_pages_are_encoded() -> None:
    tensor = numbers("bfloat16", 256, "kv")
    layout = PageLayout(
        (Segment(tensor.data_ptr(), 512, 512, 0),), 512, 1, 16, ((tensor.data_ptr(), 512),), {}
    )
    assert encode(layout, "none", {"layer": tensor}) == (layout, None)
    told = {
        name: encode(layout, name, {"layer": tensor})[0].description["encoding"] for name in CODECS
    }
    assert told["int8"] == "int8 of bfloat16, version 1" and len(set(told.values())) == 3


def test_plans_with_a_codec_are_checked() -> None:
    tensor = numbers("bfloat16", 256, "kv")
    base = tensor.data_ptr()
    spans = [(base, 512)]

    def plan(segments: list[tuple[int, int, int, int]], page: int, codec: int, element: int) -> Any:
        return _native.Plan(segments, 1, page, spans, codec, element)

    good = [(base, 512, 512, 0)]
    plan(good, 320, _native.INT8, _native.BFLOAT16)
    for segments, page, codec, element in (
        (good, 319, _native.INT8, _native.BFLOAT16),
        (good, 320, _native.INT8, 0),
        (good, 320, 4, _native.BFLOAT16),
        (good, 320, -1, _native.BFLOAT16),
        (good, 512, _native.LOSSLESS, _native.FLOAT16),
        ([(base, 512, 512, 64)], 512, _native.INT8, _native.BFLOAT16),
        ([(base, 511, 511, 0)], 512, _native.INT8, _native.BFLOAT16),
    ):
        with pytest.raises(ValueError):
            plan(segments, page, codec, element)
    for codec, element, size in (
        (1, 1, 0),
        (1, 1, 3),
        (0, 1, 2),
        (3, 2, 512),
        (1, 3, (1 << 64) - 4),
    ):
        with pytest.raises(ValueError):
            _native.encoded_bytes(codec, element, size)


def test_failures_without_a_place_to_name_them_are_raised() -> None:
    tensor = torch.full((256,), float("inf"), dtype=torch.bfloat16)
    base = tensor.data_ptr()
    plan = _native.Plan(
        [(base, 512, 512, 0)], 1, 320, [(base, 512)], _native.INT8, _native.BFLOAT16
    )
    arena = np.zeros(320, np.uint8)
    plan.attach(1, arena.ctypes.data, 320)
    where = np.array([arena.ctypes.data], np.uint64)
    with pytest.raises(ValueError, match="1 of 1 pages cannot be encoded"):
        plan.gather(np.array([0]), where)
    for wrong in (bytearray(2), b"\0", 3):
        with pytest.raises((ValueError, TypeError, BufferError)):
            plan.gather(np.array([0]), where, failed=wrong)
    failed = bytearray(1)
    assert plan.gather(np.array([0]), where, failed=failed) == 0 and failed == b"\1"


def golden_of(compress: str, dtype: str, page: bytes, kernel: int) -> tuple[str, str]:
    """What the copies make of a page, and of that again, in hexadecimal."""
    given = torch.frombuffer(bytearray(page), dtype=getattr(torch, dtype))
    base, size = given.data_ptr(), len(page)
    plain = PageLayout((Segment(base, size, size, 0),), size, 1, 16, ((base, size),))
    layout, reason = encode(plain, compress, {"layer": given})
    assert reason is None
    copies = CpuCopies(layout)
    copies._kernel = kernel
    arena = np.zeros(layout.page_bytes, np.uint8)
    copies.attach(1, arena.ctypes.data, arena.nbytes)
    where = np.array([arena.ctypes.data], np.uint64)
    assert copies.gather(np.array([0]), where).unfit == ()
    given.zero_()
    assert copies.scatter(np.array([0]), where).wait(60)
    copies.close()
    body = given.numel() + given.numel() // GROUP * 4
    return arena[:body].tobytes().hex(), given.view(torch.uint8).numpy().tobytes().hex()


def write_golden() -> None:
    """Write GOLDEN anew, by plain C."""
    made = []
    for number, (compress, dtype) in enumerate(
        (compress, dtype) for compress in ("int8", "fp8") for dtype in DTYPES
    ):
        parts = [numbers(dtype, GROUP, kind, number) for kind in ("kv", "denormals", "outliers")]
        page = torch.cat(parts).view(torch.uint8).numpy().tobytes()
        encoded, decoded = golden_of(compress, dtype, page, _native.MEMCPY)
        made.append(
            {
                "codec": compress,
                "element": dtype,
                "page": page.hex(),
                "encoded": encoded,
                "decoded": decoded,
            }
        )
    GOLDEN.write_text(json.dumps(made, indent=1) + "\n")


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_tiers_codecs_are_the_same(kernel: int) -> None:
    """TestGolden in tiers/serde reads the same pages."""
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) == 6
    for each in golden:
        made = golden_of(each["codec"], each["element"], bytes.fromhex(each["page"]), kernel)
        assert made == (each["encoded"], each["decoded"])
