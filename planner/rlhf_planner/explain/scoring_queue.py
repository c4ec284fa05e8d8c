"""What more workers that score would gain: the queue of scoring, replayed at a higher rate.

Owns what the causes `slow_reward` and `few_inference_workers` share; they differ in which task samples waited for.
Rule: workers are counted, not measured: as many times the workers are as many times the rate, unless a sample's own
scoring takes longer than that.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts, TaskFacts
from rlhf_planner.explain.replays import meets, scoring_end, scoring_latency, scoring_rate

MAX_TIMES: Final = 8
"""As many inference workers as this times those that there are, at most, are suggested."""
FILLED: Final = 0.5
"""Share of the time in which anything waits, from which on passes of models are what it waits for."""
ENOUGH: Final = 0.9
"""Share of what MAX_TIMES would gain, with which fewer workers are enough."""


class MoreWorkers(NamedTuple):
    """What is suggested."""

    workers: int
    waits: float
    """Seconds after the last response until all was scored."""
    saved: float | None
    """Seconds; None: not known."""


def awaited_task(facts: IterationProfile) -> TaskFacts | None:
    """Return the task that samples waited for: the model that takes longest where passes of models fill most of the
    time in which anything waited, else the call that came last most often; None where neither is known."""
    samples, models = facts.samples, [task for task in facts.tasks if not task.call]
    if samples is None or not samples.scored:
        return None
    waited = scoring_rate(samples) * len(samples.scored) * max(1, facts.settings.inference_workers)
    if models and sum(task.busy for task in models) >= FILLED * waited:
        return max(models, key=lambda task: task.busy)
    return max((task for task in facts.tasks if task.call), key=lambda task: task.last, default=None)


def more_workers(facts: Sequence[IterationProfile]) -> MoreWorkers | None:
    """Return what more inference workers would gain in the last iteration; None where generation workers score, or
    moments were not recorded."""
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
