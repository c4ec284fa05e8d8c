"""How partial rollouts re-enter the next iteration (`spec.rollout.maxStaleness`). Rule: pure."""

from collections.abc import Iterable

from rlhf_api.job.rollout import Rollout
from rlhf_coordinator.state.carried_sample import CarriedSample


def resume_partial(carried: Iterable[CarriedSample], iteration: int, rollout: Rollout) -> tuple[CarriedSample, ...]:
    """Return the first samples of an iteration; those that restart have no tokens. Empty where maxStaleness is 0."""
    return tuple(_resumed(sample, iteration, rollout) for sample in carried) if rollout.max_staleness else ()


def _resumed(sample: CarriedSample, iteration: int, rollout: Rollout) -> CarriedSample:
    oldest = min((span.version for span in sample.response.versions), default=iteration)
    if iteration - oldest <= rollout.max_staleness and len(sample.response) <= rollout.max_response_tokens:
        return sample
    return CarriedSample(sample.origin, restarted=True)
