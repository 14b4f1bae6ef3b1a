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
        present, of_row = np.unique(seqs, return_inverse=True)
        tables = [self._tables.get(seq, NO_BLOCKS) for seq in present.tolist()]
        lengths = np.array([len(table) for table in tables])
        beyond = positions.max(1) >= lengths[of_row] * self._block_size
        if beyond.any():
            row = int(beyond.argmax())
            raise ValueError(
                f"sequence {seqs[row]} uses position {positions[row].max()} "
                f"and has {lengths[of_row[row]]} blocks"
            )
        index, offset = np.divmod(positions, self._block_size)
        nothing = positions < 0
        index += (lengths.cumsum() - lengths)[of_row, None]
        index[nothing] = 0
        slots: NDArray[np.int64] = np.concatenate(tables)[index]
        slots *= self._block_size
        slots += offset
        slots[nothing] = -1
        return slots
