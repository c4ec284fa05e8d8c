"""Rounds the shapes of passes up to a few sizes. Pure.

Rule: the bucket of a sample's keys affects its bits in deterministic mode, so `bucket` must never change.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

TILE_ROWS: Final = 16
"""Rows of a tile; the number of rows of a pool is a multiple of it."""
FIRST_CAPACITY: Final = 64
"""Smallest bucket of keys; the next ones double, up to the longest sequence."""
KEY_STEP: Final = 16
"""Unit of key lengths."""
PARTS: Final = 4
"""Results of `length_bucket` per doubling; above FIRST_CAPACITY less than a fifth of one is padding."""


def padded(length: int, step: int = KEY_STEP) -> int:
    """Round `length` up to a multiple of `step`."""
    return -(-length // step) * step


def bucket(length: int, largest: int) -> int:
    """Return the smallest of 64, 128, 256, ... that is at least `length`, at most `largest`."""
    size = FIRST_CAPACITY
    while size < length:
        size *= 2
    return min(size, largest)


def width_bucket(rows: int) -> int:
    """Return the smallest of 1, 2, 4, 8, 16 and the multiples of 16 that is at least `rows`."""
    return padded(rows, TILE_ROWS) if rows > TILE_ROWS else 1 << (rows - 1).bit_length()


def pass_widths(most_rows: int, *, tiled: bool, static: bool) -> npt.NDArray[np.int64]:
    """Return int64 [most_rows + 1]: width of a decode pass by its number of rows, rounded up if `tiled` or `static`."""
    rows = range(most_rows + 1)
    if tiled:
        return np.array([padded(row, TILE_ROWS) for row in rows], np.int64)
    return np.array([width_bucket(row) if static and row else row for row in rows], np.int64)


def length_bucket(length: int, capacity: int) -> int:
    """Return the smallest of 64, 80, 96, 112, 128, 160, ... (four per doubling), at most `capacity`."""
    if length <= FIRST_CAPACITY:
        return min(FIRST_CAPACITY, capacity)
    step = max((1 << ((length - 1).bit_length() - 1)) // PARTS, KEY_STEP)
    return min(padded(length, step), capacity)
