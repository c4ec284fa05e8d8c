"""How partial rollouts re-enter the next iteration (`spec.rollout.maxStaleness`).

Whole prompts are carried, and are the first ones of the next iteration, in their order: they count among its prompts.
A sample that has a token of weights more than maxStaleness versions before those of that iteration, or more tokens than
a response may have by now, is begun anew under its own random key, and counted; one that failed is not tried again. No
prompt is passed over: it is trained on, or is on its way.
Rule: pure. It is decided once, when an iteration begins, and written down there; a replay goes by what is written.
"""

from collections.abc import Iterable

from rlhf_api.job.rollout import Rollout
from rlhf_coordinator.state.carried_sample import CarriedSample


def resume_partial(carried: Iterable[CarriedSample], iteration: int, rollout: Rollout) -> tuple[CarriedSample, ...]:
    """Return the first samples of an iteration; none where samples are not carried."""
    return tuple(_resumed(one, iteration, rollout) for one in carried) if rollout.max_staleness else ()


def _resumed(one: CarriedSample, iteration: int, rollout: Rollout) -> CarriedSample:
    oldest = min((span.version for span in one.response.versions), default=iteration)
    if iteration - oldest <= rollout.max_staleness and len(one.response) <= rollout.max_response_tokens:
        return one
    return CarriedSample(one.origin, restarted=True)
