"""REINFORCE leave-one-out: fields and graph. Its losses are `rlhf_workers.algorithms.rloo`."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from rlhf_api.algorithms.fields import LossAggregation, NonNegative
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.algorithms.group_gradient_fields import GroupGradientFields, GroupSize
from rlhf_api.rules.common_rules import estimator_fits
from rlhf_api.rules.rule import Rule


class RLOO(GroupGradientFields):
    """REINFORCE with the mean reward of a prompt's other responses as its baseline; no critic."""

    summary: ClassVar = "REINFORCE leave-one-out, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)
    advantages_by_group: ClassVar = True

    kl_coefficient: NonNegative = 0.05
    """Weight of the KL divergence to the reference model; 0 trains without a reference."""
    group_size: GroupSize = 4
    """Responses per prompt; must divide rollout.batchSize and algorithm.rloo.miniBatchSize."""
    kl_in: Literal["Reward", "Loss"] = "Reward"
    """Use of the KL term: its sum over a response is subtracted from the reward, or it is added to the policy loss."""
    ratio_level: Literal["Token", "Sequence"] = "Sequence"
    """Unit of the ratio of new to old probability: each token, or the whole response."""
    loss_aggregation: LossAggregation = "SequenceMean"
    """See spec.algorithm.ppo.lossAggregation. With ratioLevel Sequence every token has its response's ratio."""

    @classmethod
    def rules(cls, path: str) -> Iterator[Rule]:
        yield from super().rules(path)
        yield estimator_fits(path)
