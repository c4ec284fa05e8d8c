"""DAPO: group relative advantages of shaped rewards, a decoupled clip range, and by default a mean over tokens.

With refillRounds, the coordinator replaces prompts before training (`rlhf_coordinator.state.batch_refill`).
"""

import torch

from rlhf_api.algorithms.dapo import DAPO
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.group_advantages import group_advantages
from rlhf_workers.losses.overlong import overlong_penalty
from rlhf_workers.training.batches.training_batch import TrainingBatch


class DynamicSamplingPolicyOptimization(ClippedPolicyGradient[DAPO]):
    """See `rlhf_api.algorithms.dapo` for its fields. A KL term, if any, is in the loss."""

    kl_in_loss = True

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        of_sample = group_advantages(self.shaped_rewards(batch), batch.groups, batch.valid, scale=True)
        return batch.with_fields(advantages=of_sample[:, None] * batch.mask)

    def shaped_rewards(self, batch: TrainingBatch) -> torch.Tensor:
        return batch.rewards.double() + self._penalty(batch)

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        metrics = super().batch_metrics(batch)
        if batch.valid.any():
            metrics["reward/overlong_penalty"] = -float(self._penalty(batch)[batch.valid].mean())
        return metrics

    def _penalty(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the addition to each reward, float64 [B]."""
        fields, longest = self.fields, self.context.max_response_tokens
        return overlong_penalty(
            batch.response_lengths, longest, fields.overlong_share * longest, fields.overlong_penalty
        )
