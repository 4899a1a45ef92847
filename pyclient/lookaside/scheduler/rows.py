"""The blocks of pages in vLLM's block tables: arithmetic alone.

A *row* is the blocks of one page, column by column: of each KV-cache group the blocks that pages
have of it (layout.Share), then a column for each group that keeps states. A state is alone in its
page, so that one of the two parts of a row is empty. Block 0 is vLLM's null block.
"""

from __future__ import annotations

from collections.abc import Sequence

from lookaside.kvgroups import Share


class Rows:
    """Rows of pages, for the shares that a model's KV-cache groups have of a page."""

    def __init__(self, shares: Sequence[Share]) -> None:
        self.shares = tuple(shares)
        self.states = tuple(number for number, share in enumerate(self.shares) if share.state)
        """The groups that keep states."""
        self.columns = [
            (group, share.blocks, index)
            for group, share in enumerate(self.shares)
            for index in range(share.blocks - share.kept, share.blocks)
        ]
        """(group, its blocks in a page, which of them) of each column but the states'."""
        self._is_plain = all(share.blocks == 1 for share in self.shares) and not self.states

    @property
    def width(self) -> int:
        """Columns of a row."""
        return len(self.columns) + len(self.states)

    def pages_of(self, tables: Sequence[list[int]]) -> int:
        """Return how many pages all groups' tables have blocks for, the last one perhaps in part.

        0 for tables that are not one for each group.
        """
        if len(tables) != len(self.shares):
            return 0
        return min(
            len(table) // share.blocks for table, share in zip(tables, self.shares, strict=True)
        )

    def of(self, tables: Sequence[list[int]], first: int, end: int) -> list[int]:
        """Return the rows of pages [first, end), one after the other."""
        if self._is_plain:
            if len(tables) == 1:
                return list(tables[0][first:end])
            return [
                block
                for row in zip(*(table[first:end] for table in tables), strict=False)
                for block in row
            ]
        rows: list[int] = []
        for page in range(first + 1, end + 1):
            for table, share in zip(tables, self.shares, strict=True):
                rows += table[page * share.blocks - share.kept : page * share.blocks]
            rows += [0] * len(self.states)
        return rows

    def of_states(self, block_ids: Sequence[int]) -> list[int]:
        """Return the rows of the states at a page's end, given the block of each group."""
        rows: list[int] = []
        for number, block_id in enumerate(block_ids):
            row = [0] * self.width
            row[len(self.columns) + number] = block_id
            rows += row
        return rows

    def states_at(self, tables: Sequence[list[int]], end: int) -> list[int]:
        """Return the block of each group that keeps states, at the end of page end - 1."""
        return [tables[group][end * self.shares[group].blocks - 1] for group in self.states]

    def is_loadable(self, tables: Sequence[list[int]], first: int, end: int) -> bool:
        """Report whether vLLM's tables fit a load of pages [first, end).

        They must have a block for all that a hit up to end needs, and none for what pages lack.
        What lies below page first vLLM has itself.
        """
        if self.pages_of(tables) < end:
            return False
        for table, share in zip(tables, self.shares, strict=True):
            begin, stop = first * share.blocks, end * share.blocks
            if 0 in table[max(begin, stop - share.reach) if share.reach else begin : stop]:
                return False
            if share.state:
                continue
            if any(
                table[i] for i in range(begin, stop) if i % share.blocks < share.blocks - share.kept
            ):
                return False
        return True
