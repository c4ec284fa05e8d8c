"""What drafts may give a job of which no run has drafted yet: an assumed acceptance over the costs of passes.

Rule: at every batch as many tokens of each sample are drafted as have the most expected tokens a second, none among
them, or always the longest draft where drafts are always made. A pass costs what a plain step over as many rows does,
and drafting nothing. It is an assumption and is to be told as one; the first iteration replaces it.
"""

from __future__ import annotations

from typing import Final

from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.speculation.acceptance import PRIOR_RATE
from rlhf_planner.speculation.forecast import SpeculationForecast, SpeculationPoint

CONTEXT: Final = 512.0
"""Keys at which batches are compared; the shape over the batch hardly depends on it."""


def assumed_forecast(
    decode: DecodeLines, max_batch_size: int, longest: int, *, always: bool, rate: float = PRIOR_RATE
) -> SpeculationForecast:
    """Return the forecast for drafts of at most `longest` tokens, each of which is right with the chance `rate` where
    all before it were."""
    base, slope = decode.tables(max_batch_size * (longest + 1))
    seconds = base + slope * CONTEXT
    points, batch = [], 1
    while batch <= max_batch_size:
        plain = float(seconds[batch])
        lengths = (longest,) if always else range(longest + 1)
        choices = [(_tokens(rate, length), float(seconds[batch * (length + 1)])) for length in lengths]
        tokens, took = max(choices, key=lambda choice: choice[0] / choice[1])
        points.append(SpeculationPoint(float(batch), tokens, took, plain))
        batch *= 2
    return SpeculationForecast(tuple(points), zero_allowed=not always)


def _tokens(rate: float, length: int) -> float:
    """Expected tokens of one sample in a step: those of its draft up to the first that is wrong, and one more."""
    return sum(rate**position for position in range(length + 1))
