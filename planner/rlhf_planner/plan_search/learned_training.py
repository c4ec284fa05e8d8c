"""Learns from a run how long its training takes.

Without profiles of layers: a factor by which its ranks compute longer than the roofline says. With profiles: the
seconds of an iteration outside of its mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource

FEWEST: Final = 2
"""Number of iterations below which nothing is learned."""


def observed_seconds(profiles: Sequence[IterationProfile], first: int = 0) -> list[float]:
    """Return the seconds of training of each iteration after `first` that trained all models at once."""
    found = [profile for profile in profiles if profile.iteration > first and profile.training]
    return [seconds for profile in found if (seconds := profile.seconds("Training")) > 0]


def learned_rest(
    profiles: Sequence[IterationProfile], mini_batches: int, after_schedules: float, first: int = 0
) -> CostFigure | None:
    """Return the seconds of an iteration's training that belong to no mini-batch, at least 0.

    None for fewer than FEWEST iterations after `first`.
    """
    found = [profile for profile in profiles if profile.iteration > first and "step_seconds" in profile.training]
    rests = [profile.seconds("Training") - mini_batches * profile.training["step_seconds"] for profile in found]
    if len(rests) < FEWEST:
        return None
    return CostFigure(max(0.0, median(rests) - after_schedules), FigureSource.LEARNED)


def learned_compute(predict: Callable[[float], float], seconds: Sequence[float]) -> CostFigure | None:
    """Return the factor on computing with which the prediction equals the median of the observed seconds.

    `predict` is linear in the factor. None for fewer than FEWEST iterations, and where no positive factor fits.
    """
    computed = predict(2.0) - predict(1.0)
    rest = predict(1.0) - computed
    if len(seconds) < FEWEST or computed <= 0 or median(seconds) <= rest:
        return None
    return CostFigure((median(seconds) - rest) / computed, FigureSource.LEARNED)
