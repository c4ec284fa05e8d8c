"""What training critics beside decoding is expected to give a job, from the recorded facts of a run, for `rlhf plan`.

Rule: pure. Where the run measured both ways, by that; else its training of all models at once is shared out by size,
which is an assumption that is said. Of an iteration whose critics were apart the facts have no metrics of training.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlhf_planner.critic_overlap_choice import MeasuredOverlap, SeenIteration, choose, predicted
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import scoring_latency, scoring_rate

SHARED_OUT = "policy and critics train one after the other, each for its share of the parameters: no run measured it"


@dataclass(frozen=True, slots=True)
class OverlapForecast:
    """An iteration of a run, both ways, in seconds."""

    iteration: int
    """From 0."""
    disabled: float
    enabled: float
    auto: bool
    """What Auto would do: train critics apart."""
    assumptions: tuple[str, ...] = ()


def forecast(
    facts: Sequence[IterationProfile],
    measured: MeasuredOverlap | None,
    policy_share: float | None,
    late_tasks: Collection[str],
) -> OverlapForecast | None:
    """Return the forecast of the newest iteration that says enough; None when none does.

    `facts`: of a run, oldest first. `measured`: by the run, of both ways; None: it was not. `policy_share`: of the
    parameters of all trained models, 0..1; None: not known. `late_tasks`: scoring tasks that critics do.
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
    if facts.settings.overlap == "Disabled":  # scoring begins when all is generated
        finished = (max(finished),) * len(finished)
    return SeenIteration(_tokens(samples), facts.seconds("Publishing"), finished, beside)


def _shared_out(
    facts: IterationProfile, samples: SampleFacts, policy_share: float, late_tasks: Collection[str]
) -> MeasuredOverlap:
    tokens, seconds = _tokens(samples), facts.seconds("Training")
    busy = sum(task.busy for task in facts.tasks)
    late = sum(task.busy for task in facts.tasks if task.name in late_tasks) / busy if busy > 0 else 1.0
    known = MeasuredOverlap().with_scoring(scoring_rate(samples), scoring_latency(samples), late)
    known = known.with_parts(tokens, seconds * policy_share, seconds * (1 - policy_share))
    return known.with_together(tokens, seconds)


def _tokens(samples: SampleFacts) -> int:
    return max(1, round(sum(samples.prompts) + sum(samples.responses)))
