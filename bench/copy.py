"""Bench `copy`: gather and scatter of 1 GiB of pages against a C memcpy loop over the same runs of
bytes.

Limit and value come from the same process, the same memory and the same plan, one thread each, in
interleaved rounds: only the copy kernel differs. The KV cache is allocated as vLLM does
(torch.zeros, one tensor); the arena as the sidecar does: a memfd with transparent huge pages where
the system grants them, else 4 KiB pages, populated before the first round. Speeds are 10⁹ bytes a
second.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from lookaside import _native
from lookaside.copies import CpuCopies
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
    backing.random_()
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


def measure(
    layout: PageLayout, arena: Arena, rounds: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """GB/s of every round, by direction and kernel."""
    plan = _native.Plan(
        [s[:4] for s in layout.segments], layout.num_blocks, layout.page_bytes, layout.spans
    )
    plan.attach(0, arena.address, arena.size)
    rng = np.random.default_rng(seed)
    kernels = {"limit": _native.MEMCPY}
    streams = [kernel for kernel in (_native.AVX512, _native.NEON) if _native.usable(kernel)]
    kernels["value"] = streams[0] if streams else _native.MEMCPY
    speeds = {direction: {kind: [] for kind in kernels} for direction in ("gather", "scatter")}
    slots = np.uint64(arena.address) + np.arange(layout.num_blocks, dtype=np.uint64) * np.uint64(
        layout.page_bytes
    )
    for turn in range(rounds + 1):
        blocks = rng.permutation(layout.num_blocks)
        for direction in speeds:
            copy = plan.gather if direction == "gather" else plan.scatter
            order = list(kernels.items())
            for kind, kernel in order if turn % 2 else order[::-1]:
                seconds, moved = timed(copy, blocks, slots, kernel=kernel)
                if turn > 0:  # the first round faults pages in and warms the clock up
                    speeds[direction][kind].append(moved / seconds / 1e9)
    plan.detach(0)
    return speeds


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
    for name in ("LBHNC", "LBNHC"):
        for tokens in (16, 128):
            layout, backing = make_layout(name, tokens, options.bytes)
            check(layout, arena, backing)
            for direction, speeds in measure(layout, arena, options.rounds, options.seed).items():
                report.rounds(
                    f"{direction} {name} {tokens} tokens", "GB/s", speeds["value"], speeds["limit"]
                )
            del layout, backing
    return report.finish(options.json)


if __name__ == "__main__":
    raise SystemExit(main())
