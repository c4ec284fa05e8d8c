"""Shared parts of policy gradient algorithms, such as PPO and GRPO: the clipped surrogate with a KL term and an entropy
bonus, and the KL coefficient."""

from typing import Any, Generic, TypeVar, cast

import torch

from rlhf_api.algorithms.fields import KLEstimator, PolicyGradientFields
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_workers.algorithms.base import Algorithm, AlgorithmContext, mini_batch_mask
from rlhf_workers.algorithms.objectives import PolicyTerms
from rlhf_workers.losses.aggregation import constant_length_weights, sequence_mean_weights
from rlhf_workers.losses.kl import divergence
from rlhf_workers.losses.mismatch import correction, mismatch_metrics
from rlhf_workers.losses.ppo import PolicyLoss, policy_loss
from rlhf_workers.training.batches.training_batch import OLD_FIELD, MicroBatch, TrainingBatch

Fields = TypeVar("Fields", bound=PolicyGradientFields)


class ClippedPolicyGradient(Algorithm, Generic[Fields]):
    """The clipped surrogate and an entropy bonus, with the KL term in the loss if `kl_in_loss` is set."""

    kl_in_loss: bool = False

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.fields = cast(Fields, context.fields)
        self.kl_coefficient = self.fields.kl_coefficient
        self.clip_range_high = self.fields.clip_range_high or self.fields.clip_range
        self._reference = next(iter(context.graph.compared_fields), None)

    def reference_of(self, batch: TrainingBatch | MicroBatch) -> torch.Tensor | None:
        """Return the reference's log-probabilities in the batch's shape; None if graph or batch has none."""
        return None if self._reference is None else batch.fields.get(self._reference)

    def old_of(self, batch: TrainingBatch | MicroBatch) -> torch.Tensor:
        """Return the log-probabilities in the ratio's denominator, in the batch's shape."""
        return batch.old

    def corrected(self, losses: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        """Return the policy losses of n tokens times their mismatch weights; unchanged if correction is Disabled."""
        fields = self.fields.mismatch_correction
        if fields.mode == "Disabled":
            return losses
        sampled, samples = microbatch.fields[SAMPLED_FIELD], microbatch.samples
        return correction(microbatch.old, sampled, samples, len(microbatch.last), fields).weights * losses

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        metrics = super().batch_metrics(batch)
        if OLD_FIELD in batch.fields:
            samples, _ = torch.nonzero(batch.mask, as_tuple=True)
            old, sampled = (values[batch.mask] for values in (batch.old, batch.fields[SAMPLED_FIELD]))
            stale = None if batch.stale is None else batch.stale[batch.mask]
            found = mismatch_metrics(old, sampled, samples, len(batch.mask), self.fields.mismatch_correction, stale)
            metrics |= {f"{self.context.graph.policy}/{name}": value for name, value in found.items()}
        return metrics

    @property
    def kl_estimator(self) -> KLEstimator:
        """The estimator of the KL term."""
        return self.fields.kl_estimator or ("K3" if self.kl_in_loss else "K1")

    def reward_kl(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the divergence term of each token [B, T] in the rewards, without its coefficient.

        It is 0 if the KL term is in the loss, or if there is no reference.
        """
        old, reference = self.old_of(batch), self.reference_of(batch)
        if self.kl_in_loss or reference is None:
            return torch.zeros_like(old)
        return divergence(self.kl_estimator, old, reference, old)

    def response_rewards(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the reward of each response [B], float64, minus the weighted divergence terms of its tokens."""
        return batch.rewards.double() - self.kl_coefficient * (self.reward_kl(batch).double() * batch.mask).sum(dim=1)

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        weights, mask = super().token_weights(batch, rows), mini_batch_mask(batch, rows)
        if self.fields.loss_aggregation == "SequenceMean":
            weights[self.context.graph.policy] = sequence_mean_weights(mask)
        elif self.fields.loss_aggregation == "ConstantLength":
            weights[self.context.graph.policy] = constant_length_weights(mask, self.context.max_response_tokens)
        return weights

    def loss_units(self, mask: torch.Tensor) -> int:
        tokens = self.fields.loss_aggregation == "TokenMean"
        return super().loss_units(mask) if tokens else int(mask.any(dim=1).sum())

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> PolicyTerms:
        surrogate, reference = self.surrogate(log_p, microbatch), self.reference_of(microbatch)
        kl = bonus = None
        if self.kl_in_loss and self.kl_coefficient and reference is not None:
            kl = self.kl_coefficient * divergence(self.kl_estimator, log_p, reference, self.old_of(microbatch))
        if self.fields.entropy_coefficient:
            bonus = -self.fields.entropy_coefficient * entropy
        policy = self.corrected(surrogate.loss, microbatch)
        return PolicyTerms(policy, surrogate.clipped_low, surrogate.clipped_high, kl, bonus)

    def surrogate(self, log_p: torch.Tensor, microbatch: MicroBatch) -> PolicyLoss:
        """Return the advantage term of each token [n]: the clipped surrogate, unless overridden."""
        old, advantages = self.old_of(microbatch), microbatch.fields["advantages"]
        return policy_loss(log_p, old, advantages, self.fields.clip_range, self.clip_range_high, self.fields.dual_clip)

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        metrics[f"{self.context.graph.policy}/kl_coefficient"] = self.kl_coefficient

    def state(self) -> dict[str, Any]:
        return {"klCoefficient": self.kl_coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        self.kl_coefficient = float(state["klCoefficient"])
