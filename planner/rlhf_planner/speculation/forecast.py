"""Expected effect of speculation by batch size: tokens per step, and seconds of such a step.

It is linear in the logarithm of the batch between points, and flat beyond them. Must never change the cost of a plain
step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class SpeculationPoint(NamedTuple):
    """Mean of steps, with or without drafts, over `batch` samples on a worker that may draft."""

    batch: float
    tokens: float
    """Tokens of one sample in a step: the accepted ones and the one that is always generated; at least 1."""
    seconds: float
    """Seconds of a step, including drafting."""
    plain_seconds: float
    """Seconds of a step without drafts over as many samples and keys."""

    @property
    def cost(self) -> float:
        """Return the ratio of the step's time to that of a plain step."""
        return self.seconds / self.plain_seconds

    @property
    def gain(self) -> float:
        """Return the ratio of tokens per second to those without drafts."""
        return self.tokens / self.cost


@dataclass(frozen=True)
class SpeculationForecast:
    """Expected tokens and seconds of a step by batch size. Raises ValueError for impossible points."""

    points: tuple[SpeculationPoint, ...] = ()
    """Points by rising batch size; without points nothing is drafted."""
    zero_allowed: bool = True
    """Whether drafting nothing is a candidate at every batch size; False if drafts are always made (mode Fixed)."""

    def __post_init__(self) -> None:
        batches = [point.batch for point in self.points]
        if any(after <= before for before, after in itertools.pairwise(batches)):
            raise ValueError(f"batches of a speculation forecast must rise, got {batches}")
        for point in self.points:
            finite = all(0 < value < float("inf") for value in point)
            if not finite or point.tokens < 1:
                raise ValueError(f"{point} is impossible: at least 1 token a step, finite times above 0 are needed")

    def __bool__(self) -> bool:
        """Return whether there are points. Without points nothing is drafted."""
        return bool(self.points)

    def factors(self, batches: Floats | Sequence[float]) -> tuple[Floats, Floats]:
        """Return (tokens per sample and step, step time relative to a plain step) at these batch sizes, float64 [n]
        each."""
        at = np.asarray(batches, dtype=np.float64)
        if not self.points:
            return np.ones(len(at)), np.ones(len(at))
        log_batches = np.log([point.batch for point in self.points])
        place = np.log(np.maximum(at, 1e-9))
        tokens = np.interp(place, log_batches, [point.tokens for point in self.points])
        cost = np.interp(place, log_batches, [point.cost for point in self.points])
        if self.zero_allowed:
            slower = cost >= tokens
            tokens, cost = np.where(slower, 1.0, tokens), np.where(slower, 1.0, cost)
        return tokens, cost

    def share_at(self, batch: int) -> float:
        """Return the share, 0..1, of a batch's tokens per second that comes from drafts."""
        tokens, cost = self.factors([batch])
        return max(0.0, 1.0 - float(cost[0] / tokens[0]))

    def document(self) -> dict[str, Any]:
        """Return the forecast as plain data for JSON, for `from_document`."""
        return {"points": [list(point) for point in self.points], "zero_allowed": self.zero_allowed}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SpeculationForecast:
        """Return the forecast that `document` wrote. Raises ValueError for a missing field or impossible points."""
        try:
            points = tuple(SpeculationPoint(*map(float, row)) for row in document["points"])
            return cls(points, bool(document["zero_allowed"]))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"speculation forecast: {error}") from error

    def always(self) -> SpeculationForecast:
        """Return the same forecast with drafts always made."""
        return dataclasses.replace(self, zero_allowed=False)


NO_SPECULATION: Final = SpeculationForecast()
"""Forecast without drafting."""
