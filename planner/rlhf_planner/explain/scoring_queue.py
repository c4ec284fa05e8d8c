"""Replays the scoring queue at a higher rate, for the cause `scoring_waits`.

Rule: n times the workers give n times the rate, unless the scoring of a single sample takes longer.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts, TaskFacts
from rlhf_planner.explain.replays import meets, scoring_end, scoring_latency, scoring_rate

MAX_TIMES: Final = 8
"""Largest factor on the number of inference workers that is suggested."""
FILLED: Final = 0.5
"""Share of the waiting time that model passes must fill to count as its cause."""
ENOUGH: Final = 0.9
"""Share of the gain of MAX_TIMES times the workers at which fewer workers are enough."""


class MoreWorkers(NamedTuple):
    """A suggested number of workers and its gain."""

    workers: int
    waits: float
    """Seconds from the last response until all samples were scored."""
    saved: float | None
    """Seconds saved; None if unknown."""


def awaited_task(facts: IterationProfile) -> TaskFacts | None:
    """Return the task that samples waited for; None if unknown.

    It is the busiest model if passes fill at least FILLED of the workers' scoring time, else the call whose result came
    last most often.
    """
    samples, models = facts.samples, [task for task in facts.tasks if not task.call]
    if samples is None or not samples.scored:
        return None
    waited = scoring_rate(samples) * len(samples.scored) * max(1, facts.settings.inference_workers)
    if models and sum(task.busy for task in models) >= FILLED * waited:
        return max(models, key=lambda task: task.busy)
    return max((task for task in facts.tasks if task.call), key=lambda task: task.last, default=None)


def more_workers(facts: Sequence[IterationProfile]) -> MoreWorkers | None:
    """Return the gain of more inference workers in the last iteration.

    Returns None without inference workers or recorded moments, and if overlap is Disabled.
    """
    last = facts[-1]
    samples, present = last.samples, last.settings.inference_workers
    if samples is None or not samples.scored or not present or last.settings.overlap == "Disabled":
        return None
    generated, scored = max(samples.finished), max(samples.scored)
    waits = max(0.0, scored - generated)
    apart, latency = scoring_rate(samples), scoring_latency(samples)
    if not meets(scoring_end(samples.finished, apart, latency), scored):
        return MoreWorkers(present + 1, waits, None)

    def saved(workers: int) -> float:
        return max(0.0, scored - max(generated, _end(samples, apart * present / workers, latency)))

    most = saved(MAX_TIMES * present)
    workers = next(
        (count for count in range(present + 1, MAX_TIMES * present) if saved(count) >= ENOUGH * most),
        MAX_TIMES * present,
    )
    return MoreWorkers(workers, waits, saved(workers))


def _end(samples: SampleFacts, apart: float, latency: float) -> float:
    return scoring_end(samples.finished, apart, latency)
