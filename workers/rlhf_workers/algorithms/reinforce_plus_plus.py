"""REINFORCE++: returns of tokens, or rewards minus their group's mean, normalised over all tokens of the batch.

Source: Hu et al., "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", 2025.
"""

from rlhf_api.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from rlhf_workers.algorithms.base import AlgorithmContext
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.gae import discounted_returns, token_rewards, whiten
from rlhf_workers.losses.group_advantages import group_advantages
from rlhf_workers.training.batches.training_batch import TrainingBatch


class ReinforceWithGlobalNormalization(ClippedPolicyGradient[ReinforcePlusPlus]):
    """See `rlhf_api.algorithms.reinforce_plus_plus` for its fields."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.kl_in_loss = self.fields.kl_in == "Loss"

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        if self.fields.baseline == "GroupMean":
            rewards = self.response_rewards(batch)
            of_sample = group_advantages(rewards, batch.groups, batch.valid, scale=False)
            advantages = of_sample[:, None] * batch.mask
        else:
            rewards = token_rewards(batch.rewards, self.reward_kl(batch), batch.mask, self.kl_coefficient)
            advantages = discounted_returns(rewards, batch.mask, self.fields.gamma)
        return batch.with_fields(advantages=whiten(advantages, batch.mask))
