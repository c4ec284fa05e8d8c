"""REINFORCE with a moving baseline, as a plug-in: `rlhf run examples/your_algorithm/job.yaml`.

The advantage of a response is its reward minus a moving average of the rewards of earlier iterations.
"""

from typing import Any

import torch

from rlhf_workers.algorithms.base import Algorithm, AlgorithmContext
from rlhf_workers.algorithms.objectives import TokenLosses
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


class Reinforce(Algorithm):
    """REINFORCE. Parameters: `momentum`, the weight of the old baseline in each iteration."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.momentum = float(context.parameters.get("momentum", 0.8))
        self.baseline: float | None = None  # no iteration has finished yet

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        """Give every response token its reward minus the baseline, then update the baseline."""
        mean = float(batch.rewards[batch.valid].mean()) if batch.valid.any() else self.baseline or 0.0
        baseline = mean if self.baseline is None else self.baseline
        self.baseline = self.momentum * baseline + (1 - self.momentum) * mean
        return batch.with_fields(advantages=(batch.rewards - baseline)[:, None] * batch.mask)

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        """Raise the probability of responses that were better than the baseline."""
        return -microbatch.fields["advantages"] * log_p, None

    def finish_iteration(self, metrics: dict[str, float]) -> None:
        """Add the baseline to the metrics."""
        metrics["reinforce/baseline"] = self.baseline or 0.0

    def state(self) -> dict[str, Any]:
        """Return the baseline for a checkpoint."""
        return {"baseline": self.baseline}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the baseline from a checkpoint."""
        self.baseline = state["baseline"]
