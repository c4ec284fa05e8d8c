"""Forecasts the gain of the critics' overlap from the recorded facts of a run, for `rlhf plan`.

Rule: pure. Without measurements of both ways, it divides the time of joint training by model size.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhf_planner.critic_overlap_choice import MeasuredOverlap, SeenIteration, choose, predicted
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import scoring_latency, scoring_rate

SHARED_OUT = "policy and critics train one after the other, each for its share of the parameters: no run measured it"


@dataclass(frozen=True, slots=True)
class OverlapForecast:
    """Seconds of an iteration of a run, with and without the overlap."""

    iteration: int
    """Number of the iteration, from 0."""
    disabled: float
    enabled: float
    auto: bool
    """Whether the replay of mode Auto would start the overlap."""
    assumptions: tuple[str, ...] = ()


def forecast(
    facts: Sequence[IterationProfile],
    measured: MeasuredOverlap | None,
    policy_share: float | None,
    late_tasks: Collection[str],
) -> OverlapForecast | None:
    """Return the forecast of the newest iteration with enough facts; None without one.

    `facts` are oldest first. `policy_share` is the policy's share of the trained parameters, 0..1, or None if unknown.
    """
    both = measured is not None and measured.together and measured.policy
    for before, seen in reversed(list(zip((None, *facts), facts, strict=False))):
        samples, beside = seen.samples, before is not None and not before.training
        if samples is None or not samples.scored:
            continue
        if measured is not None and both:
            return _forecast(seen, measured, _seen(seen, samples, beside=beside), ())
        at_once = bool(seen.training) and not beside and seen.seconds("Training") > 0
        if policy_share is not None and at_once:
            guessed = _shared_out(seen, samples, policy_share, late_tasks)
            return _forecast(seen, guessed, _seen(seen, samples, beside=False), (SHARED_OUT,))
    return None


def _forecast(
    facts: IterationProfile, measured: MeasuredOverlap, seen: SeenIteration, assumptions: tuple[str, ...]
) -> OverlapForecast:
    disabled, enabled = predicted(measured, seen)
    auto = choose(measured, seen, apart=False, pending=True).apart
    return OverlapForecast(facts.iteration, disabled, enabled, auto, assumptions)


def _seen(facts: IterationProfile, samples: SampleFacts, *, beside: bool) -> SeenIteration:
    finished = tuple(samples.finished)
    if facts.settings.overlap == "Disabled":  # scoring begins when all samples are generated
        finished = (max(finished),) * len(finished)
    return SeenIteration(_tokens(samples), facts.seconds("Publishing"), finished, beside)


def _shared_out(
    facts: IterationProfile, samples: SampleFacts, policy_share: float, late_tasks: Collection[str]
) -> MeasuredOverlap:
    tokens, seconds = _tokens(samples), facts.seconds("Training")
    busy = sum(task.busy for task in facts.tasks)
    late = sum(task.busy for task in facts.tasks if task.name in late_tasks) / busy if busy > 0 else 1.0
    measured = MeasuredOverlap().with_scoring(scoring_rate(samples), scoring_latency(samples), late)
    measured = measured.with_parts(tokens, seconds * policy_share, seconds * (1 - policy_share))
    return measured.with_together(tokens, seconds)


def _tokens(samples: SampleFacts) -> int:
    return max(1, round(sum(samples.prompts) + sum(samples.responses)))
