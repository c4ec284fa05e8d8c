"""Host memory of moments (parallelism.offloadOptimizer), as a metric. Must never change what is trained."""

from collections.abc import Collection, Sequence

import torch

from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.training_hooks import TrainingHook


class HostMoments(TrainingHook):
    """Measures the moments of a rank's optimizers."""

    def __init__(self, optimizers: Sequence[StageOptimizer], communicator: Communicator, device: torch.device) -> None:
        self._optimizers, self._communicator, self._device = optimizers, communicator, device

    def metrics(self, trained: Collection[str], layout: RankLayout) -> dict[str, float]:
        """Return the bytes of moments in host memory, on the rank with the most."""
        size = float(sum(optimizer.host_bytes for optimizer in self._optimizers))
        most = torch.tensor([size], dtype=torch.float64, device=self._device)
        self._communicator.all_reduce_max(most, tuple(range(layout.world)))
        return {"train/host_optimizer_bytes": float(most)}
