"""The objective of a policy in a job that does not generate: the likelihood of given responses, without a ratio.

Rule: as in `objectives`.
"""

import torch

from rlhf_workers.algorithms.objectives import PolicyFormula, PolicyTerms, Statistics
from rlhf_workers.training.batches.training_batch import MicroBatch
from rlhf_workers.training.stages.last_stage_outputs import token_log_probabilities
from rlhf_workers.training.stages.pipeline_stage import PipelineStage


class LikelihoodSums:
    """Sums of a policy's tokens, losses, entropies and log-likelihoods, and their metrics."""

    names = ("tokens", "loss", "entropy", "log_likelihood")

    @staticmethod
    def compute(log_p: torch.Tensor, entropy: torch.Tensor, loss: torch.Tensor) -> dict[str, torch.Tensor | float]:
        """Return the sums over a micro-batch of log-probabilities [n] and entropies [n], with its loss, scalar."""
        return {
            "tokens": float(log_p.numel()),
            "loss": loss.detach(),
            "entropy": entropy.detach().double().sum(),
            "log_likelihood": log_p.detach().double().sum(),
        }

    @staticmethod
    def metrics(role: str, sums: dict[str, float]) -> dict[str, float]:
        """Return the means over tokens, and the sum of losses."""
        tokens = max(sums["tokens"], 1.0)
        return {
            f"{role}/entropy": sums["entropy"] / tokens,
            f"{role}/negative_log_likelihood": -sums["log_likelihood"] / tokens,
            f"{role}/loss_sum": sums["loss"],
        }


class LikelihoodObjective:
    """A policy's loss from a formula over log-probabilities and entropies of tokens of existing responses."""

    def __init__(self, role: str, formula: PolicyFormula, temperature: float, device: torch.device) -> None:
        self._role, self._formula, self._temperature = role, formula, temperature
        self.first_pass = False
        self.statistics = Statistics(LikelihoodSums.names, (), device)

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        log_p, entropy = token_log_probabilities(stage, hidden, microbatch, self._temperature)
        losses = self._formula(log_p, entropy, microbatch)
        per_token = losses.loss if isinstance(losses, PolicyTerms) else losses[0]
        loss = (microbatch.weights[self._role] * per_token).sum()
        self.statistics.add(LikelihoodSums.compute(log_p, entropy, loss), {})
        return loss

    def metrics(self) -> dict[str, float]:
        sums, _ = self.statistics.numbers()
        return LikelihoodSums.metrics(self._role, sums)
