"""Proximal policy optimisation: fields and graph. Its losses are `rlhf_workers.algorithms.ppo`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.actor_critic_fields import ActorCriticFields
from rlhf_api.algorithms.fields import Fraction, Positive
from rlhf_api.algorithms.graph import (
    GENERATE,
    SCORE_REFERENCE,
    SCORE_REWARD,
    SCORE_VALUES,
    TRAIN_ACTOR,
    TRAIN_CRITIC,
)
from rlhf_api.api_model import PositiveOrOff
from rlhf_api.rules.common_rules import estimator_fits
from rlhf_api.rules.rule import Rule


class PPO(ActorCriticFields):
    """Proximal policy optimisation with a critic (generalised advantage estimation)."""

    summary: ClassVar = "Proximal policy optimisation, actor and critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_VALUES, SCORE_REWARD, TRAIN_ACTOR, TRAIN_CRITIC)

    kl_in: Literal["Reward", "Loss"] = "Reward"
    """Use of the KL term: subtracted from each token's reward, or added to the policy loss."""
    kl_target: Positive | None = None
    """KL in nats per response to which a proportional controller adapts klCoefficient; unset: fixed."""
    kl_horizon: Annotated[int, Field(ge=1, le=2147483647)] = 10000
    """Samples over which the adaptive coefficient moves."""
    value_clip_range: PositiveOrOff = 0.2
    """Values are clipped to old value +- this; 0 disables clipping."""
    gamma: Fraction = 1.0
    """Discount of future rewards, per token."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    whiten_advantages: bool = True
    """Normalise advantages to mean 0 and variance 1 over the response tokens of the batch."""

    @property
    def whitens_batch(self) -> bool:
        return self.whiten_advantages

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        below = path.replace("spec.", "self.", 1)
        yield Rule(
            field=f"{path}.klTarget",
            node="spec",
            cel=f"!has({below}) || !has({below}.klTarget) || {below}.klCoefficient > 0.0",
            holds=lambda values: not values.has(f"{path}.klTarget") or values[f"{path}.klCoefficient"] > 0,
            message=f"needs {path}.klCoefficient above 0 as its start value: set klCoefficient, or remove klTarget",
        )
        yield estimator_fits(path)
