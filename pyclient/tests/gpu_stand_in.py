"""Runs lookaside.gpucheck on the stand-in for the driver: python gpu_stand_in.py LIBRARY [HARM] …

Stands for ``python -m lookaside.gpucheck``: what follows is for that. HARM is the name of a call of
the driver that fails, or "bytes" for memory that changes by itself.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from lookaside import gpucheck


class HostMemory:
    """Memory that the stand-in takes for a GPU's."""

    name = "stand-in"

    def __init__(self, size: int, spoil: bool) -> None:
        self._bytes = np.zeros(size, np.uint8)
        self._spoil = spoil
        self.address = self._bytes.ctypes.data

    def write(self, data: np.ndarray) -> None:
        self._bytes[:] = data.reshape(-1)
        if self._spoil:
            self._bytes[12345] ^= 1

    def read(self) -> np.ndarray:
        return self._bytes.copy()


def main(library: str, harm: str, arguments: list[str]) -> int:
    driver: Any = ctypes.CDLL(library)
    driver.fake_stream.restype = ctypes.c_void_p
    driver.fake_eager(1)
    if harm not in ("none", "bytes"):
        driver.fake_fail(harm.encode(), 0, 700)
    compute = driver.fake_stream()
    code = gpucheck.main(
        arguments,
        lambda ordinal, size: HostMemory(size, harm == "bytes"),
        library=library,
        compute_stream=lambda: compute,
    )
    assert driver.fake_pinned() == 0, "the arena is still page-locked"
    return code


if __name__ == "__main__":
    at = sys.argv.index("lookaside.gpucheck") + 1 if "lookaside.gpucheck" in sys.argv else 3
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[at:]))
