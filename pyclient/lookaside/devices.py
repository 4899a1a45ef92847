"""Which copies a KV cache needs, by the device that it is on."""

from __future__ import annotations

from collections.abc import Callable

from lookaside.copies import POOL_THREADS, Copies, CpuCopies
from lookaside.cuda import CudaCopies
from lookaside.layout import PageLayout


def make_copies(
    layout: PageLayout,
    device: object,
    *,
    threads: int = POOL_THREADS,
    compute_stream: Callable[[], int] | None = None,
) -> Copies:
    """Return the copies for a KV cache on this device ("cpu", "cuda:1", a torch.device).

    threads is how many copy on a CPU; for compute_stream see CudaCopies. Raises ValueError for a
    device that has no copies, RuntimeError or OSError when its driver cannot be used.
    """
    kind, _, index = str(device).partition(":")
    if kind == "cpu":
        return CpuCopies(layout, threads)
    if kind == "cuda":
        return CudaCopies(layout, int(index or 0), compute_stream=compute_stream)
    raise ValueError(f"KV cache on {device}: only cpu and cuda are supported")
