"""Predicts what sorted windows (`spec.prompts.lengthWindow`) gain, by simulating one window in either order.

    draw lengths of two epochs -> sort prompts by those of the first -> simulate the batches with those of the second

Rule: both orders have the same prompts with the same lengths (common random numbers). Weights do not change, so an
epoch predicts the next one as far as prompts explain the lengths. Each sorted batch has the fusion that is chosen for
the lengths that the earlier epoch showed. `simulated_rounds` says what a round includes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_planner.inter_stage.choose import MIN_GAIN, FusionChoice
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.length_distribution import Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup, RoundTrial

MAX_PLANS: Final = 8
"""Most choices of fusion for the batches of a window; batches of similar lengths share one."""


@dataclass(frozen=True)
class WindowForecast:
    """The forecast of a window."""

    window: int
    """Iterations of the window."""
    in_order: float
    """Trained samples per second with batches in the order of the prompts."""
    samples_per_second: float
    """Trained samples per second with sorted batches."""
    gain: float
    """Share of the seconds that sorting saves; may be negative."""
    error: float
    """Standard error of that share over the draws."""
    reason: str
    """Explanation in one sentence."""


def forecast_window(
    model: LengthModel, setup: PeriodSetup, costs: StageCosts, window: int, seed: int = 0
) -> WindowForecast:
    """Return the forecast of windows of so many iterations. Raises ValueError if nothing can be simulated."""
    trial = _WindowTrial(model, setup, costs, window, seed)
    off = np.array([trial.in_order(draw) for draw in trial.epochs])
    on = np.array([trial.sorted(draw) for draw in trial.epochs])
    won, base = off - on, float(off.mean())
    gain, error = float(won.mean()) / base, float(won.std(ddof=1)) / math.sqrt(len(won)) / base
    rate = window * setup.batch * setup.samples_per_prompt / base
    explained = f"prompts explain {model.by_prompt.share:.0%} of the variance of lengths"
    margin = max(MIN_GAIN, error)
    worth = "worth it" if gain > margin else f"not above the margin of {margin:.1%}"
    words = f"windows of {window} iterations are simulated to save {gain:.1%} of the seconds after the first epoch"
    return WindowForecast(window, rate, rate / (1 - gain), gain, error, f"{words}, {worth}; {explained}")


class _WindowTrial(RoundTrial):
    """A window in both orders, on several draws."""

    def __init__(self, model: LengthModel, setup: PeriodSetup, costs: StageCosts, window: int, seed: int) -> None:
        super().__init__(model, setup, costs, window, seed)
        self.epochs = self.draws(epochs=2)
        """Draws, each int64 [prompts, 2, samples per prompt]: lengths of an earlier epoch, and of the window."""
        self._known: dict[int, tuple[LengthModel, FusionChoice]] = {}

    def in_order(self, draw: Ints) -> float:
        """Return the seconds of a window whose batches are in the order of the prompts."""
        size, lengths = self.setup.batch, draw[:, 1]
        return sum(self.round(lengths, range(k * size, (k + 1) * size)).seconds for k in range(self.iterations))

    def sorted(self, draw: Ints) -> float:
        """Return the seconds of a window whose batches have like lengths in the earlier epoch."""
        earlier, lengths = draw[:, 0], draw[:, 1]
        order = np.argsort(earlier.mean(axis=1), kind="stable")
        total = 0.0
        for batch, members in enumerate(np.split(order, self.iterations)):
            rows = members.tolist()
            total += self.round(lengths, rows, *self._knowledge(batch, rows, earlier)).seconds
        return total

    def _knowledge(self, batch: int, members: Sequence[int], earlier: Ints) -> tuple[LengthModel, FusionChoice]:
        """Return the knowledge of the lengths of a sorted batch, and the fusion chosen by it; the same for all
        draws."""
        place = batch * min(self.iterations, MAX_PLANS) // self.iterations
        if place not in self._known:
            lengths = earlier[np.asarray(members)].ravel().tolist()
            prompts = self.layout(members).prompts
            model = LengthModel.prior(self.model.max_tokens).with_batch(zip(prompts, lengths, strict=True))
            self._known[place] = model, self.plan(members, model)
        return self._known[place]
