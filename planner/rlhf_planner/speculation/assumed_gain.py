"""Assumes the gain of drafts for a job without any drafting run, from an assumed acceptance and the costs of passes.

A pass costs as much as a plain step over as many rows; drafting is free.
"""

from __future__ import annotations

from typing import Final

from rlhf_planner.inter_stage.fitted_costs import DecodeLines
from rlhf_planner.speculation.acceptance import PRIOR_RATE
from rlhf_planner.speculation.forecast import SpeculationForecast, SpeculationPoint

CONTEXT: Final = 512.0
"""Keys at which batches are compared."""


def assumed_forecast(
    decode: DecodeLines, max_batch_size: int, longest: int, *, always: bool, rate: float = PRIOR_RATE
) -> SpeculationForecast:
    """Return the forecast for drafts of at most `longest` tokens.

    Each token is right with probability `rate` if all tokens before it are right.
    """
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
    """Return the expected tokens of one sample in a step: its draft up to the first wrong token, and one more."""
    return sum(rate**position for position in range(length + 1))
