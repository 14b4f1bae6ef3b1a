"""Block tables of the live sequences of a trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NO_BLOCKS = np.empty(0, np.int64)


class BlockTables:
    """Positions of a sequence to logical slots, as blocks are given.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tables: dict[int, NDArray[np.int64]] = {}

    def give(self, seq: int, first: int, blocks: NDArray[np.int64]) -> None:
        """Cut the table of a sequence to `first` blocks and go on with int64 `[n]` blocks.

        Raises:
            ValueError: the table is shorter than that.
        """
        table = self._tables.get(seq, NO_BLOCKS)
        if first > len(table):
            raise ValueError(f"block {first} of sequence {seq} is given before those below it")
        self._tables[seq] = np.concatenate((table[:first], blocks))

    def drop(self, seq: int) -> None:
        """The sequence has ended; one that was never given a block may, too."""
        self._tables.pop(seq, None)

    def slots(self, seqs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Logical slots int64 `[T, n]`, -1 where the position is.

        Args:
            seqs: int64 `[T]`.
            positions: int64 `[T, n]` in the sequence of the row, -1 padded, at least one in a row.

        Raises:
            ValueError: a position lies beyond the blocks of its sequence.
        """
        slots = np.empty_like(positions)
        for seq in np.unique(seqs).tolist():
            rows = seqs == seq
            mine = positions[rows]
            table = self._tables.get(seq, NO_BLOCKS)
            if (farthest := int(mine.max())) >= len(table) * self._block_size:
                raise ValueError(
                    f"sequence {seq} uses position {farthest} and has {len(table)} blocks"
                )
            at = np.maximum(mine, 0)
            found = table[at // self._block_size] * self._block_size + at % self._block_size
            slots[rows] = np.where(mine >= 0, found, -1)
        return slots
