"""Checks the connector's copies between a GPU and host memory: bytes and speed.

``python -m lookaside.gpucheck`` copies pages as a worker does (cuda.py), from a KV cache of an
ordinary shape into memory that is mapped and page-locked like an arena, and back. It compares every
byte, and the speed with one bare copy of the same buffers. `lookaside doctor --gpu` runs it.

It needs torch, a GPU and some 300 MiB of its memory, and takes a few seconds. Without a GPU it says
so, and nothing is checked.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from lookaside.copies import Ticket
from lookaside.cuda import CudaCopies
from lookaside.layout import PageLayout, Segment

LAYERS = 32
RUN_BYTES = 64 << 10  # of a layer's block: 16 tokens of 8 heads of 128, K and V, in 16 bits
PAGE_BYTES = LAYERS * RUN_BYTES
_ROUNDS = 7
_PATIENCE_S = 20.0
_REGION = 1


class Missing(Exception):
    """Something that the check needs is not there; ``what`` is "torch" or "gpu"."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(reason)
        self.what = what


class Memory(Protocol):
    """The memory of a KV cache on a device."""

    address: int
    name: str
    """The device, for people."""

    def write(self, data: np.ndarray) -> None:
        """Replace all bytes."""
        ...

    def read(self) -> np.ndarray:
        """Return all bytes."""
        ...


class TorchMemory:
    """Memory of a GPU, from torch, which vLLM's KV cache is from too."""

    def __init__(self, torch: Any, ordinal: int, size: int) -> None:
        self._torch = torch
        self._tensor = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{ordinal}")
        self.address = self._tensor.data_ptr()
        self.name = torch.cuda.get_device_name(ordinal)

    def write(self, data: np.ndarray) -> None:
        self._tensor.copy_(self._torch.from_numpy(data.reshape(-1)))
        self._torch.cuda.synchronize()

    def read(self) -> np.ndarray:
        return self._tensor.cpu().numpy()


def torch_memory(ordinal: int, size: int) -> TorchMemory:
    """Return so much memory of a GPU. Raises Missing."""
    try:
        import torch
    except ImportError as error:
        raise Missing("torch", f"{sys.executable} has no torch: {error}") from None
    if not torch.cuda.is_available():
        raise Missing(
            "gpu", f"torch {torch.__version__} sees no GPU here, so that no copy was checked"
        )
    if ordinal >= torch.cuda.device_count():
        raise Missing("gpu", f"there is no GPU {ordinal}: torch sees {torch.cuda.device_count()}")
    return TorchMemory(torch, ordinal, size)


def check(memory: Memory, pages: int, ordinal: int = 0, **cuda: Any) -> dict[str, Any]:
    """Return what was found, in the form that `lookaside doctor` reads.

    memory is a KV cache of so many blocks. cuda goes to CudaCopies. Raises RuntimeError or OSError
    if the driver refuses something.
    """
    size = pages * PAGE_BYTES
    layer_bytes = pages * RUN_BYTES
    base = memory.address
    by_page = PageLayout(
        tuple(
            Segment(base + layer * layer_bytes, RUN_BYTES, RUN_BYTES, layer * RUN_BYTES)
            for layer in range(LAYERS)
        ),
        PAGE_BYTES,
        pages,
        16,
        ((base, size),),
    )
    whole = PageLayout((Segment(base, size, size, 0),), size, 1, 16, ((base, size),))
    arena = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    start = np.uint64(arena.ctypes.data)
    addresses = start + np.arange(pages, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    rng = np.random.default_rng()
    wrong: list[str] = []

    def of_cache(data: np.ndarray, order: np.ndarray) -> np.ndarray:
        """The cache's bytes as pages, in an order of its blocks."""
        layers = data.reshape(LAYERS, pages, RUN_BYTES)
        return layers[:, order].transpose(1, 0, 2).reshape(-1)

    copies = CudaCopies(by_page, ordinal, **cuda)
    try:
        copies.attach(_REGION, int(start), size)
        order = rng.permutation(pages)
        data = rng.integers(0, 256, size, np.uint8)
        memory.write(data)
        stores = _seconds(lambda: copies.gather(order, addresses))
        if not np.array_equal(arena, of_cache(data, order)):
            wrong.append("GPU to host")
        arena[:] = rng.integers(0, 256, size, np.uint8)
        memory.write(np.zeros(size, np.uint8))
        loads = _seconds(lambda: copies.scatter(order, addresses))
        if not np.array_equal(arena, of_cache(memory.read(), order)):
            wrong.append("host to GPU")
    finally:
        copies.close()

    # The same buffers in one copy: as fast as this link is.
    bare = CudaCopies(whole, ordinal, **{**cuda, "batched": False})
    try:
        bare.attach(_REGION, int(start), size)
        one, at = np.zeros(1, np.int64), addresses[:1]
        bare_stores = _seconds(lambda: bare.gather(one, at))
        bare_loads = _seconds(lambda: bare.scatter(one, at))
    finally:
        bare.close()
    return {
        "device": memory.name,
        "bytes": size,
        "store": {"ours": size / stores, "bare": size / bare_stores},
        "load": {"ours": size / loads, "bare": size / bare_loads},
        "wrong": wrong,
        "error": "",
        "missing": "",
    }


def _seconds(copy: Callable[[], Ticket]) -> float:
    """Return how long a copy takes: the median of several, after one that is not counted."""
    took: list[float] = []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        ticket = copy()
        if not ticket.wait(_PATIENCE_S):
            raise RuntimeError(f"a copy did not end within {_PATIENCE_S:.0f} s")
        took.append(time.perf_counter() - begin)
        if ticket.error is not None:
            raise RuntimeError(ticket.error)
    return statistics.median(took[1:])


def report(found: dict[str, Any]) -> str:
    """Return what was found, for people."""
    if found["error"]:
        return str(found["error"])
    lines = [f"{found['device']}, copies of {found['bytes'] >> 20} MiB in pages of {PAGE_BYTES}:"]
    for name, direction in (("store", "GPU to host"), ("load", "host to GPU")):
        speed = found[name]
        lines.append(
            f"  {direction}: {speed['ours'] / 1e9:.1f} GB/s, one bare copy "
            f"{speed['bare'] / 1e9:.1f} GB/s ({100 * speed['ours'] / speed['bare']:.0f} %)"
        )
    lines.append(f"  wrong bytes: {', '.join(found['wrong']) or 'none'}")
    return "\n".join(lines)


def main(
    arguments: Sequence[str] | None = None,
    allocate: Callable[[int, int], Memory] = torch_memory,
    **cuda: Any,
) -> int:
    """Run the check; return 0 if all bytes are right, 1 if not, 2 if nothing could be checked.

    allocate(ordinal, size) returns the KV cache's memory, or raises Missing.
    """
    parser = argparse.ArgumentParser(
        prog="python -m lookaside.gpucheck", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU; default: 0")
    parser.add_argument(
        "--pages", type=int, default=128, help="pages of 2 MiB to copy; default: 128"
    )
    options = parser.parse_args(arguments)
    pages = max(1, options.pages)
    found: dict[str, Any] = {"device": "", "error": "", "missing": "", "wrong": []}
    try:
        memory = allocate(options.device, pages * PAGE_BYTES)
        found = check(memory, pages, options.device, **cuda)
    except Missing as error:
        found.update(error=str(error), missing=error.what)
    except (RuntimeError, OSError) as error:
        found.update(error=f"{type(error).__name__}: {error}")
    sys.stdout.write((json.dumps(found) if options.json else report(found)) + "\n")
    if found["error"]:
        return 2
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
