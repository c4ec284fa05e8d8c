"""Clipped importance sampling policy optimisation: GRPO's advantages, and a loss whose weights are clipped."""

import torch

from rlhf_workers.algorithms.grpo import GroupRelativePolicyOptimization
from rlhf_workers.losses.cispo import weighted_policy_loss
from rlhf_workers.losses.ppo import PolicyLoss
from rlhf_workers.training.batches.training_batch import MicroBatch


class ClippedImportanceSamplingPolicyOptimization(GroupRelativePolicyOptimization):
    """See `rlhf_api.algorithms.cispo` for its fields."""

    def surrogate(self, log_p: torch.Tensor, microbatch: MicroBatch) -> PolicyLoss:
        advantages = microbatch.fields["advantages"]
        return weighted_policy_loss(
            log_p, self.old_of(microbatch), advantages, self.fields.clip_range, self.clip_range_high
        )
