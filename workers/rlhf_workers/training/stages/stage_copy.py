"""Moves a stage's state between two trainings to host memory and back: weights, buffers, moments.

Frozen weights are copied to host memory once.
"""

from collections.abc import Collection, Iterator, Mapping

import torch

from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.training.training_hooks import TrainingHook
from rlhf_workers.weights.offload import OffloadableWeights, OffloadMemory


class StageCopy(OffloadableWeights):
    """Moves one stage with its optimizer's moments."""

    def __init__(
        self,
        stage: PipelineStage,
        optimizer: StageOptimizer,
        device: torch.device,
        apart: Collection[int] = (),
        memory: OffloadMemory | None = None,
    ) -> None:
        """`stage` is on `device`; `apart` and `memory` as in OffloadableWeights."""
        self._stage, self._optimizer = stage, optimizer
        self._untrained = frozenset(id(part) for part in stage.parameters() if not part.requires_grad)
        super().__init__(stage, device, frozen=False, memory=memory, apart=apart)

    def offload(self) -> None:
        self._stage.forget_geometries()
        super().offload()

    def _changes(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._untrained

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from super()._tensors()
        yield from self._optimizer.moments()


class StageCopies(TrainingHook):
    """All stages that a rank holds whole; parameters that several of them use move with the first."""

    def __init__(
        self,
        stages: Mapping[tuple[str, int], PipelineStage],
        optimizers: Mapping[tuple[str, int], StageOptimizer],
        device: torch.device,
    ) -> None:
        self._optimizers, self.copies = optimizers, list[StageCopy]()
        moved: set[int] = set()
        for key, stage in stages.items():
            if optimizers[key].part:  # parts do not move
                continue
            self.copies.append(StageCopy(stage, optimizers[key], device, frozenset(moved)))
            moved |= {id(part) for part in stage.parameters()}

    def offload(self) -> None:
        """Move weights and moments to host memory and free the gradients, which are zero between two trainings."""
        for optimizer in self._optimizers.values():
            optimizer.drop_gradients()
        for copy in self.copies:
            copy.offload()

    def onload(self) -> None:
        """Move everything back to the device unchanged."""
        for copy in self.copies:
            copy.onload()
        for optimizer in self._optimizers.values():
            if not len(optimizer.gradients):
                optimizer.make_gradients()
