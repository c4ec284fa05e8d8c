"""Chooses the threshold R_t and the pool m of an iteration by simulating possible lengths of the next batch.

Rule: plans share the draws. In mode Auto, a plan must gain more than MIN_GAIN and more than the standard error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rlhf_planner.inter_stage.costs import StageCosts, Transfer
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.simulate import fuses, simulated_iteration
from rlhf_planner.inter_stage.simulated_generation import SimulatedGeneration, generate
from rlhf_planner.inter_stage.simulated_tail import ThresholdState, threshold_state

MIN_GAIN: Final = 0.03
"""Share of the time without fusion that a plan must gain."""
MAX_DRAWS: Final = 32
"""Maximum number of batches drawn."""
SAMPLES_DRAWN: Final = 4096
"""Approximate maximum of samples in all draws together; at least one batch is drawn."""
SHARES: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.75)
"""Thresholds that are tried first, as shares of the batch."""
GLANCED: Final = 16384
"""Approximate maximum of samples times workers times draws in a first look at a plan; at least one draw."""
MAX_TRIED: Final = 64
"""Samples times workers up to which every plan is tried."""
TIE: Final = 0.005
"""Relative difference up to which plans count as equal.

Among equal plans the one at a third of them, by threshold, is chosen.
"""


class CurvePoint(NamedTuple):
    """Mean simulated seconds of a plan over all draws."""

    threshold: int
    pool: int
    seconds: float


@dataclass(frozen=True)
class FusionChoice:
    """How an iteration treats its long tail."""

    threshold: int
    """Threshold R_t in samples; 0 means no fusion."""
    pool: int
    """Pool size m in workers; all generation workers mean no fusion."""
    transfer: Transfer
    seconds: float
    """Simulated seconds of generation and inference with this choice."""
    off_seconds: float
    """Simulated seconds of generation and inference without fusion."""
    curve: tuple[CurvePoint, ...]
    """Best pool of every threshold that was tried on all draws, in order of threshold; threshold 0 is no fusion."""
    reason: str
    """Explanation in one sentence."""

    @property
    def fused(self) -> bool:
        """Whether any samples are consolidated."""
        return self.threshold > 0


def choose(model: LengthModel, setup: IterationSetup, costs: StageCosts, seed: int = 0) -> FusionChoice:
    """Return the best plan in mode Auto, the given one in mode Fixed, or no fusion, with its forecast.

    The same seed gives the same choice.
    """
    trial = _Trial(model, setup, costs, seed)
    off = trial.mean(0, setup.generation_workers)
    if setup.mode == "Disabled":
        return trial.off("fusion is off")
    if setup.generation_workers == 1:
        return trial.off("a single generation worker has no other worker for its tail")
    if not setup.overlap:
        return trial.off("nothing is scored before the whole batch is generated")
    if setup.mode == "Fixed":
        return _fixed(trial, off)
    _search(trial)
    best = trial.best()
    if best is None:
        return trial.off(f"no pool of fewer than {setup.generation_workers} workers can hold a tail")
    gain, error = trial.gain(*best)
    margin = max(MIN_GAIN * off, error)
    if gain <= margin:
        words = f"the best plan, {_words(*best, setup)}, is simulated to gain {gain / off:.1%}"
        return trial.off(f"{words}, which is not above the margin of {margin / off:.1%}")
    seconds = trial.mean(*best)
    reason = (
        f"fuse: {_words(*best, setup)}; generation and inference are simulated to take {seconds:.3g} s "
        f"instead of {off:.3g} s ({off / seconds:.2f}x)"
    )
    return trial.choice(*best, reason)


def _fixed(trial: _Trial, off: float) -> FusionChoice:
    setup = trial.setup
    threshold, pool = setup.threshold or 0, setup.pool or setup.generation_workers
    if threshold == 0 or pool >= setup.generation_workers:
        return trial.off(f"a pool of {pool} keeps all {setup.generation_workers} generation workers")
    seconds = trial.mean(threshold, pool)
    words = f"as set: {_words(threshold, pool, setup)}; simulated to take {seconds:.3g} s, {off:.3g} s without fusion"
    return trial.choice(threshold, pool, words)


def _words(threshold: int, pool: int, setup: IterationSetup) -> str:
    return (
        f"the last {threshold} of {setup.batch} samples ({threshold / setup.batch:.0%}) on {pool} of "
        f"{setup.generation_workers} workers"
    )


# ---------------------------------------------------------------- search


def _search(trial: _Trial) -> None:
    """Simulate the plans worth trying: all plans of a small iteration, otherwise a coarse grid and neighbours of its
    best."""
    setup = trial.setup
    if setup.batch * setup.generation_workers <= MAX_TRIED:
        for threshold in range(1, setup.batch):
            for pool in _pools(threshold, trial, range(1, setup.generation_workers)):
                trial.mean(threshold, pool)
        return
    thresholds = sorted({max(1, min(setup.batch - 1, round(share * setup.batch))) for share in SHARES} - {0})
    for threshold in thresholds:
        pools = _pools(threshold, trial, _coarse(threshold, trial))
        if pools:
            trial.mean(threshold, min(pools, key=lambda pool: (trial.glance(threshold, pool), pool)))
    for _ in range(2):
        best = trial.best()
        if best is None:
            return
        near = sorted(set(_neighbours(best, thresholds, trial)))
        for plan in sorted(near, key=lambda plan: (trial.glance(*plan), plan))[:3]:
            trial.mean(*plan)
        if trial.best() == best:
            return


def _coarse(threshold: int, trial: _Trial) -> Iterable[int]:
    workers = trial.setup.generation_workers
    flat = -(-threshold // trial.costs.saturation_batch)
    return (1, flat, workers // 8, workers // 4, workers // 2, workers - 1)


def _pools(threshold: int, trial: _Trial, wanted: Iterable[int]) -> list[int]:
    """Return the pools in `wanted`, each raised to the smallest pool that can hold `threshold` samples. Pools of all
    workers are left out."""
    least = trial.costs.least_pool(threshold, trial.longest)
    return sorted({max(least, pool) for pool in wanted if max(least, pool) < trial.setup.generation_workers})


def _neighbours(best: tuple[int, int], thresholds: Sequence[int], trial: _Trial) -> Iterable[tuple[int, int]]:
    threshold, pool = best
    below = max((r for r in thresholds if r < threshold), default=threshold // 2)
    above = min((r for r in thresholds if r > threshold), default=threshold)
    step = max(1, pool // 4)
    for r in {(below + threshold) // 2, threshold, (above + threshold) // 2}:
        if r > 0:
            for m in _pools(r, trial, (pool - step, pool, pool + step)):
                yield r, m


class _Trial:
    """Simulated seconds of plans on the same draws. Each plan runs at most once per draw."""

    def __init__(self, model: LengthModel, setup: IterationSetup, costs: StageCosts, seed: int) -> None:
        self.model, self.setup, self.costs = model, setup, costs
        self.longest = int(max(setup.prompts)) + model.max_tokens
        count = max(1, min(MAX_DRAWS, SAMPLES_DRAWN // setup.batch))
        generator = np.random.default_rng(seed)
        draws = [model.draw(generator, setup.prompts, setup.lines) for _ in range(count)]
        self._generations: list[SimulatedGeneration] = [generate(lengths, setup, costs) for lengths in draws]
        self._seconds: dict[tuple[int, int, int], float] = {}
        self._unfinished: dict[tuple[int, int], ThresholdState] = {}

    def seconds(self, threshold: int, pool: int, draw: int) -> float:
        """Return the simulated seconds of a plan on one draw."""
        key = (threshold, pool, draw)
        if key not in self._seconds:
            generation = self._generations[draw]
            state = self._state(threshold, draw) if fuses(threshold, pool, self.setup) else None
            iteration = simulated_iteration(generation, self.setup, self.costs, state, pool, self.setup.transfer)
            self._seconds[key] = iteration.seconds
        return self._seconds[key]

    def _state(self, threshold: int, draw: int) -> ThresholdState:
        key = (threshold, draw)
        if key not in self._unfinished:
            self._unfinished[key] = threshold_state(self._generations[draw], threshold, self.model, self.setup.lines)
        return self._unfinished[key]

    def mean(self, threshold: int, pool: int) -> float:
        """Return the mean seconds of a plan over all draws."""
        return math.fsum(self._all(threshold, pool)) / len(self._generations)

    def glance(self, threshold: int, pool: int) -> float:
        """Return the mean seconds of a plan over as many draws as can be simulated quickly."""
        size = self.setup.batch * self.setup.generation_workers
        draws = max(1, min(len(self._generations), GLANCED // size))
        return math.fsum(self.seconds(threshold, pool, draw) for draw in range(draws)) / draws

    def _all(self, threshold: int, pool: int) -> list[float]:
        return [self.seconds(threshold, pool, draw) for draw in range(len(self._generations))]

    def gain(self, threshold: int, pool: int) -> tuple[float, float]:
        """Return the mean seconds gained over Disabled, and the standard error of that mean over the draws."""
        off = self._all(0, self.setup.generation_workers)
        won = np.array(off) - np.array(self._all(threshold, pool))
        error = float(won.std(ddof=1)) / math.sqrt(len(won)) if len(won) > 1 else 0.0
        return float(won.mean()), error

    def best(self) -> tuple[int, int] | None:
        """Return the best plan (threshold, pool) of those tried on all draws; None without one.

        Among equal plans, ordered by threshold, it is the one at a third.
        """
        last = len(self._generations) - 1
        full = [(r, m) for r, m, draw in self._seconds if draw == last and r > 0]
        if not full:
            return None
        least = min(self.mean(*plan) for plan in full)
        equal = sorted(plan for plan in full if self.mean(*plan) <= least * (1 + TIE))
        return equal[len(equal) // 3]

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the best pool of every threshold that was tried on all draws."""
        last = len(self._generations) - 1
        points: dict[int, CurvePoint] = {}
        for threshold, pool in sorted((r, m) for r, m, draw in self._seconds if draw == last):
            seconds = self.mean(threshold, pool)
            if threshold not in points or seconds < points[threshold].seconds:
                points[threshold] = CurvePoint(threshold, pool, seconds)
        return tuple(points[threshold] for threshold in sorted(points))

    def choice(self, threshold: int, pool: int, reason: str) -> FusionChoice:
        """Return a plan as the choice, with this reason."""
        off = self.mean(0, self.setup.generation_workers)
        seconds = self.mean(threshold, pool)
        return FusionChoice(threshold, pool, self.setup.transfer, seconds, off, self.curve(), reason)

    def off(self, why: str) -> FusionChoice:
        """Return the choice not to fuse, with this reason."""
        return self.choice(0, self.setup.generation_workers, f"no fusion: {why}")
