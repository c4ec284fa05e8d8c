"""Which rows of a decode pass belong to which sample, where a pass has several of one.

Rule: rows of one sample stand together, at consecutive positions, and every row of the pool between the first and the
last has at least one. Pure arithmetic of arrays. Must never know what a position holds.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


class SampleRows(NamedTuple):
    """The rows of a pass: all write, then each reads its sample's keys up to its own position."""

    pool: Rows
    """[n]: the pool's row that each one writes to and reads; rows of one sample stand together."""
    ahead: Rows
    """[n]: how many positions behind the sample's next one."""


class Rectangle(NamedTuple):
    """The rows of a pass as samples by positions, for an attention that reads the keys of a sample once."""

    first: int
    """Pool row of the first sample."""
    samples: int
    most: int
    """Rows of the sample that has most."""
    sources: Rows
    """[samples * most]: the row of the pass at each place; a sample's last one again where it has fewer."""
    places: Rows
    """[n]: where each row of the pass is."""


def sample_rows(counts: Rows) -> SampleRows:
    """Return the rows of a pass over the first rows of a pool, of which each has so many, [rows of the pool]."""
    pool = np.repeat(np.arange(len(counts)), counts)
    return SampleRows(pool, np.arange(len(pool)) - np.repeat(np.cumsum(counts) - counts, counts))


def rectangle(rows: SampleRows) -> Rectangle:
    """Return the rows of a whole pass (none of its samples has rows elsewhere) as a rectangle."""
    first = int(rows.pool[0])
    counts = np.bincount(rows.pool - first)
    most = int(counts.max())
    starts = np.cumsum(counts) - counts
    sources = starts[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)
    return Rectangle(first, len(counts), most, sources.ravel(), (rows.pool - first) * most + rows.ahead)
