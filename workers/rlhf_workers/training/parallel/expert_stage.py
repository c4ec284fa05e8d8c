"""A stage whose layers hold some of their experts: consecutive parts on the ranks of an expert group.

Owns the assignment of experts to this rank, and of the whole tensors that it keeps for readers, as of the last
gathering.

Rule: only experts are in parts; every rank of the group holds the other tensors of its stage.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from rlhf_common.names import ExitCode
from rlhf_planner.tensor_split import experts_problem
from rlhf_workers.failures import WorkError
from rlhf_workers.models.experts import EXPERTS, layers_of_experts
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.expert_group import ExpertGroup
from rlhf_workers.training.parallel.tensor_parts import TensorPart, equal_part, near_equal_keepers
from rlhf_workers.training.stages.model_stages import ModelStage
from rlhf_workers.training.stages.pipeline_stage import Head, PipelineStage, Reader

FIELD: Final = "spec.training.parallelism.expert"


class SharedExperts(PipelineStage):
    """A stage with some of the experts and all other parameters. The code that creates its layers calls `share_out`."""

    group: ExpertGroup

    def share_out(self, group: ExpertGroup) -> None:
        """Reduce the experts to this rank's, on the meta device, and assign whole tensors to the ranks that keep
        them."""
        self.group, self.whole_tensors = group, {}
        sizes = {name: value.numel() for name, value in self.named_parameters() if name not in self.duplicates}
        experts = {name: size for name, size in sizes.items() if self.in_parts(name)}
        others = {name: size for name, size in sizes.items() if name not in experts}
        self.replicated = frozenset(others)
        self.keepers = self._keepers(experts) | self._keepers(others)
        for module in layers_of_experts(self):
            _cut(module, group)

    def _keepers(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return folder's name -> rank of the group, for parameters with these numbers of values."""
        named: dict[str, int] = {}
        for name in sizes:
            named |= {part: value.numel() for part, value in self.in_folder(name, self.get_parameter(name))}
        return near_equal_keepers(named, len(self.group.ranks))

    def join(self, communicator: Communicator) -> None:
        """See PipelineStage."""
        super().join(communicator)
        self.group.communicator = communicator

    def in_parts(self, name: str) -> bool:
        """Return whether ranks have parts of a parameter, or of a folder's tensor."""
        return f"{EXPERTS}." in name

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, as a view."""
        if not self.in_parts(name):
            return whole
        return equal_part(whole.shape, 0, self.group.rank, len(self.group.ranks)).cut(whole)

    def _take(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        parameter.copy_(self.own(name, value))
        if not self.in_parts(name):
            return
        ((part, _),) = self.in_folder(name, value)  # experts are one tensor with the same layout
        if self.keepers[part] == self.group.rank:
            self.whole_tensors[part] = value.to(parameter.device, torch.float32, copy=True)


class ExpertStage(SharedExperts, ModelStage):
    """A stage of transformers' layers with some of their experts."""

    def part_of(self, name: str, rank: int | None = None) -> TensorPart | None:
        """See PipelineStage; of the expert group."""
        if not self.in_parts(name):
            return None
        return equal_part(self._whole(name), 0, self.group.rank if rank is None else rank, len(self.group.ranks))

    def of_folder(self, name: str, read: Reader) -> torch.Tensor:
        """Return the whole tensor, of which this rank holds `part_of`."""
        return read(name, self._whole(name))

    def _whole(self, name: str) -> torch.Size:
        shape = self.get_parameter(name).shape
        return torch.Size((shape[0] * len(self.group.ranks), *shape[1:])) if self.in_parts(name) else shape


def sharing(group: ExpertGroup) -> Callable[[Any, range, int, Head], ModelStage]:
    """Return a function that creates a stage without memory whose experts are divided over the ranks of a group."""

    def make(skeleton: Any, layers: range, stages_after: int, head: Head) -> ModelStage:
        stage = ExpertStage(skeleton, layers, stages_after, head)
        stage.share_out(group)
        return stage

    return make


def _cut(module: Any, group: ExpertGroup) -> None:
    """Reduce a module on the meta device to this rank's experts, and send tokens of other experts to their ranks."""
    for name, whole in list(module.named_parameters(recurse=False)):
        part = whole.new_empty(len(whole) // len(group.ranks), *whole.shape[1:])
        setattr(module, name, nn.Parameter(part))
    module.spread = group.spread


def require_experts(config: Any, expert: int, source: str) -> None:
    """Raise WorkError, with the field, its value and the `source` of the model, if `expert` ranks cannot divide its
    experts."""
    if problem := experts_problem(config.to_dict(), expert):
        message = f"{FIELD}: {expert}: {source}: {problem}"
        raise WorkError("ModelUnsupported", message, field=FIELD, exit_code=ExitCode.BAD_MODEL)
