"""Fields and rules of policy gradients with critics: warm-up iterations that train only the critics.

An untrained value head gives meaningless advantages.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.rules.rule import Rule

WarmupIterations = Annotated[int, Field(ge=0, le=1000000)]


class ActorCriticFields(PolicyGradientFields):
    """Fields of policy gradients whose advantages come from critics."""

    critic_warmup_iterations: WarmupIterations = 0
    """Number of first iterations of the job that train the critic (safeRlhf: both critics), but not the actor."""

    @property
    def responses_per_prompt(self) -> int:
        return 1

    def trains_policy(self, iteration: int) -> bool:
        return iteration >= self.critic_warmup_iterations

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        below, field = path.replace("spec.", "self.", 1), f"{path}.criticWarmupIterations"
        warmup = f"{below}.criticWarmupIterations"
        yield Rule(
            field=field,
            node="spec",
            cel=f"!has({below}) || {warmup} == 0 || {warmup} < self.iterations",
            holds=lambda values: not values.has(path) or not values[field] or values[field] < values["spec.iterations"],
            message="must be below spec.iterations, or the actor is never trained: lower it, or raise spec.iterations",
        )
