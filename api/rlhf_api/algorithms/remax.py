"""ReMax: fields and graph. Its losses are `rlhf_workers.algorithms.remax`."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.algorithms.fields import NonNegative
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.algorithms.group_gradient_fields import GroupGradientFields
from rlhf_api.rules.common_rules import estimator_fits
from rlhf_api.rules.rule import Rule


class ReMax(GroupGradientFields):
    """REINFORCE with the reward of the prompt's greedy response as its baseline; no critic. The greedy response is
    decoded and judged like the others but not trained on: it counts neither in rollout.batchSize nor in miniBatchSize.
    """

    summary: ClassVar = "REINFORCE against the greedy response to the prompt, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)
    greedy_baseline: ClassVar = True

    kl_coefficient: NonNegative = 0.01
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    group_size: Annotated[int, Field(ge=1, le=65536)] = 1
    """Responses per prompt that are trained on; must divide rollout.batchSize and the algorithm's miniBatchSize. One
    more is decoded greedily."""
    kl_in: Literal["Reward", "Loss"] = "Reward"
    """Use of the KL term: subtracted from each token's reward, or added to the policy loss."""

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        yield estimator_fits(path)
