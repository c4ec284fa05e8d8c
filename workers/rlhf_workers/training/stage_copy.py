"""All that a stage keeps between two trainings, between host memory and its device: weights, buffers, moments.

Rule: that of `offloadable_weights`. Gradients are not among it, as they are zero between two trainings; nor is AdamW's
count of steps, a scalar that stays where it is.
"""

from collections.abc import Iterator

import torch

from rlhf_workers.offloadable_weights import OffloadableWeights
from rlhf_workers.training.model_stages import ModelStage
from rlhf_workers.training.optimizer import StageOptimizer


class StageCopy(OffloadableWeights):
    """Of one stage and its optimizer."""

    def __init__(self, stage: ModelStage, optimizer: StageOptimizer, device: torch.device) -> None:
        """`stage` is on `device`."""
        self._optimizer = optimizer
        super().__init__(stage, device, frozen=False)

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from super()._tensors()
        yield from self._optimizer.moments()
