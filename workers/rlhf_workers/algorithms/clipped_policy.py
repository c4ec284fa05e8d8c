"""What PPO and GRPO share: the clipped policy gradient with a KL term and an entropy bonus, and the KL coefficient."""

from typing import Any, Generic, TypeVar, cast

import torch

from rlhf_api.algorithms.fields import PolicyGradientFields
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_workers.algorithms.base import Algorithm, AlgorithmContext
from rlhf_workers.algorithms.objectives import TokenLosses
from rlhf_workers.losses.kl import k3
from rlhf_workers.losses.ppo import policy_loss
from rlhf_workers.training.training_batch import MicroBatch, TrainingBatch

Fields = TypeVar("Fields", bound=PolicyGradientFields)


class ClippedPolicyGradient(Algorithm, Generic[Fields]):
    """The clipped surrogate, with the KL term in the loss where `kl_in_loss` says so."""

    kl_in_loss: bool = False

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.fields = cast(Fields, context.fields)
        self.kl_coefficient = self.fields.kl_coefficient
        self._clip_high = self.fields.clip_range_high or self.fields.clip_range
        self._reference = next(iter(context.graph.compared_fields), None)

    def reference_of(self, batch: TrainingBatch | MicroBatch) -> torch.Tensor | None:
        """Return the log-probabilities by the reference, of the batch's shape; None where the graph has none."""
        return None if self._reference is None else batch.fields.get(self._reference)

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        fields, advantages = self.fields, microbatch.fields["advantages"]
        old = microbatch.fields[SAMPLED_FIELD]
        policy = policy_loss(log_p, old, advantages, fields.clip_range, self._clip_high, fields.dual_clip)
        per_token, reference = policy.loss, self.reference_of(microbatch)
        if self.kl_in_loss and self.kl_coefficient and reference is not None:
            per_token = per_token + self.kl_coefficient * k3(log_p, reference)
        if fields.entropy_coefficient:
            per_token = per_token - fields.entropy_coefficient * entropy
        return per_token, policy.clipped

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        metrics[f"{self.context.graph.policy}/kl_coefficient"] = self.kl_coefficient

    def state(self) -> dict[str, Any]:
        return {"klCoefficient": self.kl_coefficient}

    def restore(self, state: dict[str, Any]) -> None:
        self.kl_coefficient = float(state["klCoefficient"])
