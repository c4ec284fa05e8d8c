"""AdamW over a rank's part of a stage in a tensor group, and the whole parameters that it publishes.

A file of moments has this rank's rows or columns.

Rule: the group calls `gather` and `sum_parts` together.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.optimizers.shared_moments import WHOLE, MomentShares
from rlhf_workers.training.stages.pipeline_stage import PipelineStage


class PartGroup(Protocol):
    """The ranks that hold a stage in parts."""

    @property
    def rank(self) -> int:
        """Number of this rank among them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in order of their number."""


class TensorOptimizer(StageOptimizer):
    """Its `parameters` are this rank's parts, and those that every rank of the group has whole."""

    _ending = "-tensor-{:05d}"
    """Suffix of a rank's files."""

    def __init__(
        self,
        stage: PipelineStage,
        fields: Optimizer,
        shares: MomentShares = WHOLE,
        offload: bool = False,
    ) -> None:
        self.part = self._ending.format(self._group_of(stage).rank)
        super().__init__(stage, fields, shares, offload)

    def _group_of(self, stage: PipelineStage) -> PartGroup:
        """Return the ranks that hold the stage together."""
        return stage.tensor

    def _counted_elsewhere(self, stage: PipelineStage) -> frozenset[str]:
        return stage.replicated if self._group_of(stage).rank else frozenset()

    def sum_parts(self, communicator: Communicator) -> None:
        """Sum the gradients of parameters that all ranks hold and each uses only for its own heads or positions."""
        views = [self._views[name] for name in self.parameters if name in self._stage.used_in_parts]
        if not views:
            return
        together = torch.cat([view.flatten() for view in views])
        communicator.all_reduce_sum(together, self._stage.tensor.ranks)
        for view, value in zip(views, together.split([view.numel() for view in views]), strict=True):
            view.copy_(value.view_as(view))

    def gather(self, communicator: Communicator) -> None:
        """Update the whole tensors that ranks keep, one at a time, in the same order on every rank."""
        stage, group = self._stage, self._group_of(self._stage)
        for own in self._gathered():
            for name, value in stage.in_folder(own, self.parameters[own].detach()):
                if stage.keepers[name] == group.rank:
                    self._receive(communicator, name, value)
                elif (part := stage.part_of(name)) is not None and part.length:
                    communicator.send(value.contiguous(), group.ranks[stage.keepers[name]]).wait()

    def _gathered(self) -> Iterable[str]:
        """Return the parameters whose whole tensors are kept beside them."""
        return self.owned

    def _receive(self, communicator: Communicator, name: str, value: torch.Tensor) -> None:
        """Assemble the ranks' parts of a tensor on the rank that keeps it."""
        stage, group = self._stage, self._group_of(self._stage)
        whole = stage.whole_tensors[name]
        if stage.part_of(name) is None:
            whole.copy_(value)
            return
        coming = []
        for number, rank in enumerate(group.ranks):
            part = stage.part_of(name, number)
            assert part is not None
            if number == group.rank:
                part.cut(whole).copy_(value)
            elif part.length:
                buffer = torch.empty_like(part.cut(whole), memory_format=torch.contiguous_format)
                coming.append((part.cut(whole), buffer, communicator.receive(buffer, rank)))
        for place, buffer, handle in coming:
            handle.wait()
            place.copy_(buffer)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of the tensors that this rank keeps whole."""
        yield from self._stage.whole_tensors.items()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments that this rank saves; zeros before the first step."""
        result = {}
        for own in self._stepped_names():
            for moment, value in self._adamw.moments(own).items():
                for name, mine in self._stage.in_folder(own, value):
                    part = self._stage.part_of(name)
                    if part is not None and part.length:
                        result[f"{name}.{moment}{part.ending}"] = mine
                    elif part is None and self._writes_whole(name):
                        result[f"{name}.{moment}"] = mine
        return result

    def _writes_whole(self, name: str) -> bool:
        """Return whether this rank saves the moments of a tensor that several ranks hold alike."""
        return not self._group_of(self._stage).rank
