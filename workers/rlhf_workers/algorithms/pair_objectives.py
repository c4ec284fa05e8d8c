"""Objectives over pairs: for a policy by log-ratios, and for a reward model by scores.

Rule: samples 2k and 2k + 1 of a micro-batch are a pair; the field `PREFERENCE` marks the better one. The sum over
micro-batches is the mean over the pairs of a mini-batch that have a token.
"""

from collections.abc import Callable
from typing import Final

import torch

from rlhf_workers.algorithms.likelihood_objective import LikelihoodSums
from rlhf_workers.algorithms.objectives import Statistics
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch
from rlhf_workers.training.stages.last_stage_outputs import response_scores, token_log_probabilities
from rlhf_workers.training.stages.pipeline_stage import PipelineStage

PREFERENCE: Final = "preference"
"""Field: 1 on the tokens of a pair's better response, -1 on those of the worse one."""
PairFormula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(values of the better responses [p], of the worse ones [p]) -> loss of each pair [p], differentiable."""


def with_preference(batch: TrainingBatch, first_is_better: torch.Tensor) -> TrainingBatch:
    """Return the batch with PREFERENCE. `first_is_better`: bool [B / 2], one per pair."""
    sign = torch.where(first_is_better, 1.0, -1.0)
    of_sample = torch.stack([sign, -sign], dim=1).flatten()
    return batch.with_fields(**{PREFERENCE: of_sample[:, None] * batch.mask})


def pair_mean_weights(mask: torch.Tensor) -> torch.Tensor:
    """Return the weight [B, T] of each token of a mini-batch's `mask`: those of a pair sum to 1 / number of pairs with
    any token."""
    of_pair = mask.sum(dim=1).view(-1, 2).sum(dim=1)
    pairs = int((of_pair > 0).sum())
    weight = torch.where(of_pair > 0, 1.0 / of_pair.clamp(min=1), 0.0) / max(1, pairs)
    return weight.repeat_interleave(2)[:, None] * mask


class _PairSums:
    """Statistics of pairs: values of their better and worse responses, and how often the order is correct."""

    names = ("pairs", "chosen", "rejected", "accurate")

    @staticmethod
    def compute(chosen: torch.Tensor, rejected: torch.Tensor, counted: torch.Tensor) -> dict[str, torch.Tensor | float]:
        return {
            "pairs": counted.sum(),
            "chosen": chosen.detach()[counted].double().sum(),
            "rejected": rejected.detach()[counted].double().sum(),
            "accurate": (chosen.detach() > rejected.detach())[counted].sum(),
        }

    @staticmethod
    def metrics(role: str, quantity: str, sums: dict[str, float]) -> dict[str, float]:
        pairs = max(sums["pairs"], 1.0)
        return {
            f"{role}/accuracy": sums["accurate"] / pairs,
            f"{role}/{quantity}_chosen": sums["chosen"] / pairs,
            f"{role}/{quantity}_rejected": sums["rejected"] / pairs,
            f"{role}/{quantity}_margin": (sums["chosen"] - sums["rejected"]) / pairs,
        }


def _ordered(of_sample: torch.Tensor, microbatch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of each pair's better and worse response, [b / 2], from those of samples [b]."""
    first, second = of_sample.view(-1, 2).unbind(dim=1)
    sign = microbatch.sum_by_sample(microbatch.fields[PREFERENCE]).view(-1, 2)
    first_is_better = sign[:, 0] >= sign[:, 1]
    return torch.where(first_is_better, first, second), torch.where(first_is_better, second, first)


def _weights(microbatch: MicroBatch, role: str) -> torch.Tensor:
    """Return the weight of each pair, [b / 2]."""
    return microbatch.sum_by_sample(microbatch.weights[role]).view(-1, 2).sum(dim=1)


class LogRatioObjective:
    """A policy's loss from the log-ratios of whole responses to the reference. Metrics show beta times these, its
    implicit rewards."""

    def __init__(
        self, role: str, formula: PairFormula, beta: float, reference: str, temperature: float, device: torch.device
    ) -> None:
        """`formula` takes the log-ratios; `reference`: the field with the reference's log-probabilities."""
        self._role, self._formula, self._beta = role, formula, beta
        self._reference, self._temperature = reference, temperature
        self.first_pass = False
        self.statistics = Statistics((*LikelihoodSums.names, *_PairSums.names), (), device)

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        log_p, entropy = token_log_probabilities(stage, hidden, microbatch, self._temperature)
        log_ratios = microbatch.sum_by_sample(log_p - microbatch.fields[self._reference])
        chosen, rejected = _ordered(log_ratios, microbatch)
        weights = _weights(microbatch, self._role)
        loss = (weights * self._formula(chosen, rejected)).sum()
        sums = _PairSums.compute(self._beta * chosen, self._beta * rejected, weights > 0)
        self.statistics.add(sums | LikelihoodSums.compute(log_p, entropy, loss), {})
        return loss

    def metrics(self) -> dict[str, float]:
        sums, _ = self.statistics.numbers()
        pairs = _PairSums.metrics(self._role, "implicit_reward", sums)
        return LikelihoodSums.metrics(self._role, sums) | pairs


class ScoreObjective:
    """A reward model's loss from its scores at the last trained token of each response."""

    def __init__(self, role: str, formula: PairFormula, device: torch.device) -> None:
        self._role, self._formula = role, formula
        self.first_pass = False
        self.statistics = Statistics(("loss", *_PairSums.names), (), device)

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        chosen, rejected = _ordered(response_scores(stage, hidden, microbatch), microbatch)
        weights = _weights(microbatch, self._role)
        loss = (weights * self._formula(chosen, rejected)).sum()
        self.statistics.add({"loss": loss.detach(), **_PairSums.compute(chosen, rejected, weights > 0)}, {})
        return loss

    def metrics(self) -> dict[str, float]:
        sums, _ = self.statistics.numbers()
        return {f"{self._role}/loss_sum": sums["loss"], **_PairSums.metrics(self._role, "score", sums)}
