"""The sidecar's control region: what clients may read without a message."""

from __future__ import annotations

import mmap
import struct

from lookaside.mapping import RegionError

CONTROL_BYTES = 4096
_CONTROL_MAGIC = b"LOOKASID"
_CONTROL_LAYOUT = 1


class Control:
    """The sidecar's control region, mapped read-only.

    The sidecar alone writes it. Every field is one aligned word that is stored at once, so a read
    is never torn. Not safe for use while another thread closes it.
    """

    SERVING, DRAINING, CLOSED = 1, 2, 3

    def __init__(self, fd: int) -> None:
        """Map the region behind fd, which stays the caller's. Raises RegionError."""
        try:
            self._map = mmap.mmap(fd, CONTROL_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise RegionError(f"control region: {error}") from error
        self._words64: memoryview = memoryview(self._map).cast("Q")
        self._words32: memoryview = memoryview(self._map).cast("I")
        magic = struct.pack("=Q", self._words64[0])
        layout = self._words32[2]
        if magic != _CONTROL_MAGIC or layout != _CONTROL_LAYOUT:
            self.close()
            raise RegionError(f"not a control region of layout 1: {magic!r}, layout {layout}")

    @property
    def state(self) -> int:
        """SERVING, DRAINING or CLOSED."""
        return self._words32[3]

    @property
    def generation(self) -> int:
        """The number of this run of the sidecar."""
        return self._words64[2]

    @property
    def capacity_bytes(self) -> int:
        """Bytes of arena in all regions."""
        return self._words64[4]

    @property
    def used_bytes(self) -> int:
        """Bytes of arena that hold committed chunks or are being filled."""
        return self._words64[5]

    def close(self) -> None:
        """Unmap. Safe to call again."""
        self._words64.release()
        self._words32.release()
        self._map.close()
