"""REINFORCE++: fields and graph. Its losses are `rlhf_workers.algorithms.reinforce_plus_plus`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import Fraction, NonNegative
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.algorithms.group_gradient_fields import GroupGradientFields
from rlhf_api.rules.common_rules import estimator_fits
from rlhf_api.rules.rule import Rule


class ReinforcePlusPlus(GroupGradientFields):
    """REINFORCE with advantages normalised over the batch and PPO's clipped loss; no critic."""

    summary: ClassVar = "REINFORCE++, advantages normalised over the batch, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)

    kl_coefficient: NonNegative = 0.01
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 1
    """Responses per prompt; must divide rollout.batchSize and the algorithm's miniBatchSize."""
    kl_in: Literal["Reward", "Loss"] = "Reward"
    """Use of the KL term: subtracted from each token's reward (with GroupMean its sum from the response's), or added to
    the policy loss."""
    baseline: Literal["None", "GroupMean"] = "None"
    """Value subtracted from the reward: nothing, or the mean of the group; then all tokens of a response have the same
    advantage."""
    gamma: Fraction = 1.0
    """Discount of future rewards, per token; without a baseline."""

    @property
    def whitens_batch(self) -> bool:
        return True

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        yield estimator_fits(path)
        below = path.replace("spec.", "self.", 1)
        yield Rule(
            field=f"{path}.groupSize",
            node="spec",
            cel=f"!has({below}) || {below}.baseline != 'GroupMean' || {below}.groupSize > 1",
            holds=lambda values: (
                not values.has(path) or values[f"{path}.baseline"] != "GroupMean" or values[f"{path}.groupSize"] > 1
            ),
            message=f"must be at least 2 with {path}.baseline GroupMean, which needs other responses: use 8",
        )
        yield Rule(
            field=f"{path}.gamma",
            node="spec",
            cel=f"!has({below}) || {below}.baseline == 'None' || {below}.gamma == 1.0",
            holds=lambda values: (
                not values.has(path) or values[f"{path}.baseline"] == "None" or values[f"{path}.gamma"] == 1
            ),
            message=f"must be 1 with {path}.baseline GroupMean, where all tokens of a response have one advantage",
        )
