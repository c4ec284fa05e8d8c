"""Group relative policy optimisation: a response is compared with the mean of the responses to its prompt."""

from rlhf_api.algorithms.grpo import GRPO
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.group_advantages import group_advantages
from rlhf_workers.training.batches.training_batch import TrainingBatch


class GroupRelativePolicyOptimization(ClippedPolicyGradient[GRPO]):
    """See `rlhf_api.algorithms.grpo` for its fields. A KL term, if any, is in the loss."""

    kl_in_loss = True

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        scale = self.fields.advantage_scale == "GroupStd"
        of_sample = group_advantages(batch.rewards, batch.groups, batch.valid, scale)
        return batch.with_fields(advantages=of_sample[:, None] * batch.mask)
