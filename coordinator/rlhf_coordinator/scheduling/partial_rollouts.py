"""How partial rollouts re-enter the next iteration (`spec.rollout.maxStaleness`).

Whole prompts are carried. They are the first prompts of the next iteration, in their order, and count among its
prompts. A sample restarts under its own random key, and is counted, in two cases: a token was drawn by weights more
than maxStaleness versions older than that iteration's, or the response is longer than now allowed. A failed sample is
not tried again.
Rule: pure. The decision is made once, when an iteration begins, and recorded there; a replay reads the record.
"""

from collections.abc import Iterable

from rlhf_api.job.rollout import Rollout
from rlhf_coordinator.state.carried_sample import CarriedSample


def resume_partial(carried: Iterable[CarriedSample], iteration: int, rollout: Rollout) -> tuple[CarriedSample, ...]:
    """Return the first samples of an iteration; empty where samples are not carried."""
    return tuple(_resumed(sample, iteration, rollout) for sample in carried) if rollout.max_staleness else ()


def _resumed(sample: CarriedSample, iteration: int, rollout: Rollout) -> CarriedSample:
    oldest = min((span.version for span in sample.response.versions), default=iteration)
    if iteration - oldest <= rollout.max_staleness and len(sample.response) <= rollout.max_response_tokens:
        return sample
    return CarriedSample(sample.origin, restarted=True)
