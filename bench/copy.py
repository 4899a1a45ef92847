"""Bench `copy`: gather and scatter of 1 GiB of pages against a C memcpy loop over the same runs of
bytes, and what a codec makes of them.

Limit and value come from the same process, the same memory and the same plan, one thread each, in
interleaved rounds: only the copy kernel differs. With a codec (`lookaside.compress`) the limit is
the plain copy as workers make it, and both speeds are in bytes of the KV cache.

The KV cache is allocated as vLLM does (torch.zeros, one tensor); the arena as the sidecar does: a
memfd with transparent huge pages where the system grants them, else 4 KiB pages, populated before
the first round. Speeds are 10⁹ bytes a second.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from lookaside import _native
from lookaside.copies import CpuCopies
from lookaside.encoding import CODECS, encode
from lookaside.layout import PageLayout, Segment

from bench._report import Report, arguments

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

# A model with 8 KV heads of 128 in bf16, so 4 KiB of K and V a token and layer; the layers make a
# page of useful size.
HEADS, TOKEN_BYTES_PER_HEAD, LAYERS = 8, 512, 32


class Arena:
    """Shared memory of the kind that the sidecar hands out."""

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("bench-arena")
        os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for advice in (MADV_HUGEPAGE, MADV_POPULATE_WRITE):
            try:
                self._map.madvise(advice)
            except OSError:
                if advice == MADV_POPULATE_WRITE:
                    ctypes.memset(self.address, 0, size)
        self.huge = self._huge_share()

    def _huge_share(self) -> float:
        """The share of the mapping that huge pages really back: asking for them is not getting
        them."""
        inside, kib = False, 0
        with open("/proc/self/smaps") as smaps:
            for line in smaps:
                if "-" in line.split(" ", 1)[0]:
                    inside = int(line.split("-", 1)[0], 16) == self.address
                elif inside and line.startswith("ShmemPmdMapped:"):
                    kib = int(line.split()[1])
        return kib * 1024 / self.size


def make_layout(name: str, tokens: int, size: int) -> tuple[PageLayout, torch.Tensor]:
    """The layout of a KV cache of `size` bytes, with the tensor that holds it.

    LBHNC and LBNHC place the same runs: one layer's part of a block is contiguous in both, only its
    inside differs.
    """
    run = HEADS * tokens * TOKEN_BYTES_PER_HEAD
    blocks = size // (run * LAYERS)
    backing = torch.zeros(blocks * run * LAYERS, dtype=torch.int8)
    values = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()
    values = values.view(torch.int8)
    for start in range(0, len(backing), len(values)):
        part = backing[start : start + len(values)]
        part.copy_(values[: len(part)])
    inner = (HEADS, tokens) if name == "LBHNC" else (tokens, HEADS)
    cache = backing.view(LAYERS, blocks, *inner, TOKEN_BYTES_PER_HEAD)
    stride, base = cache.stride(1), cache.data_ptr()
    segments = tuple(
        Segment(base + i * cache.stride(0), stride, run, i * run) for i in range(LAYERS)
    )
    return PageLayout(segments, run * LAYERS, blocks, tokens, ((base, backing.nbytes),)), backing


def timed(copy: Callable[..., int], *arguments: object, **options: int) -> tuple[float, int]:
    start = time.perf_counter()
    moved = copy(*arguments, **options)
    return time.perf_counter() - start, moved


class Way(NamedTuple):
    """A plan, and the kernel to copy by."""

    plan: _native.Plan
    page_bytes: int
    kernel: int


def plan_of(layout: PageLayout) -> _native.Plan:
    codec, element = layout.encoding or (_native.PLAIN, 0)
    return _native.Plan(
        [s[:4] for s in layout.segments],
        layout.num_blocks,
        layout.page_bytes,
        layout.spans,
        codec,
        element,
    )


def measure(
    ways: dict[str, Way], blocks: int, arena: Arena, rounds: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """GB/s of every round, by direction and way."""
    plans = {id(way.plan): way.plan for way in ways.values()}.values()
    for plan in plans:
        plan.attach(0, arena.address, arena.size)
    rng = np.random.default_rng(seed)
    speeds = {direction: {name: [] for name in ways} for direction in ("gather", "scatter")}
    for turn in range(rounds + 1):
        order = rng.permutation(blocks)
        each = list(ways.items())
        for name, way in each if turn % 2 else each[::-1]:
            slots = np.uint64(arena.address) + np.arange(blocks, dtype=np.uint64) * np.uint64(
                way.page_bytes
            )
            # There and back, so that a codec finds what it has written.
            for direction in speeds:
                copy = way.plan.gather if direction == "gather" else way.plan.scatter
                seconds, moved = timed(copy, order, slots, kernel=way.kernel)
                if turn > 0:  # the first round faults pages in and warms the clock up
                    speeds[direction][name].append(moved / seconds / 1e9)
    for plan in plans:
        plan.detach(0)
    return speeds


def copy_ways(layout: PageLayout) -> dict[str, Way]:
    """Plain copies by memcpy, and by what is faster here if anything is."""
    plan = plan_of(layout)
    streams = [kernel for kernel in (_native.AVX512, _native.NEON) if _native.usable(kernel)]
    value = streams[0] if streams else _native.MEMCPY
    return {
        "limit": Way(plan, layout.page_bytes, _native.MEMCPY),
        "value": Way(plan, layout.page_bytes, value),
    }


def codec_ways(layout: PageLayout, backing: torch.Tensor) -> dict[str, Way]:
    """Plain copies, and those of each codec, all as workers make them."""
    ways = {"limit": Way(plan_of(layout), layout.page_bytes, _native.DEFAULT)}
    for name in CODECS:
        encoded, reason = encode(layout, name, {"layer": backing.view(torch.bfloat16)})
        assert reason is None, reason
        ways[name] = Way(plan_of(encoded), encoded.page_bytes, _native.DEFAULT)
    return ways


def check(layout: PageLayout, arena: Arena, backing: torch.Tensor) -> None:
    """Gathers with what the product uses, and compares with numpy: a fast copy that is wrong is
    worth nothing."""
    copies = CpuCopies(layout)
    copies.attach(0, arena.address, arena.size)
    blocks = np.arange(layout.num_blocks)[::-1][:64].copy()
    slots = np.uint64(arena.address) + np.arange(len(blocks), dtype=np.uint64) * np.uint64(
        layout.page_bytes
    )
    ticket = copies.gather(blocks, slots)
    assert ticket.error is None, ticket.error
    raw = backing.numpy().view(np.uint8).reshape(LAYERS, layout.num_blocks, -1)
    size = len(blocks) * layout.page_bytes
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(arena.address)).reshape(
        len(blocks), LAYERS, -1
    )
    assert (pages == raw[:, blocks].transpose(1, 0, 2)).all(), "the copy is wrong"
    copies.close()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--bytes", type=int, default=1 << 30, help="bytes of pages copied a round (default 1 GiB)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds a case (default 9)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the order of the blocks (default 1)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    arena = Arena(options.bytes)
    print(
        f"arena: {options.bytes >> 20} MiB, {arena.huge:.0%} in huge pages; one thread",
        file=sys.stderr,
    )
    report = Report("copy")
    coded: dict[int, dict[str, dict[str, list[float]]]] = {}
    for name in ("LBHNC", "LBNHC"):
        for tokens in (16, 128):
            layout, backing = make_layout(name, tokens, options.bytes)
            check(layout, arena, backing)
            ways = copy_ways(layout)
            found = measure(ways, layout.num_blocks, arena, options.rounds, options.seed)
            for direction, speeds in found.items():
                report.rounds(
                    f"{direction} {name} {tokens} tokens", "GB/s", speeds["value"], speeds["limit"]
                )
            if name == "LBHNC":
                ways = codec_ways(layout, backing)
                coded[tokens] = measure(
                    ways, layout.num_blocks, arena, options.rounds, options.seed
                )
            del layout, backing
    for tokens, found in coded.items():
        for direction, speeds in found.items():
            for codec in CODECS:
                report.rounds(
                    f"{direction} {codec} {tokens} tokens",
                    "GB/s",
                    speeds[codec],
                    speeds["limit"],
                )
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
