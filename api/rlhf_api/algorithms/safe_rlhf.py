"""Safe RLHF, a reward under a limit on costs: fields and graph. Its losses are `rlhf_workers.algorithms.safe_rlhf`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithms.actor_critic_fields import ActorCriticFields
from rlhf_api.algorithms.fields import Fraction, Positive
from rlhf_api.algorithms.graph import (
    GENERATE,
    SCORE_COST,
    SCORE_COST_VALUES,
    SCORE_REFERENCE,
    SCORE_REWARD,
    SCORE_VALUES,
    TRAIN_ACTOR,
    TRAIN_COST_CRITIC,
    TRAIN_CRITIC,
)
from rlhf_api.api_model import LARGEST, PositiveOrOff
from rlhf_api.rules.rule import Rule


class SafeRLHF(ActorCriticFields):
    """Safe RLHF: maximise the reward while the mean cost stays within a limit, enforced by a Lagrange multiplier.
    Rewards and costs have one critic each."""

    summary: ClassVar = "Safe RLHF: a reward under a limit on costs, actor and two critics."
    all_tasks: ClassVar = (
        GENERATE,
        SCORE_REFERENCE,
        SCORE_VALUES,
        SCORE_COST_VALUES,
        SCORE_REWARD,
        SCORE_COST,
        TRAIN_ACTOR,
        TRAIN_CRITIC,
        TRAIN_COST_CRITIC,
    )

    cost_limit: Annotated[float, Field(ge=-LARGEST, le=LARGEST)] = 0.0
    """Highest mean cost per response: above it the multiplier grows, below it shrinks."""
    initial_multiplier: Positive = 1.0
    """Lagrange multiplier, the weight of costs against rewards, before the first iteration."""
    multiplier_learning_rate: Annotated[float, Field(ge=0, le=LARGEST)] = 0.1
    """Step of the multiplier's logarithm per iteration, per unit of cost above the limit times the multiplier; 0 fixes
    the multiplier."""
    max_multiplier: Positive = 5.0
    """Largest multiplier."""
    cost_window: Annotated[int, Field(ge=1, le=1048576)] = 128
    """Number of last responses whose mean cost is compared with the limit."""
    value_clip_range: PositiveOrOff = 5.0
    """Values of both critics are clipped to old value +- this; 0 disables clipping."""
    gamma: Fraction = 1.0
    """Discount of future rewards and costs, per token."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation, for rewards and costs."""
    whiten_advantages: bool = False
    """Normalise the combined advantages of rewards and costs to mean 0 and variance 1 over the response tokens of the
    batch."""

    @property
    def whitens_batch(self) -> bool:
        return self.whiten_advantages

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        below = path.replace("spec.", "self.", 1)
        yield Rule(
            field="spec.models.cost",
            node="spec",
            cel=f"!has({below}) || has(self.models.cost)",
            holds=lambda values: not values.has(path) or values.has("spec.models.cost"),
            message=(
                f"is needed with {path}: set a function, model, judge or endpoint that scores the harm of a response"
            ),
        )
        yield Rule(
            field=f"{path}.initialMultiplier",
            node=path,
            cel="self.initialMultiplier <= self.maxMultiplier",
            holds=lambda values: values[f"{path}.initialMultiplier"] <= values[f"{path}.maxMultiplier"],
            message=f"must be at most {path}.maxMultiplier: lower it, or raise that",
        )
