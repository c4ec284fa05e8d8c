"""Group relative policy optimisation: fields and graph. Its losses are `rlhf_workers.algorithms.grpo`."""

from typing import ClassVar, Literal

from rlhf_api.algorithms.fields import LossAggregation
from rlhf_api.algorithms.graph import GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR
from rlhf_api.algorithms.group_gradient_fields import GroupGradientFields


class GRPO(GroupGradientFields):
    """Group relative policy optimisation: advantages from a group of responses to one prompt; no critic."""

    summary: ClassVar = "Group relative policy optimisation, no critic."
    all_tasks: ClassVar = (GENERATE, SCORE_REFERENCE, SCORE_REWARD, TRAIN_ACTOR)
    advantages_by_group: ClassVar = True

    advantage_scale: Literal["GroupStd", "None"] = "GroupStd"
    """Whether to divide the group-centred reward by the group's standard deviation."""
    loss_aggregation: LossAggregation = "SequenceMean"
    """See spec.algorithm.ppo.lossAggregation; ConstantLength with advantageScale None is Dr.GRPO."""
