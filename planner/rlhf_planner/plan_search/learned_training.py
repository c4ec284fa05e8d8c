"""How much longer a run's ranks compute in training than the roofline says.

The factor comes from the seconds of a run's iterations and from their prediction for the run's own layout. It covers
layers, the head and the optimizer; communication keeps the figures of the links. The first iteration does not count:
ranks start and search schedules in it. The gain of a fused schedule is part of the factor.
Pure; must never learn from iterations whose training metrics are incomplete, such as those that train critics later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource

FEWEST: Final = 2
"""Number of iterations below which nothing is learned."""


def observed_seconds(profiles: Sequence[IterationProfile]) -> list[float]:
    """Return the seconds of training of each iteration but the first that trained all models at once."""
    found = [profile for profile in profiles if profile.iteration > 0 and profile.training]
    return [seconds for profile in found if (seconds := profile.seconds("Training")) > 0]


def learned_compute(predict: Callable[[float], float], seconds: Sequence[float]) -> CostFigure | None:
    """Return the factor on computing with which the prediction equals the median of the observed seconds.

    `predict` returns the seconds of an iteration's training with a factor, which they are linear in. None for fewer
    than FEWEST iterations, and where communication alone is predicted to take longer than was observed.
    """
    computed = predict(2.0) - predict(1.0)
    rest = predict(1.0) - computed
    if len(seconds) < FEWEST or computed <= 0 or median(seconds) <= rest:
        return None
    return CostFigure((median(seconds) - rest) / computed, FigureSource.LEARNED)
