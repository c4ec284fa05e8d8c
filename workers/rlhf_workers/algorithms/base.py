"""The trainer's interface of an algorithm, with defaults that most algorithms share.

Rule: fields come from the whole batch, and token weights from the whole mini-batch, so ranks agree on them without
communication. An algorithm must never draw random numbers, read a clock, or communicate with other ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhf_api.algorithms import Graph, ModelKind
from rlhf_api.algorithms.fields import AlgorithmFields
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.algorithms.batch_metrics import batch_metrics
from rlhf_workers.algorithms.likelihood_objective import LikelihoodObjective
from rlhf_workers.algorithms.objectives import Objective, PolicyLosses, PolicyObjective, TokenLosses, ValueObjective
from rlhf_workers.losses.aggregation import token_mean_weights
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


@dataclass(frozen=True)
class AlgorithmContext:
    """Information about the job and the rank for an algorithm."""

    fields: AlgorithmFields
    """The algorithm's fields in the manifest."""
    graph: Graph
    batch_size: int
    """Samples per iteration."""
    max_response_tokens: int
    """Maximum response tokens, `rollout.maxResponseTokens`."""
    temperature: float
    """Temperature of generation; log-probabilities are those of logits divided by it, or by 1 if it is 0."""
    device: torch.device
    """Device of the loss computation. Batches are on the CPU."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """`spec.algorithm.plugin.parameters`, for a plug-in."""


class Algorithm:
    """An algorithm on one rank. A subclass defines `prepare`, and `policy_loss` or `objectives`.

    B samples, T response positions, n trained response tokens of a micro-batch, concatenated.
    """

    prepared: tuple[str, ...] = ("advantages",)
    """Fields that `prepare` adds to a batch."""

    def __init__(self, context: AlgorithmContext) -> None:
        self.context = context
        self.policy_held = False
        """Whether the current iteration trains only critics, so that state must not react to the policy."""

    def begin_iteration(self, iteration: int) -> None:
        """Receive the number of the next iteration; `prepare` follows directly."""
        self.policy_held = not self.context.fields.trains_policy(iteration)

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        """Return the batch of an iteration with the fields in `prepared`, float32 [B, T], zero outside its mask. May
        change the algorithm's state.
        """
        raise NotImplementedError

    def shaped_rewards(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the reward of each response [B] as reports show it: with a length penalty of the algorithm, without
        its KL term."""
        return batch.rewards

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> PolicyLosses:
        """Return the policy's loss per token [n] with its clipped tokens, bool [n] or None; or its terms.

        `log_p` [n] and `entropy` [n] are differentiable; `microbatch.fields` has the fields of the batch as [n].
        """
        raise NotImplementedError

    def value_loss(self, values: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        """Return a value model's loss per token [n] with its clipped tokens; for graphs that train one."""
        raise NotImplementedError

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        """Return model role -> weight [B, T] of each token in the loss of the mini-batch of samples `rows`.

        The weights of a mean sum to 1, or to 0 without tokens. Default: the mean over the tokens.
        """
        weights = token_mean_weights(mini_batch_mask(batch, rows))
        return dict.fromkeys(self.context.graph.trained, weights)

    def loss_units(self, mask: torch.Tensor) -> int:
        """Return the count by which `token_weights` divides the losses of samples with this mask, bool [B, T].

        Weights times this count depend on their own response alone, so counts of disjoint samples add up. Default: the
        number of tokens.
        """
        return int(mask.sum())

    def objectives(self) -> dict[str, Objective]:
        """Return model role -> objective with empty statistics, for every trained role."""
        return {role: self._objective(role.value, role.kind) for role in self.context.graph.trained}

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        """Return the metrics of a prepared batch before any step."""
        return batch_metrics(batch, self.context.graph)

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        """Receive the metrics of a finished iteration; may add metrics, and change the state for the next one."""

    def state(self) -> dict[str, Any]:
        """Return the state between iterations as JSON data."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore an earlier `state`, of a checkpoint or before a failed training. KeyError, TypeError and ValueError
        mean a corrupt checkpoint.
        """

    def _objective(self, role: str, kind: ModelKind) -> Objective:
        if kind is ModelKind.VALUE:
            return ValueObjective(role, self.value_loss, self.context.device)
        if not self.context.graph.generates:
            return LikelihoodObjective(role, self.policy_loss, self.context.temperature, self.context.device)
        return PolicyObjective(role, self.policy_loss, self.context.temperature, self.context.device)


def context_of(spec: RLHFJobSpec, graph: Graph, device: torch.device) -> AlgorithmContext:
    """Return the context of a job's algorithm."""
    rollout = spec.rollout
    return AlgorithmContext(
        spec.algorithm.fields, graph, rollout.batch_size, rollout.max_response_tokens, rollout.temperature, device
    )


def mini_batch_mask(batch: TrainingBatch, rows: list[int]) -> torch.Tensor:
    """Return the batch's mask, bool [B, T], with the samples outside `rows` masked out."""
    mask = torch.zeros_like(batch.mask)
    mask[rows] = batch.mask[rows]
    return mask


def critic_metrics(critic: str, returns: torch.Tensor, values: torch.Tensor) -> dict[str, float]:
    """Return a critic's metrics over trained tokens: the share of the variance of `returns` [n] that `values` [n]
    explain, and the mean return.
    """
    returns, values = returns.double(), values.double()
    spread = float(returns.var(correction=0)) if len(returns) else 0.0
    unexplained = float((returns - values).var(correction=0)) if len(returns) else 0.0
    return {
        f"{critic}/explained_variance": 1.0 - unexplained / spread if spread > 0 else 0.0,
        f"{critic}/return_mean": float(returns.mean()) if len(returns) else 0.0,
    }
