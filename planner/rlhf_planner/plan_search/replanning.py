"""Decides whether a job with `spec.devices` changes its plan, after its predictions have stopped to hold. Rule: pure.

A plan drifts if each of the last ITERATIONS iterations took longer, or each took shorter, than predicted by more than
DRIFT_SHARE, or if response lengths have drifted. Another plan is worth a restart if it saves GAIN_OVER_COST times the
restart's seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

DRIFT_SHARE: Final = 0.2
"""Share of the predicted seconds by which an iteration may be off."""
ITERATIONS: Final = 3
"""Minimum number of measured iterations between two decisions."""
GAIN_OVER_COST: Final = 3.0
"""Seconds that another plan must save over the iterations left, for each second of the restart."""
DECISIVE: Final = ("generate", "score", "train")
"""Stages of the plan in force whose figures must be measured or learned."""


@dataclass(frozen=True)
class PlanHistory:
    """The plan in force: its prediction, and its iterations since."""

    predicted: float
    """Predicted seconds of an iteration."""
    stages: Mapping[str, float]
    """Stage -> predicted seconds; may be empty."""
    measured: Sequence[Mapping[str, float]]
    """Seconds of the same stages, and of others, of each iteration since the last decision, oldest first."""
    lengths_drifted: bool
    iterations_left: int
    restart_seconds: float
    """Measured seconds of a restart with its checkpoint; infinite if unknown."""

    @property
    def last(self) -> list[float]:
        """Seconds of each of the last iterations, at most ITERATIONS, oldest first."""
        return [sum(each.values()) for each in self.measured[-ITERATIONS:]]


@dataclass(frozen=True)
class PlanProspect:
    """A plan, predicted with the figures of the run."""

    words: str
    seconds: float
    """Predicted seconds of an iteration."""
    stages: Mapping[str, float]
    """Stage -> predicted seconds."""
    assumed: frozenset[str] = frozenset()
    """Stages with a prediction from assumed figures."""


@dataclass(frozen=True)
class ReplanVerdict:
    """The decision about a plan."""

    replan: bool
    reason: str
    """Why the plan is kept or changed."""
    gain_seconds: float
    """Predicted seconds that the other plan saves in each iteration; 0 without another plan."""
    measured_seconds: float
    """Median seconds of the last iterations; the prediction without any. Later iterations are compared with it."""


def drift_reason(history: PlanHistory) -> str:
    """Return why a plan has drifted; empty if it has not, without a prediction, or after too few iterations."""
    last = history.last
    if len(last) < ITERATIONS or not history.predicted > 0:
        return ""
    slow = all(seconds > history.predicted * (1 + DRIFT_SHARE) for seconds in last)
    fast = all(seconds < history.predicted * (1 - DRIFT_SHARE) for seconds in last)
    if slow or fast:
        text = f"iterations take {median(last):.3g} s instead of the predicted {history.predicted:.3g} s"
        return f"{text}{_worst_stage(history)}"
    return "response lengths have drifted" if history.lengths_drifted else ""


def decide(history: PlanHistory, own: PlanProspect, best: PlanProspect | None) -> ReplanVerdict:
    """Return the decision about a plan that has drifted.

    `own` is the plan in force, `best` the fastest other plan; None if the plan in force is the fastest one.
    """
    measured = median(history.last) if history.last else history.predicted
    gain = 0.0 if best is None else measured * gain_share(own, best)
    return ReplanVerdict(*_judge(history, own, best, gain), gain, measured)


def gain_share(own: PlanProspect, best: PlanProspect) -> float:
    """Return the share of the seconds of `own` that `best` saves by stages with known figures, 0..1."""
    doubtful = (own.stages.get(name, 0.0) - best.stages.get(name, 0.0) for name in best.assumed)
    saved = own.seconds - best.seconds - sum(max(0.0, seconds) for seconds in doubtful)
    return min(1.0, max(0.0, saved / own.seconds)) if own.seconds > 0 else 0.0


def is_worth(gain_seconds: float, iterations_left: int, restart_seconds: float) -> bool:
    """Return whether seconds saved in each iteration left pay for a restart."""
    return gain_seconds > 0 and gain_seconds * iterations_left >= GAIN_OVER_COST * restart_seconds


def _judge(history: PlanHistory, own: PlanProspect, best: PlanProspect | None, gain: float) -> tuple[bool, str]:
    if len(history.measured) < ITERATIONS:
        return False, f"only {len(history.measured)} of {ITERATIONS} iterations are measured since the last decision"
    if best is None or gain <= 0:
        return False, "no other plan is predicted to be faster by the figures of this run"
    assumed = [name for name in DECISIVE if name in own.assumed]
    if assumed:
        return False, f"the figures of {' and '.join(assumed)} are assumed: this run has not shown them"
    if math.isinf(history.restart_seconds):
        return False, f"{best.words} is predicted to be faster, but no restart was measured"
    saved = gain * history.iterations_left
    text = (
        f"{best.words} is predicted to save {gain:.3g} s per iteration, {saved:.3g} s in {history.iterations_left} "
        f"iterations, for a restart of {history.restart_seconds:.3g} s"
    )
    if is_worth(gain, history.iterations_left, history.restart_seconds):
        return True, text
    return False, f"{text}, which is less than {GAIN_OVER_COST:g} times its cost"


def _worst_stage(history: PlanHistory) -> str:
    """Return the stage that is off by the most seconds, as the rest of a sentence; empty if no predicted stage is
    measured."""
    middle = {
        name: median(each.get(name, 0.0) for each in history.measured[-ITERATIONS:])
        for name in history.stages
        if any(name in each for each in history.measured[-ITERATIONS:])
    }
    if not middle:
        return ""
    name = max(middle, key=lambda stage: abs(middle[stage] - history.stages[stage]))
    return f"; most of it in {name}: {middle[name]:.3g} s instead of {history.stages[name]:.3g} s"
