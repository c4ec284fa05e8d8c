"""Proximal policy optimisation: generalised advantages from a critic, and an optionally adaptive KL coefficient."""

import torch

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SampleField
from rlhf_api.algorithms.ppo import PPO
from rlhf_workers.algorithms.base import AlgorithmContext, critic_metrics
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.algorithms.objectives import TokenLosses
from rlhf_workers.losses.gae import advantages_and_returns, token_rewards, whiten
from rlhf_workers.losses.kl import adapted_coefficient
from rlhf_workers.losses.ppo import value_loss
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


class ProximalPolicyOptimization(ClippedPolicyGradient[PPO]):
    """See `rlhf_api.algorithms.ppo` for its fields."""

    prepared = ("advantages", "returns")

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.kl_in_loss = self.fields.kl_in == "Loss"

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        fields = self.fields
        rewards = token_rewards(batch.rewards, self.reward_kl(batch), batch.mask, self.kl_coefficient)
        values = batch.fields[SampleField.VALUES]
        advantages, returns = advantages_and_returns(rewards, values, batch.mask, fields.gamma, fields.gae_lambda)
        if fields.whiten_advantages:
            advantages = whiten(advantages, batch.mask)
        return batch.with_fields(advantages=advantages, returns=returns)

    def value_loss(self, values: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        old, returns = microbatch.fields[SampleField.VALUES], microbatch.fields["returns"]
        outcome = value_loss(values, old, returns, self.fields.value_clip_range)
        return outcome.loss, outcome.clipped

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        returns, values = (batch.fields[name][batch.mask] for name in ("returns", SampleField.VALUES))
        return super().batch_metrics(batch) | critic_metrics(ModelRole.CRITIC, returns, values)

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        super().finish_iteration(metrics)
        kl = metrics.get(f"{self.context.graph.policy}/kl")
        if self.fields.kl_target and kl is not None and not self.policy_held:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, kl, self.fields.kl_target, self.context.batch_size, self.fields.kl_horizon
            )
