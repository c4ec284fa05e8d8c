"""Chooses the surplus prompts M of `longRounds: Auto` by simulating a whole period of short and long rounds.

A short round decodes B + M prompts and cuts M of them; a long round decodes B prompts that were cut. Rule: all ways see
the same draws. Simplified: training takes the same time in each iteration, and a deferred prompt has the same lengths
again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np

from rlhf_api.algorithms.iteration_prompts import PromptSchedule, possible_surpluses
from rlhf_planner.inter_stage.choose import MIN_GAIN, FusionChoice, choose
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.length_distribution import Floats, Ints
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import fuses, released_at, simulated_scores, simulated_tail
from rlhf_planner.inter_stage.simulated_generation import generate
from rlhf_planner.inter_stage.simulated_tail import threshold_state

JOB_KEY: Final = "longRounds"
"""Key in the journal's job facts: the reason of the last choice."""
SAMPLES_DRAWN: Final = 32_768
"""Approximate maximum of samples in all draws together; at least MIN_DRAWS are made."""
MIN_DRAWS: Final = 3
"""Minimum number of draws, so that there is a standard error."""
MAX_DRAWS: Final = 16


@dataclass(frozen=True)
class PeriodSetup:
    """Inputs of a period, besides lengths and costs."""

    layout: IterationSetup
    """Workers and settings of an iteration; its prompts are ignored."""
    batch: int
    """Prompts of a batch."""
    samples_per_prompt: int
    prompts: Sequence[int]
    """[n] tokens of the next prompts, at least one, in their order. A period with more prompts repeats them."""
    lines: Sequence[int] = ()
    """[n] lines in the prompt file; empty if unknown."""
    cut_by: Literal["Clock", "Counts"] = "Clock"
    training: float = 0.0
    """Seconds of training of an iteration."""
    publishing: float = 0.0
    """Seconds of an iteration after its training."""
    overlapped: bool = False
    """Whether an iteration decodes while the previous one is trained on."""

    def __post_init__(self) -> None:
        if not len(self.prompts):
            raise ValueError("a period needs at least one prompt, got none")
        if len(self.lines) not in (0, len(self.prompts)):
            raise ValueError(f"{len(self.lines)} lines do not belong to {len(self.prompts)} prompts")

    def seconds(self, rollout: float) -> float:
        """Return the seconds of an iteration whose generation and inference take `rollout` seconds."""
        spent = max(rollout, self.training) if self.overlapped else rollout + self.training
        return spent + self.publishing


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


class Round(NamedTuple):
    """A simulated round."""

    seconds: float
    """Seconds of generation and inference."""
    cut: tuple[int, ...]
    """Prompts that were cut off, by their index in the round."""


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


# ---------------------------------------------------------------- one round


def simulate_round(
    lengths: Ints, setup: PeriodSetup, layout: IterationSetup, costs: StageCosts, plan: FusionChoice, model: LengthModel
) -> Round:
    """Simulate a round with response lengths int64 [prompts, samples per prompt], and cut surplus prompts.

    `layout` has the prompts of all its samples, `plan` is its fusion.
    """
    surplus = len(lengths) - setup.batch
    shortest = np.argsort(lengths.max(axis=1), kind="stable")[: setup.batch]
    decoded = lengths
    if surplus and setup.cut_by == "Counts":  # a response of a cut prompt counts until it is the longest
        decoded = np.minimum(lengths, lengths[shortest].max())
    generation = generate(decoded.ravel(), layout, costs)
    fused = fuses(plan.threshold, plan.pool, layout)
    state = threshold_state(generation, plan.threshold, model, layout.lines) if fused else None
    tail = simulated_tail(generation, layout, costs, state, plan.pool, plan.transfer)
    finish = (generation.finish if tail is None else tail.finish).reshape(lengths.shape)
    remaining, end = _cut(finish, decoded, shortest, setup) if surplus else (shortest, float(finish.max()))
    scored = np.zeros(len(lengths), dtype=np.bool_)
    scored[remaining] = True
    cut = tuple(np.flatnonzero(~scored).tolist())
    # Samples of prompts that are cut off later are scored in vain, if they are finished before.
    included = (finish <= end) if layout.overlap else np.broadcast_to(scored[:, None], finish.shape)
    tokens = (generation.prompts + generation.lengths).reshape(lengths.shape)
    released = released_at(end, tail, layout, costs)
    scores = simulated_scores(finish[included], tokens[included], end, released, layout, costs)
    return Round(max(end, scores.end), cut)


def _cut(finish: Floats, decoded: Ints, shortest: Ints, setup: PeriodSetup) -> tuple[Ints, float]:
    """Return the prompts that remain, and the time of the cut.

    `finish` and `decoded` are [prompts, samples per prompt]; `shortest` is [batch].
    """
    done = finish.max(axis=1)
    if setup.cut_by == "Clock":
        first = np.argsort(done, kind="stable")[: setup.batch]
        return first, float(done[first].max())
    longest = decoded[shortest].max()
    others = np.setdiff1d(np.arange(len(done)), shortest)
    as_long = np.where(decoded[others] >= longest, finish[others], np.inf).min(axis=1)
    return shortest, float(max(done[shortest].max(), as_long.max()))


# ---------------------------------------------------------------- a period


class _PeriodTrial:
    """Simulated periods of all ways on the same draws."""

    def __init__(
        self, model: LengthModel, setup: PeriodSetup, costs: StageCosts, surpluses: Sequence[int], seed: int
    ) -> None:
        self.model, self.setup, self.costs, self.seed = model, setup, costs, seed
        periods = [PromptSchedule(setup.batch, extra, "Deferred").period for extra in surpluses]
        self._iterations = max(periods, default=1)
        count = self._iterations * setup.batch
        repeated = np.arange(count) % len(setup.prompts)
        self._prompts = np.asarray(setup.prompts, dtype=np.int64)[repeated]
        lines = setup.lines if len(setup.lines) else np.arange(len(setup.prompts))
        self._lines = np.asarray(lines, dtype=np.int64)[repeated]
        each = setup.samples_per_prompt
        draws = max(MIN_DRAWS, min(MAX_DRAWS, SAMPLES_DRAWN // (count * each)))
        generator = np.random.default_rng(seed)
        self._draws = [self._draw(generator) for _ in range(draws)]
        self._plans: dict[int, FusionChoice] = {}

    def _draw(self, generator: np.random.Generator) -> Ints:
        """Return lengths, int64 [prompts, samples per prompt]. A prompt that is repeated has other responses."""
        each, batch = self.setup.samples_per_prompt, self.setup.batch
        rounds = [
            self.model.draw(generator, np.repeat(self._prompts[at], each), np.repeat(self._lines[at], each))
            for at in (slice(first, first + batch) for first in range(0, len(self._prompts), batch))
        ]
        return np.concatenate(rounds).reshape(-1, each)

    def way(self, extra: int) -> RoundsWay:
        """Return the forecast of a way."""
        samples = self.setup.batch * self.setup.samples_per_prompt * self._iterations
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
                [self._round(lengths, range(k * size, (k + 1) * size)).seconds for k in range(self._iterations)]
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
            played = self._round(lengths, members)
            waiting.extend(members[place] for place in played.cut)
            total += played.seconds
        return total

    def _round(self, lengths: Ints, members: Sequence[int]) -> Round:
        """Return the round of these prompts; its seconds are those of the whole iteration."""
        layout, rows = self._layout(members), np.asarray(members)
        played = simulate_round(lengths[rows], self.setup, layout, self.costs, self._plan(len(rows)), self.model)
        return played._replace(seconds=self.setup.seconds(played.seconds))

    def _layout(self, members: Sequence[int]) -> IterationSetup:
        rows, each = np.asarray(members), self.setup.samples_per_prompt
        prompts, lines = np.repeat(self._prompts[rows], each), np.repeat(self._lines[rows], each)
        return replace(self.setup.layout, prompts=prompts.tolist(), lines=lines.tolist())

    def _plan(self, prompts: int) -> FusionChoice:
        """Return the fusion of rounds with so many prompts."""
        if prompts not in self._plans:
            self._plans[prompts] = choose(self.model, self._layout(range(prompts)), self.costs, self.seed)
        return self._plans[prompts]
