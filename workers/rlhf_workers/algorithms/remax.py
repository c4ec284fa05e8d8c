"""ReMax: the return of each token, minus the reward of the prompt's greedy response.

Source: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language
Models" (2023).
"""

from rlhf_api.algorithms.remax import ReMax
from rlhf_workers.algorithms.base import AlgorithmContext
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.losses.gae import discounted_returns, token_rewards
from rlhf_workers.training.batches.training_batch import TrainingBatch


class ReinforceAgainstGreedy(ClippedPolicyGradient[ReMax]):
    """See `rlhf_api.algorithms.remax` for its fields."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.kl_in_loss = self.fields.kl_in == "Loss"

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        assert batch.baselines is not None, "training takes the greedy responses out of the batch first"
        above = batch.rewards.double() - batch.baselines.double()
        rewards = token_rewards(above, self.reward_kl(batch), batch.mask, self.kl_coefficient)
        return batch.with_fields(advantages=discounted_returns(rewards, batch.mask, 1.0))
