"""REINFORCE leave-one-out: a response is compared with the mean of the other responses to its prompt.

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE-Style Optimization" (2024).
"""

import torch

from rlhf_api.algorithms.rloo import RLOO
from rlhf_workers.algorithms.base import AlgorithmContext
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.group_advantages import leave_one_out_advantages
from rlhf_workers.losses.ppo import LOG_RATIO_LIMIT, PolicyLoss, clipped_surrogate
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


class ReinforceLeaveOneOut(ClippedPolicyGradient[RLOO]):
    """See `rlhf_api.algorithms.rloo` for its fields."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.kl_in_loss = self.fields.kl_in == "Loss"

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        rewards = self.response_rewards(batch)
        of_sample = leave_one_out_advantages(rewards, batch.groups, batch.valid)
        return batch.with_fields(advantages=of_sample[:, None] * batch.mask)

    def surrogate(self, log_p: torch.Tensor, microbatch: MicroBatch) -> PolicyLoss:
        fields = self.fields
        if fields.ratio_level == "Token":
            return super().surrogate(log_p, microbatch)
        moved = microbatch.sum_by_sample(log_p - self.old_of(microbatch)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio, advantages = torch.exp(moved)[microbatch.samples], microbatch.fields["advantages"]
        return clipped_surrogate(ratio, advantages, fields.clip_range, self.clip_range_high, fields.dual_clip)
