"""Losses of the last stages, and the sums behind metrics: one objective per trained model role.

Rule: the loss of a micro-batch is a weighted *sum* with weights from the whole mini-batch. So the sum over
micro-batches, pipelines and replicas is the mini-batch's loss and gradient, except for rounding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from rlhf_workers.losses.kl import measured_k3
from rlhf_workers.training.batches.training_batch import MicroBatch
from rlhf_workers.training.stages.last_stage_outputs import token_log_probabilities, token_values
from rlhf_workers.training.stages.pipeline_stage import PipelineStage

MISMATCH_WARNING: Final = 0.02
"""Mean |difference| in nats between the log-probabilities of generation and training above which a warning is
logged."""

TokenLosses = tuple[torch.Tensor, torch.Tensor | None]
"""(Loss of each token, floating [n]; bool [n]: the tokens with a clipped loss, or None without clipping)."""


@dataclass(frozen=True)
class PolicyTerms:
    """A policy's loss per token, by terms with their coefficients, floating [n], and its clipped tokens."""

    policy: torch.Tensor
    """The term of the advantages."""
    clipped_low: torch.Tensor
    """bool [n]: tokens clipped at the lower end of the clip range."""
    clipped_high: torch.Tensor
    """bool [n]: tokens clipped at the upper end, or by the dual clip."""
    kl: torch.Tensor | None = None
    """The divergence from the reference, if it is in the loss."""
    entropy: torch.Tensor | None = None
    """Minus the entropy bonus, if there is one."""

    @property
    def loss(self) -> torch.Tensor:
        """The sum of the terms."""
        total = self.policy if self.kl is None else self.policy + self.kl
        return total if self.entropy is None else total + self.entropy


PolicyLosses = TokenLosses | PolicyTerms
"""A policy's loss: one value per token, or its terms, each of which has a metric."""
PolicyFormula = Callable[[torch.Tensor, torch.Tensor, MicroBatch], PolicyLosses]
"""(log-probabilities [n], entropies [n], the micro-batch with its fields [n]) -> losses."""
ValueFormula = Callable[[torch.Tensor, MicroBatch], TokenLosses]
"""(values [n], the micro-batch with its fields [n]) -> losses."""


class Statistics:
    """Sums and maxima by name, in a fixed order, as tensors that ranks can reduce."""

    def __init__(self, sums: tuple[str, ...], maxima: tuple[str, ...], device: torch.device) -> None:
        self.names, self.maximum_names = sums, maxima
        self.sums = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(maxima), dtype=torch.float64, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a current sum, scalar."""
        return self.sums[self.names.index(name)]

    def copy(self) -> "Statistics":
        """Return a copy, to go back to if later additions are discarded."""
        copied = Statistics(self.names, self.maximum_names, self.sums.device)
        copied.sums.copy_(self.sums)
        copied.maxima.copy_(self.maxima)
        return copied

    def add(self, sums: Mapping[str, torch.Tensor | float], maxima: Mapping[str, torch.Tensor]) -> None:
        """Add the sums and maxima of a micro-batch; missing names change nothing."""
        for place, name in enumerate(self.names):
            self.sums[place] += sums.get(name, 0.0)
        for place, name in enumerate(self.maximum_names):
            if name in maxima:
                self.maxima[place] = torch.maximum(self.maxima[place], maxima[name].double())

    def scale_losses(self, factor: float) -> None:
        """Multiply the sums that carry the weights of the loss."""
        for name in WEIGHTED_SUMS:
            if name in self.names:
                self.sums[self.names.index(name)] *= factor

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (sums by name, maxima by name)."""
        return (
            dict(zip(self.names, self.sums.tolist(), strict=True)),
            dict(zip(self.maximum_names, self.maxima.tolist(), strict=True)),
        )


_LOSS_TERMS: Final = ("policy_loss", "kl_loss", "entropy_loss")
"""Terms of a policy's loss; they are summed with the weights of the loss, so they add up to it."""
_TERM_SUMS: Final = ("clipped_low", "clipped_high", *_LOSS_TERMS)
WEIGHTED_SUMS: Final = ("loss", *_LOSS_TERMS)
"""Sums over losses with the weights of their tokens."""


class Objective(Protocol):
    """Loss of one model role."""

    statistics: Statistics
    """Sums and maxima of the role, at least the sum `loss`."""
    first_pass: bool
    """Whether the next step is an iteration's first and the ranks have not recomputed log-probabilities. A policy then
    compares its own with the engine's.
    """

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, scalar, from the last stage's normed states [b, L, hidden], or
        those of a rank's own positions."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of `statistics`, which are reduced over all ranks. Names that end in `loss_sum` have sums
        over the steps."""


class PolicyObjective:
    """A policy's loss from a formula over log-probabilities and entropies of the sampled tokens."""

    def __init__(self, role: str, formula: PolicyFormula, temperature: float, device: torch.device) -> None:
        self._role, self._formula, self._temperature = role, formula, temperature
        self.first_pass = False
        sums = ("tokens", "loss", "approximate_kl", "entropy", "mismatch", "mismatch_kl", "mismatch_tokens")
        self.statistics = Statistics((*sums, *_TERM_SUMS), ("ratio", "mismatch"), device)

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        log_p, entropy = token_log_probabilities(stage, hidden, microbatch, self._temperature)
        terms = _terms_of(self._formula(log_p, entropy, microbatch), log_p, microbatch)
        weights = microbatch.weights[self._role]
        loss = (weights * terms.loss).sum()
        sums = {"loss": loss.detach(), **_term_sums(terms, weights)}
        self._observe(sums, log_p.detach(), microbatch, entropy.detach())
        return loss

    def _observe(
        self,
        sums: dict[str, torch.Tensor | float],
        log_p: torch.Tensor,
        microbatch: MicroBatch,
        entropy: torch.Tensor,
    ) -> None:
        count, old = log_p.numel(), microbatch.old
        sums["tokens"] = float(count)
        sums["approximate_kl"] = measured_k3(old, log_p).sum()
        sums["entropy"] = entropy.double().sum()
        largest = {} if not count else {"ratio": (log_p.double() - old.double()).max().exp()}
        if self.first_pass:
            if microbatch.stale is not None:  # other weights sampled these, so they do not compare engine and trainer
                log_p, old = log_p[~microbatch.stale], old[~microbatch.stale]
            difference = (log_p - old).abs()
            sums |= {"mismatch": difference.double().sum(), "mismatch_kl": measured_k3(old, log_p).sum()}
            sums["mismatch_tokens"] = float(log_p.numel())
            if log_p.numel():
                largest["mismatch"] = difference.max()
        self.statistics.add(sums, largest)

    def metrics(self) -> dict[str, float]:
        sums, maxima = self.statistics.numbers()
        tokens = max(sums["tokens"], 1.0)
        return {
            f"{self._role}/clip_fraction": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
            f"{self._role}/clip_fraction_low": sums["clipped_low"] / tokens,
            f"{self._role}/clip_fraction_high": sums["clipped_high"] / tokens,
            f"{self._role}/approximate_kl": sums["approximate_kl"] / tokens,
            f"{self._role}/entropy": sums["entropy"] / tokens,
            f"{self._role}/ratio_max": maxima["ratio"],
            f"{self._role}/loss_sum": sums["loss"],
            **{f"{self._role}/{name}_sum": sums[name] for name in _LOSS_TERMS},
        } | ({} if not sums["mismatch_tokens"] else self._mismatch(sums, maxima))

    def _mismatch(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        return {
            f"{self._role}/mismatch": sums["mismatch"] / sums["mismatch_tokens"],
            f"{self._role}/mismatch_max": maxima["mismatch"],
            f"{self._role}/mismatch_kl": sums["mismatch_kl"] / sums["mismatch_tokens"],
        }


def _terms_of(losses: PolicyLosses, log_p: torch.Tensor, microbatch: MicroBatch) -> PolicyTerms:
    """Return losses as terms; a formula without separate terms counts as the policy term."""
    if isinstance(losses, PolicyTerms):
        return losses
    loss, clipped = losses
    if clipped is None:
        nowhere = torch.zeros_like(loss, dtype=torch.bool)
        return PolicyTerms(loss, nowhere, nowhere)
    below = log_p.detach() < microbatch.old
    return PolicyTerms(loss, clipped & below, clipped & ~below)


def _term_sums(terms: PolicyTerms, weights: torch.Tensor) -> dict[str, torch.Tensor | float]:
    """Return the sums of `_TERM_SUMS` over a micro-batch, without those of absent terms."""
    sums: dict[str, torch.Tensor | float] = {
        "clipped_low": terms.clipped_low.sum(),
        "clipped_high": terms.clipped_high.sum(),
    }
    for name, term in zip(_LOSS_TERMS, (terms.policy, terms.kl, terms.entropy), strict=True):
        if term is not None:
            sums[name] = (weights * term.detach()).sum()
    return sums


class ValueObjective:
    """A value model's loss from a formula over the values of the states before the sampled tokens."""

    def __init__(self, role: str, formula: ValueFormula, device: torch.device) -> None:
        self._role, self._formula = role, formula
        self.first_pass = False
        self.statistics = Statistics(("tokens", "loss", "clipped", "value"), (), device)

    def loss(self, stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        values = token_values(stage, hidden, microbatch)
        per_token, clipped = self._formula(values, microbatch)
        loss = (microbatch.weights[self._role] * per_token).sum()
        self.statistics.add(
            {
                "tokens": float(values.numel()),
                "loss": loss.detach(),
                "clipped": 0.0 if clipped is None else clipped.sum(),
                "value": values.detach().double().sum(),
            },
            {},
        )
        return loss

    def metrics(self) -> dict[str, float]:
        sums, _ = self.statistics.numbers()
        tokens = max(sums["tokens"], 1.0)
        return {
            f"{self._role}/clip_fraction": sums["clipped"] / tokens,
            f"{self._role}/value_mean": sums["value"] / tokens,
            f"{self._role}/loss_sum": sums["loss"],
        }
