"""Maps rows of a decode pass to samples, for passes with several rows per sample. Pure array arithmetic.

Rule: rows of one sample are adjacent, at consecutive positions, and a pool row between the first and the last has at
least one.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class SampleRows(NamedTuple):
    """Rows of a pass; all write, then each reads its sample's keys up to its own position."""

    pool: Rows
    """Pool row that each row writes and reads, [n]; rows of one sample are adjacent."""
    ahead: Rows
    """Number of positions from the sample's next one to that of each row, [n]."""


class Rectangle(NamedTuple):
    """Rows of a pass as samples by positions, for attention that reads a sample's keys once."""

    first: int
    """Pool row of the first sample."""
    samples: int
    most: int
    """Rows of the sample with most rows."""
    sources: Rows
    """Pass row at each element, [samples * most]; samples with fewer rows repeat their last one."""
    places: Rows
    """Index of the element of each pass row, [n]."""


def sample_rows(counts: Rows) -> SampleRows:
    """Return the rows of a pass over the first pool rows, with `counts` rows for each."""
    pool = np.repeat(np.arange(len(counts)), counts)
    return SampleRows(pool, np.arange(len(pool)) - np.repeat(np.cumsum(counts) - counts, counts))


def rectangle(rows: SampleRows) -> Rectangle:
    """Return the rows of a complete pass, in which each sample has all its rows, as a rectangle."""
    first = int(rows.pool[0])
    counts = np.bincount(rows.pool - first)
    most = int(counts.max())
    starts = np.cumsum(counts) - counts
    sources = starts[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)
    return Rectangle(first, len(counts), most, sources.ravel(), (rows.pool - first) * most + rows.ahead)
