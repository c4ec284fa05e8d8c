"""Losses of the last stages, and the sums that become metrics: one objective a model role.

Rule: the loss of a micro-batch is a weighted *sum* whose weights come from the whole mini-batch, so adding
micro-batches, pipelines and replicas gives the mini-batch's loss and gradient exactly. Sums stay on the device until
the iteration ends.
"""

from collections.abc import Mapping
from typing import Final, Protocol

import torch

from rlhf_api.algorithms.grpo import GRPO
from rlhf_api.algorithms.ppo import PPO
from rlhf_workers.losses.kl import k3
from rlhf_workers.losses.log_probabilities import selected_log_probabilities
from rlhf_workers.losses.ppo import limited_log_ratio, policy_loss, value_loss
from rlhf_workers.training.advantages import REFERENCE
from rlhf_workers.training.batch import MicroBatch
from rlhf_workers.training.stages import Stage

MISMATCH_WARNING: Final = 0.02
"""Mean |difference| (nats) of generation's and training's log-probabilities above which ratios are biased visibly."""


class Statistics:
    """Sums and maxima by name, in a fixed order, as tensors that ranks can add up."""

    def __init__(self, sums: tuple[str, ...], maxima: tuple[str, ...], device: torch.device) -> None:
        self.names, self.maximum_names = sums, maxima
        self.sums = torch.zeros(len(sums), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(maxima), dtype=torch.float64, device=device)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A sum so far, scalar."""
        return self.sums[self.names.index(name)]

    def copy(self) -> "Statistics":
        """As it is now, for the case that what is added next does not count after all."""
        copied = Statistics(self.names, self.maximum_names, self.sums.device)
        copied.sums.copy_(self.sums)
        copied.maxima.copy_(self.maxima)
        return copied

    def add(self, sums: Mapping[str, torch.Tensor | float], maxima: Mapping[str, torch.Tensor]) -> None:
        """Adds a micro-batch; names not given count zero."""
        for place, name in enumerate(self.names):
            self.sums[place] += sums.get(name, 0.0)
        for place, name in enumerate(self.maximum_names):
            if name in maxima:
                self.maxima[place] = torch.maximum(self.maxima[place], maxima[name].double())


class Objective(Protocol):
    """Loss of one model role."""

    statistics: Statistics
    first_pass: bool
    """Set while the weights are still those that sampled: the only time a mismatch can be told from learning."""

    def loss(self, stage: Stage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        """Weighted loss of a micro-batch from the last stage's normed states [b, L, hidden]."""

    def metrics(self) -> dict[str, float]:
        """Means from `statistics`, once those of all ranks were added up."""


class ActorObjective:
    """Clipped policy gradient, with KL to the reference in the loss and an entropy bonus where asked."""

    def __init__(self, algorithm: PPO | GRPO, temperature: float, device: torch.device) -> None:
        self._algorithm, self._temperature = algorithm, temperature
        self._clip_high = algorithm.clip_range_high or algorithm.clip_range
        self._kl_in_loss = isinstance(algorithm, GRPO) or algorithm.kl_in == "Loss"
        self.kl_coefficient = algorithm.kl_coefficient
        self.first_pass = False
        sums = ("tokens", "loss", "clipped", "approximate_kl", "entropy", "mismatch", "mismatch_tokens")
        self.statistics = Statistics(sums, ("ratio", "mismatch"), device)

    def loss(self, stage: Stage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        chosen = hidden.flatten(0, 1).index_select(0, microbatch.positions)
        log_p, entropy = selected_log_probabilities(stage.logits(chosen), microbatch.targets, self._temperature)
        old = microbatch.fields["log_probabilities"]
        fields, advantages = self._algorithm, microbatch.fields["advantages"]
        policy = policy_loss(log_p, old, advantages, fields.clip_range, self._clip_high, fields.dual_clip)
        per_token = policy.loss
        if self._kl_in_loss and self.kl_coefficient and REFERENCE in microbatch.fields:
            per_token = per_token + self.kl_coefficient * k3(log_p, microbatch.fields[REFERENCE])
        if self._algorithm.entropy_coefficient:
            per_token = per_token - self._algorithm.entropy_coefficient * entropy
        loss = (microbatch.weights["actor"] * per_token).sum()
        self._observe(loss.detach(), log_p.detach(), old, entropy.detach(), policy.clipped)
        return loss

    def _observe(
        self,
        loss: torch.Tensor,
        log_p: torch.Tensor,
        old: torch.Tensor,
        entropy: torch.Tensor,
        clipped: torch.Tensor,
    ) -> None:
        count, difference = log_p.numel(), log_p - old
        sums: dict[str, torch.Tensor | float] = {
            "tokens": float(count),
            "loss": loss,
            "clipped": clipped.sum(),
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
        sums = dict(zip(self.statistics.names, self.statistics.sums.tolist(), strict=True))
        maxima = dict(zip(self.statistics.maximum_names, self.statistics.maxima.tolist(), strict=True))
        tokens, first = max(sums["tokens"], 1.0), max(sums["mismatch_tokens"], 1.0)
        return {
            "actor/clip_fraction": sums["clipped"] / tokens,
            "actor/approximate_kl": sums["approximate_kl"] / tokens,
            "actor/entropy": sums["entropy"] / tokens,
            "actor/ratio_max": maxima["ratio"],
            "actor/mismatch": sums["mismatch"] / first,
            "actor/mismatch_max": maxima["mismatch"],
            "actor/loss_sum": sums["loss"],
        }


class CriticObjective:
    """Clipped squared error to the returns."""

    def __init__(self, algorithm: PPO, device: torch.device) -> None:
        self._algorithm = algorithm
        self.first_pass = False
        self.statistics = Statistics(("tokens", "loss", "clipped", "value"), (), device)

    def loss(self, stage: Stage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
        values = stage.values(hidden.flatten(0, 1).index_select(0, microbatch.positions))
        outcome = value_loss(
            values, microbatch.fields["values"], microbatch.fields["returns"], self._algorithm.value_clip_range
        )
        loss = (microbatch.weights["critic"] * outcome.loss).sum()
        self.statistics.add(
            {
                "tokens": float(values.numel()),
                "loss": loss.detach(),
                "clipped": outcome.clipped.sum(),
                "value": values.detach().double().sum(),
            },
            {},
        )
        return loss

    def metrics(self) -> dict[str, float]:
        sums = dict(zip(self.statistics.names, self.statistics.sums.tolist(), strict=True))
        tokens = max(sums["tokens"], 1.0)
        return {
            "critic/clip_fraction": sums["clipped"] / tokens,
            "critic/value_mean": sums["value"] / tokens,
            "critic/loss_sum": sums["loss"],
        }
