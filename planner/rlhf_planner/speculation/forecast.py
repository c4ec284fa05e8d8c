"""What speculation is expected to give at each batch size: tokens a step, and what such a step takes.

Rule: a value, made of what was observed or of what a controller has learned, and read by whoever predicts decoding.
Between batches it is linear over the logarithm of the batch, beyond them flat. Where zero drafts are a candidate no
batch is expected to be slower than plain steps: a controller would draft nothing there. Without points nothing is
drafted, and every prediction has the bits that it has without this module. Must never change what a plain step costs.
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
    """Steps over `batch` samples, as they are made with drafts; means."""

    batch: float
    tokens: float
    """Of one sample in a step: the accepted ones and the one that is drawn anyway; at least 1."""
    seconds: float
    """A step, drafting included."""
    plain_seconds: float
    """A step without drafts over as many samples with as many keys."""

    @property
    def cost(self) -> float:
        """Return how many plain steps such a step takes as long as."""
        return self.seconds / self.plain_seconds

    @property
    def gain(self) -> float:
        """Return how many times as many tokens a second there are as without drafts."""
        return self.tokens / self.cost


@dataclass(frozen=True)
class SpeculationForecast:
    """Expected tokens and seconds of a step by batch size. Raises ValueError for impossible points."""

    points: tuple[SpeculationPoint, ...] = ()
    """By batch, which rises; none: nothing is drafted."""
    zero_allowed: bool = True
    """Drafting nothing is a candidate at every batch; False: drafts are always made (mode Fixed)."""

    def __post_init__(self) -> None:
        batches = [point.batch for point in self.points]
        if any(after <= before for before, after in itertools.pairwise(batches)):
            raise ValueError(f"batches of a speculation forecast must rise, got {batches}")
        for point in self.points:
            finite = all(0 < value < float("inf") for value in point)
            if not finite or point.tokens < 1:
                raise ValueError(f"{point} is impossible: at least 1 token a step, finite times above 0 are needed")

    def __bool__(self) -> bool:
        """Return whether anything is expected to be drafted."""
        return bool(self.points)

    def factors(self, batches: Floats | Sequence[float]) -> tuple[Floats, Floats]:
        """Return (tokens of a sample in a step, seconds of a step over those of a plain one) at these batch sizes,
        float64 [n] each."""
        at = np.asarray(batches, dtype=np.float64)
        if not self.points:
            return np.ones(len(at)), np.ones(len(at))
        known = np.log([point.batch for point in self.points])
        place = np.log(np.maximum(at, 1e-9))
        tokens = np.interp(place, known, [point.tokens for point in self.points])
        cost = np.interp(place, known, [point.cost for point in self.points])
        if self.zero_allowed:
            slower = cost >= tokens
            tokens, cost = np.where(slower, 1.0, tokens), np.where(slower, 1.0, cost)
        return tokens, cost

    def share_at(self, batch: int) -> float:
        """Return the share, 0..1, of a batch's tokens a second that there would not be without drafts."""
        tokens, cost = self.factors([batch])
        return max(0.0, 1.0 - float(cost[0] / tokens[0]))

    def document(self) -> dict[str, Any]:
        """Return the forecast as plain data for JSON; `from_document` reads it back."""
        return {"points": [list(point) for point in self.points], "zero_allowed": self.zero_allowed}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SpeculationForecast:
        """Return the forecast that `document` wrote. Raises ValueError for anything else."""
        try:
            points = tuple(SpeculationPoint(*map(float, row)) for row in document["points"])
            return cls(points, bool(document["zero_allowed"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"speculation forecast: {error}") from error

    def always(self) -> SpeculationForecast:
        """Return the same where drafts are always made."""
        return dataclasses.replace(self, zero_allowed=False)


NO_SPECULATION: Final = SpeculationForecast()
"""Nothing is drafted."""
