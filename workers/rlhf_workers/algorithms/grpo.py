"""Group relative policy optimisation: a response is judged against the other responses to its prompt."""

import torch

from rlhf_api.algorithms.grpo import GRPO
from rlhf_workers.algorithms.base import mini_batch_mask
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.grpo import group_advantages, sequence_mean_weights
from rlhf_workers.training.training_batch import TrainingBatch


class GroupRelativePolicyOptimization(ClippedPolicyGradient[GRPO]):
    """See `rlhf_api.algorithms.grpo` for its numbers. The KL term is in the loss."""

    kl_in_loss = True

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        scale = self.fields.advantage_scale == "GroupStd"
        of_sample = group_advantages(batch.rewards, batch.groups, batch.valid, scale)
        return batch.with_fields(advantages=of_sample[:, None] * batch.mask)

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        if self.fields.loss_aggregation == "TokenMean":
            return super().token_weights(batch, rows)
        return dict.fromkeys(self.context.graph.trained, sequence_mean_weights(mini_batch_mask(batch, rows)))
