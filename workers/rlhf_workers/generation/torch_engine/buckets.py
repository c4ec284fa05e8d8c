"""Sizes that the shapes of passes are rounded up to, so that there are few of them.

Rule: pure functions; a bucket holds what it was asked for, and the next smaller one does not. In the deterministic mode
the bucket of a sample's keys decides its bits, so `bucket` must never change.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

TILE_ROWS: Final = 16
"""Pools hold a multiple of this many rows: the least number of rows for which matrix kernels treat each row alike."""
FIRST_CAPACITY: Final = 64
"""Key length of the smallest pool; the next ones double."""
KEY_STEP: Final = 16
"""Key lengths are multiples of this, so that rows of keys stay aligned."""
PARTS: Final = 4
"""Key lengths of captured passes within a doubling: at most a fifth of the keys that are read is padding."""


def padded(length: int, step: int = KEY_STEP) -> int:
    """`length` rounded up to a multiple of `step`."""
    return -(-length // step) * step


def bucket(length: int, largest: int) -> int:
    """Smallest of 64, 128, 256, ... that holds `length` keys, at most `largest`."""
    size = FIRST_CAPACITY
    while size < length:
        size *= 2
    return min(size, largest)


def width_bucket(rows: int) -> int:
    """1, 2, 4, 8, 16, then multiples of 16: a pool has as many rows."""
    return padded(rows, TILE_ROWS) if rows > TILE_ROWS else 1 << (rows - 1).bit_length()


def pass_widths(most_rows: int, *, tiled: bool, static: bool) -> npt.NDArray[np.int64]:
    """int64 [most_rows + 1]: how wide a decode pass over so many rows is, by what passes are rounded up to."""
    rows = range(most_rows + 1)
    if tiled:
        return np.array([padded(row, TILE_ROWS) for row in rows], np.int64)
    return np.array([width_bucket(row) if static and row else row for row in rows], np.int64)


def length_bucket(length: int, capacity: int) -> int:
    """64, 80, 96, 112, 128, 160, ...: four steps a doubling, at most `capacity`."""
    if length <= FIRST_CAPACITY:
        return min(FIRST_CAPACITY, capacity)
    step = max((1 << ((length - 1).bit_length() - 1)) // PARTS, KEY_STEP)
    return min(padded(length, step), capacity)
