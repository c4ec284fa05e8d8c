"""Losses of the last stages, and the sums that become metrics: one objective per trained model role.

Rule: the loss of a micro-batch is a weighted *sum* whose weights come from the whole mini-batch, so adding
micro-batches, pipelines and replicas gives the mini-batch's loss and gradient exactly. Sums stay on the device until
the iteration ends.
"""

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import torch

from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_workers.losses.kl import k3
from rlhf_workers.losses.log_probabilities import selected_log_probabilities
from rlhf_workers.losses.ppo import limited_log_ratio
from rlhf_workers.training.model_stages import ModelStage
from rlhf_workers.training.training_batch import MicroBatch

MISMATCH_WARNING: Final = 0.02
"""Mean |difference| (nats) of generation's and training's log-probabilities above which ratios are biased visibly."""

TokenLosses = tuple[torch.Tensor, torch.Tensor | None]
"""(Loss of each token, floating [n]; bool [n]: the tokens whose loss was clipped, or None where there is no clip)."""
PolicyFormula = Callable[[torch.Tensor, torch.Tensor, MicroBatch], TokenLosses]
"""(log-probabilities [n], entropies [n], the micro-batch with its fields [n]) -> losses."""
ValueFormula = Callable[[torch.Tensor, MicroBatch], TokenLosses]
"""(values [n], the micro-batch with its fields [n]) -> losses."""


class Statistics:
    """Sums and maxima by name, in a fixed order, as tensors that ranks can add up."""

    def __init__(self, sums: tuple[str, ...], maxima: tuple[str, ...], device: torch.device) -> None:
        self.names, self.maximum_names = sums, maxima
        self.sums = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(maxima), dtype=torch.float64, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a sum so far, scalar."""
        return self.sums[self.names.index(name)]

    def copy(self) -> "Statistics":
        """Return it as it is now, for the case that what is added next does not count after all."""
        copied = Statistics(self.names, self.maximum_names, self.sums.device)
        copied.sums.copy_(self.sums)
        copied.maxima.copy_(self.maxima)
        return copied

    def add(self, sums: Mapping[str, torch.Tensor | float], maxima: Mapping[str, torch.Tensor]) -> None:
        """Add those of a micro-batch; names that are not given count zero."""
        for place, name in enumerate(self.names):
            self.sums[place] += sums.get(name, 0.0)
        for place, name in enumerate(self.maximum_names):
            if name in maxima:
                self.maxima[place] = torch.maximum(self.maxima[place], maxima[name].double())

    def numbers(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (sums by name, maxima by name)."""
        return (
            dict(zip(self.names, self.sums.tolist(), strict=True)),
            dict(zip(self.maximum_names, self.maxima.tolist(), strict=True)),
        )


class Objective(Protocol):
    """Loss of one model role."""

    statistics: Statistics
    """Holds at least the sum `loss`."""
    first_pass: bool
    """Set while the weights are still those that sampled: the only time a mismatch can be told from learning."""

    def loss(self, stage: ModelStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, scalar, from the last stage's normed states [b, L, hidden]."""

    def metrics(self) -> dict[str, float]:
        """Return means from `statistics`, once those of all ranks were added up, and the sum `<role>/loss_sum`."""


class PolicyObjective:
    """A policy's loss by a formula over log-probabilities and entropies of the sampled tokens."""

    def __init__(self, role: str, formula: PolicyFormula, temperature: float, device: torch.device) -> None:
        self._role, self._formula, self._temperature = role, formula, temperature
        self.first_pass = False
        sums = ("tokens", "loss", "clipped", "approximate_kl", "entropy", "mismatch", "mismatch_tokens")
        self.statistics = Statistics(sums, ("ratio", "mismatch"), device)

    def loss(self, stage: ModelStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        chosen = hidden.flatten(0, 1).index_select(0, microbatch.positions)
        log_p, entropy = selected_log_probabilities(stage.logits(chosen), microbatch.targets, self._temperature)
        per_token, clipped = self._formula(log_p, entropy, microbatch)
        loss = (microbatch.weights[self._role] * per_token).sum()
        self._observe(loss.detach(), log_p.detach(), microbatch.fields[SAMPLED_FIELD], entropy.detach(), clipped)
        return loss

    def _observe(
        self,
        loss: torch.Tensor,
        log_p: torch.Tensor,
        old: torch.Tensor,
        entropy: torch.Tensor,
        clipped: torch.Tensor | None,
    ) -> None:
        count, difference = log_p.numel(), log_p - old
        sums: dict[str, torch.Tensor | float] = {
            "tokens": float(count),
            "loss": loss,
            "clipped": 0.0 if clipped is None else clipped.sum(),
            "approximate_kl": k3(old, log_p).double().sum(),
            "entropy": entropy.double().sum(),
        }
        if self.first_pass:
            sums |= {"mismatch": difference.abs().double().sum(), "mismatch_tokens": float(count)}
        largest = {} if not count else {"ratio": limited_log_ratio(log_p, old).max().exp()}
        if count and self.first_pass:
            largest["mismatch"] = difference.abs().max()
        self.statistics.add(sums, largest)

    def metrics(self) -> dict[str, float]:
        sums, maxima = self.statistics.numbers()
        tokens, first = max(sums["tokens"], 1.0), max(sums["mismatch_tokens"], 1.0)
        return {
            f"{self._role}/clip_fraction": sums["clipped"] / tokens,
            f"{self._role}/approximate_kl": sums["approximate_kl"] / tokens,
            f"{self._role}/entropy": sums["entropy"] / tokens,
            f"{self._role}/ratio_max": maxima["ratio"],
            f"{self._role}/mismatch": sums["mismatch"] / first,
            f"{self._role}/mismatch_max": maxima["mismatch"],
            f"{self._role}/loss_sum": sums["loss"],
        }


class ValueObjective:
    """A value model's loss by a formula over the values of the states before the sampled tokens."""

    def __init__(self, role: str, formula: ValueFormula, device: torch.device) -> None:
        self._role, self._formula = role, formula
        self.first_pass = False
        self.statistics = Statistics(("tokens", "loss", "clipped", "value"), (), device)

    def loss(self, stage: ModelStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        values = stage.values(hidden.flatten(0, 1).index_select(0, microbatch.positions))
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
