"""Safe RLHF: proximal policy optimisation of a reward against a cost with a Lagrange multiplier as its weight.

Rewards and costs have generalised advantages A_R and A_C. The policy trains on (A_R - lambda A_C) / (1 + lambda). The
KL term is subtracted from rewards and added to costs, so its weight is `klCoefficient` for every lambda. Lambda = e^nu
moves once per iteration, by the mean cost of the last responses, but not while only critics train.

Source: Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback" (2023), arXiv 2310.12773.
"""

import math
from collections import deque
from typing import Any

import torch

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.algorithms.graph import SampleField
from rlhf_api.algorithms.safe_rlhf import SafeRLHF
from rlhf_workers.algorithms.base import AlgorithmContext, critic_metrics
from rlhf_workers.algorithms.clipped_policy import ClippedPolicyGradient
from rlhf_workers.algorithms.objectives import Objective, TokenLosses, ValueObjective
from rlhf_workers.losses.gae import advantages_and_returns, token_rewards, whiten
from rlhf_workers.losses.lagrangian import combined_advantages, moved_log_multiplier
from rlhf_workers.losses.ppo import value_loss
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


class SafeReinforcementLearning(ClippedPolicyGradient[SafeRLHF]):
    """See `rlhf_api.algorithms.safe_rlhf` for its fields."""

    prepared = ("advantages", "cost_advantages", "returns", "cost_returns")

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.log_multiplier = math.log(self.fields.initial_multiplier)
        self._costs: deque[float] = deque(maxlen=self.fields.cost_window)

    @property
    def multiplier(self) -> float:
        """Lambda: the weight of a unit of cost against a unit of reward."""
        return math.exp(self.log_multiplier)

    @property
    def window_mean(self) -> float | None:
        """Mean cost of the last `cost_window` responses with a cost; None before the first."""
        return math.fsum(self._costs) / len(self._costs) if self._costs else None

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        fields, kl, costs = self.fields, self.reward_kl(batch), batch.judged[SampleField.COST]
        self._move_multiplier(costs[batch.valid].tolist())
        (of_rewards, returns), (of_costs, cost_returns) = (
            advantages_and_returns(rewards, batch.fields[values], batch.mask, fields.gamma, fields.gae_lambda)
            for rewards, values in (
                (token_rewards(batch.rewards, kl, batch.mask, self.kl_coefficient), SampleField.VALUES),
                (token_rewards(costs, -kl, batch.mask, self.kl_coefficient), SampleField.COST_VALUES),
            )
        )
        advantages = combined_advantages(of_rewards, of_costs, self.multiplier)
        if fields.whiten_advantages:
            advantages = whiten(advantages, batch.mask)
        return batch.with_fields(
            advantages=advantages, cost_advantages=of_costs, returns=returns, cost_returns=cost_returns
        )

    def value_loss(self, values: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        return self._value_loss(values, microbatch, SampleField.VALUES, "returns")

    def cost_value_loss(self, values: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        """Return the `value_loss` of the critic of costs."""
        return self._value_loss(values, microbatch, SampleField.COST_VALUES, "cost_returns")

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        metrics = super().batch_metrics(batch)
        for role, returns, values in (
            (ModelRole.CRITIC, "returns", SampleField.VALUES),
            (ModelRole.COST_CRITIC, "cost_returns", SampleField.COST_VALUES),
        ):
            metrics |= critic_metrics(role, batch.fields[returns][batch.mask], batch.fields[values][batch.mask])
        metrics |= {"cost/lambda": self.multiplier, "cost/nu": self.log_multiplier}
        if self.window_mean is not None:
            metrics["cost/window_mean"] = self.window_mean
        if len(of_costs := batch.fields["cost_advantages"][batch.mask].double()):
            metrics["cost/advantage_mean"] = float(of_costs.mean())
            metrics["cost/advantage_std"] = float(of_costs.std(correction=0))
        return metrics

    def state(self) -> dict[str, Any]:
        return super().state() | {"logMultiplier": self.log_multiplier, "costs": list(self._costs)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.log_multiplier = float(state["logMultiplier"])
        self._costs = deque(map(float, state["costs"]), maxlen=self.fields.cost_window)

    def _objective(self, role: str, kind: ModelKind) -> Objective:
        if role == ModelRole.COST_CRITIC:
            return ValueObjective(role, self.cost_value_loss, self.context.device)
        return super()._objective(role, kind)

    def _move_multiplier(self, costs: list[float]) -> None:
        """Add the costs of an iteration's responses, and move the multiplier if there are costs and the policy
        trains."""
        fields = self.fields
        self._costs.extend(costs)
        if (mean := self.window_mean) is not None and not self.policy_held:
            self.log_multiplier = moved_log_multiplier(
                self.log_multiplier, mean - fields.cost_limit, fields.multiplier_learning_rate, fields.max_multiplier
            )

    def _value_loss(self, values: torch.Tensor, microbatch: MicroBatch, old: str, returns: str) -> TokenLosses:
        outcome = value_loss(values, microbatch.fields[old], microbatch.fields[returns], self.fields.value_clip_range)
        return outcome.loss, outcome.clipped
