"""Proximal policy optimisation: generalised advantages from a critic, and a KL coefficient that may adapt itself."""

import torch

from rlhf_api.algorithms.graph import SAMPLED_FIELD, SampleField
from rlhf_api.algorithms.ppo import PPO
from rlhf_workers.algorithms.base import AlgorithmContext
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.algorithms.objectives import TokenLosses
from rlhf_workers.losses.gae import advantages_and_returns, token_rewards, whiten
from rlhf_workers.losses.kl import adapted_coefficient, k1
from rlhf_workers.losses.ppo import value_loss
from rlhf_workers.training.training_batch import MicroBatch, TrainingBatch


class ProximalPolicyOptimization(ClippedPolicyGradient[PPO]):
    """See `rlhf_api.algorithms.ppo` for its numbers."""

    prepared = ("advantages", "returns")

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.kl_in_loss = self.fields.kl_in == "Loss"

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        fields, reference = self.fields, self.reference_of(batch)
        kl = torch.zeros_like(batch.fields[SAMPLED_FIELD])
        if not self.kl_in_loss and reference is not None:
            kl = k1(batch.fields[SAMPLED_FIELD], reference)
        rewards = token_rewards(batch.rewards, kl, batch.mask, self.kl_coefficient)
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
        metrics = super().batch_metrics(batch)
        returns, values = (batch.fields[name][batch.mask].double() for name in ("returns", SampleField.VALUES))
        spread = float(returns.var(correction=0)) if len(returns) else 0.0
        unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
        metrics["critic/explained_variance"] = 1.0 - unexplained / spread if spread > 0 else 0.0
        metrics["critic/return_mean"] = float(returns.mean()) if len(returns) else 0.0
        return metrics

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        super().finish_iteration(metrics)
        kl = metrics.get(f"{self.context.graph.policy}/kl")
        if self.fields.kl_target and kl is not None:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, kl, self.fields.kl_target, self.context.batch_size, self.fields.kl_horizon
            )
