"""The blocks and bytes of this rank's pages: arithmetic alone.

A row is the blocks of one page, column by column (layout.py); 0 is vLLM's null block.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lookaside import wire
from lookaside.copies import ABSENT
from lookaside.mapping import RegionError
from lookaside.regions import Hold


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The sizes of pages. The defaults hold until the KV cache is registered."""

    page_bytes: int = 0
    column_bytes: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """Bytes of each of a page's blocks."""
    states: int = 0
    """Columns, the last ones, whose blocks are alone in their pages."""
    per_chunk: int = 1
    digest_bytes: int = 32

    def rows(self, block_ids: list[int]) -> np.ndarray:
        """Return the blocks of each page, [pages, columns].

        Raises ValueError unless the pages are whole.
        """
        return np.asarray(block_ids, np.int64).reshape(-1, len(self.column_bytes))

    def are_whole(self, rows: np.ndarray) -> bool:
        """Report whether rows have all blocks of their page: those of attention, or one of a
        state."""
        if not self.states:
            return bool(rows.all())
        return bool(
            (rows[:, : -self.states].all(axis=1) | rows[:, -self.states :].any(axis=1)).all()
        )

    def copied(self, rows: np.ndarray) -> np.ndarray:
        """Return rows as copies take them: what vLLM does not have is absent."""
        return np.where(rows == 0, ABSENT, rows)

    def bytes_of(self, rows: np.ndarray) -> int:
        """Return how many bytes the blocks of rows have."""
        return int((rows != 0).sum(axis=0) @ self.column_bytes)

    def locate(
        self, hold: Hold, asked: range, extent: wire.Extent, timeout_s: float, write: bool = False
    ) -> np.ndarray:
        """Return the arena addresses of an extent's pages, valid as long as hold.

        Waits up to timeout_s for its region. Raises RegionError for an extent that cannot be right:
        one beyond the pages asked for, or beyond its region.
        """
        page, pages = extent.page, extent.pages
        if pages < 1 or page < asked.start or page + pages > asked.stop:
            raise RegionError(f"pages [{page}, {page + pages}) were not asked for")
        base = hold.locate(extent.region, extent.offset, pages * self.page_bytes, timeout_s, write)
        return np.uint64(base) + np.arange(pages, dtype=np.uint64) * np.uint64(self.page_bytes)
