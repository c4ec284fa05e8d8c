"""AdamW over a stage whose experts are divided over an expert group: which ranks sum what, and which rank counts it.

Experts come first in the flat array of gradients. Their gradients are summed over the copies of this rank's part, all
others over all copies of the stage. A norm counts experts on their own rank, and the other parameters on the group's
first rank.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch

from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.tensor_optimizer import PartGroup, TensorOptimizer
from rlhf_workers.training.parallel.expert_stage import SharedExperts
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.weights.tensor_file import TensorFolder


class ExpertOptimizer(TensorOptimizer):
    """Optimizer of a SharedExperts stage."""

    _ending = "-expert-{:05d}"

    @property
    def _shared(self) -> SharedExperts:
        return cast(SharedExperts, self._stage)

    def _group_of(self, stage: PipelineStage) -> PartGroup:
        return cast(SharedExperts, stage).group

    def _trained(self, stage: PipelineStage) -> dict[str, torch.Tensor]:
        named = super()._trained(stage)
        return dict(sorted(named.items(), key=lambda item: not cast(SharedExperts, stage).in_parts(item[0])))

    def sum_copies(self, communicator: Communicator, holders: tuple[int, ...], by_experts: tuple[int, ...]) -> None:
        """See StageOptimizer."""
        own = sum(self.parameters[name].numel() for name in self._gathered())
        communicator.all_reduce_sum(self.gradients[:own], by_experts)
        communicator.all_reduce_sum(self.gradients[own:], holders)

    def _gathered(self) -> Iterable[str]:
        return [name for name in self.owned if self._shared.in_parts(name)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of the tensors that this rank keeps whole, or provides for all."""
        for own in self.owned:
            for name, value in self._shared.in_folder(own, self.parameters[own].detach()):
                if self._shared.keepers[name] == self._shared.group.rank:
                    yield name, self._shared.whole_tensors.get(name, value)

    def _writes_whole(self, name: str) -> bool:
        return self._shared.keepers[name] == self._shared.group.rank

    def _read(self, tensors: TensorFolder, name: str, moment: str) -> torch.Tensor:
        return self._shared.own(name, super()._read(tensors, name, moment))
