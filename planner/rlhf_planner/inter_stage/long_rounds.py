"""Chooses the surplus prompts M of `longRounds: Auto` by simulating a whole period of short and long rounds.

A short round decodes B + M prompts and cuts M of them; a long round decodes B prompts that were cut. Rule: all ways see
the same draws. Simplified: training takes the same time in each iteration, and a deferred prompt has the same lengths
again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from rlhf_api.algorithms.iteration_prompts import PromptSchedule, possible_surpluses
from rlhf_planner.inter_stage.choose import MIN_GAIN
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.length_distribution import Floats, Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup, RoundTrial

JOB_KEY: Final = "longRounds"
"""Key in the journal's job facts: the reason of the last choice."""


class RoundsWay(NamedTuple):
    """The forecast of one way."""

    extra: int
    """Surplus prompts M; 0 means no long rounds."""
    period: int
    """Iterations of a period."""
    samples_per_second: float
    """Trained samples per second over a period: the rate without long rounds on all draws, times the speed-up."""
    gain: float
    """Share of the seconds without long rounds that the way saves on the same prompts; may be negative."""
    error: float
    """Standard error of that share over the draws."""


@dataclass(frozen=True)
class RoundsChoice:
    """The surplus prompts to begin, with a forecast of each way."""

    extra: int
    """Surplus prompts M; 0 means no long rounds."""
    ways: tuple[RoundsWay, ...]
    """All ways by surplus; the first has none."""
    reason: str
    """Explanation in one sentence."""


def choose_rounds(
    model: LengthModel, setup: PeriodSetup, costs: StageCosts, iterations: int, seed: int = 0
) -> RoundsChoice:
    """Return the surplus with the largest gain over a period; 0 if no gain is above the margin.

    A period must fit into `iterations`. Raises ValueError if a round cannot be simulated.
    """
    surpluses = possible_surpluses(setup.batch, iterations)
    trial = _PeriodTrial(model, setup, costs, surpluses, seed)
    ways = tuple(trial.way(extra) for extra in (0, *surpluses))
    if not surpluses:
        words = f"no period of a batch of {setup.batch} prompts fits into the iterations left, {iterations}"
        return RoundsChoice(0, ways, f"no long rounds: {words}")
    best = max(ways[1:], key=lambda way: way.gain)
    explained = f"prompts explain {model.by_prompt.share:.0%} of the variance of lengths"
    margin = max(MIN_GAIN, best.error)
    if best.gain <= margin:
        words = f"the best way, {_words(best.extra)}, is simulated to gain {best.gain:.1%}"
        return RoundsChoice(
            0, ways, f"no long rounds: {words}, which is not above the margin of {margin:.1%}; {explained}"
        )
    words = f"simulated to train {best.samples_per_second:.3g} samples/s ({1 / (1 - best.gain):.2f}x)"
    return RoundsChoice(best.extra, ways, f"long rounds with {_words(best.extra)}: {words}; {explained}")


def _words(extra: int) -> str:
    return f"{extra} surplus prompt{'s' * (extra > 1)}"


# ---------------------------------------------------------------- a period


class _PeriodTrial(RoundTrial):
    """Simulated periods of all ways on the same draws."""

    def __init__(
        self, model: LengthModel, setup: PeriodSetup, costs: StageCosts, surpluses: Sequence[int], seed: int
    ) -> None:
        periods = [PromptSchedule(setup.batch, extra, "Deferred").period for extra in surpluses]
        super().__init__(model, setup, costs, max(periods, default=1), seed)
        self._draws = [draw[:, 0] for draw in self.draws()]

    def way(self, extra: int) -> RoundsWay:
        """Return the forecast of a way."""
        samples = self.setup.batch * self.setup.samples_per_prompt * self.iterations
        rate = samples / float(self._without.sum(axis=1).mean())
        if not extra:
            return RoundsWay(0, 1, rate, 0.0, 0.0)
        period = PromptSchedule(self.setup.batch, extra, "Deferred").period
        on = np.array([self._seconds(lengths, extra, period) for lengths in self._draws])
        off = self._without[:, :period].sum(axis=1)
        won, base = off - on, float(off.mean())
        gain, error = float(won.mean()) / base, float(won.std(ddof=1)) / math.sqrt(len(won)) / base
        return RoundsWay(extra, period, rate / (1 - gain), gain, error)

    @cached_property
    def _without(self) -> Floats:
        """[draws, iterations] seconds of the iterations without long rounds."""
        size = self.setup.batch
        return np.array(
            [
                [self.round(lengths, range(k * size, (k + 1) * size)).seconds for k in range(self.iterations)]
                for lengths in self._draws
            ]
        )

    def _seconds(self, lengths: Ints, extra: int, period: int) -> float:
        """Return the seconds of a period with so many surplus prompts."""
        schedule = PromptSchedule(self.setup.batch, extra, "Deferred")
        waiting: deque[int] = deque()
        total = 0.0
        for number in range(period):
            if schedule.is_long(number):
                members: Sequence[int] = [waiting.popleft() for _ in range(self.setup.batch)]
            else:
                members = range(schedule.first(number), schedule.end(number))
            played = self.round(lengths, members)
            waiting.extend(members[place] for place in played.cut)
            total += played.seconds
        return total
