"""Fields and rules of the policy gradients that have critics: iterations that train these alone.

A value head that starts untrained gives advantages that say nothing; the policy need not be trained on them. What
follows from the field is in `rlhf_workers.training.trainer`.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.rules.rule import Rule

WarmupIterations = Annotated[int, Field(ge=0, le=1000000)]


class ActorCriticFields(PolicyGradientFields):
    """Fields of the policy gradients whose advantages are by critics."""

    critic_warmup_iterations: WarmupIterations = 0
    """First iterations of the job that train the critic (safeRlhf: both critics) alone; the actor stays as it is."""

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
            message="must be below spec.iterations, or the actor is never trained: lower it, or raise that",
        )
