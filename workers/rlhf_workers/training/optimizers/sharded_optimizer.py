"""AdamW over this rank's part of a sharded stage, and the gathering of whole parameters after a training.

The backward itself sums gradients over ranks. A file of moments has those of this rank's rows,
`<parameter>.<moment>.rows-<first>-<after the last>`.

Rule: all ranks call `gather` together.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.optimizers.expert_optimizer import ExpertOptimizer
from rlhf_workers.training.optimizers.optimizer import StageOptimizer
from rlhf_workers.training.optimizers.shared_moments import MomentShares
from rlhf_workers.training.optimizers.tensor_optimizer import TensorOptimizer
from rlhf_workers.training.parallel.expert_stage import SharedExperts
from rlhf_workers.training.parallel.sharded_stage import ShardedStage
from rlhf_workers.training.parallel.tensor_parts import TensorPart
from rlhf_workers.training.stages.pipeline_stage import PipelineStage
from rlhf_workers.weights.tensor_file import TensorFolder


class ShardedOptimizer(StageOptimizer):
    """AdamW over a sharded stage; `parameters` are this rank's rows."""

    over_data = True

    def __init__(self, stage: ShardedStage, fields: Optimizer, offload: bool = False) -> None:
        self._sharded = stage
        self.part = f"-shard-{stage.part.rank:05d}"
        super().__init__(stage, fields, offload=offload)

    def _trained(self, stage: PipelineStage) -> dict[str, torch.Tensor]:
        return {name: rows.detach().requires_grad_() for name, rows in self._sharded.local()}

    def make_gradients(self) -> None:
        """See StageOptimizer. The backward adds to existing gradients, and creates missing ones."""
        super().make_gradients()
        for name, parameter in self._sharded.named_parameters():
            whole = cast(DTensor, parameter)
            parameter.grad = DTensor.from_local(
                self._views[name], whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip

    def gather(self, communicator: Communicator) -> None:
        """Update the whole parameters that ranks keep, one at a time, in the same order on every rank."""
        self._sharded.let_go()
        part = self._sharded.part
        for name, rows in self._sharded.local():
            keeper = self._sharded.keepers[name]
            if keeper != part.rank:
                if len(rows):
                    communicator.send(rows.contiguous(), keeper).wait()
                continue
            whole = self._sharded.whole_tensors[name]
            part.own(whole).copy_(rows)
            theirs = {rank: part.rows(len(whole), rank) for rank in range(part.count) if rank != part.rank}
            coming = [
                communicator.receive(whole[there.start : there.stop], rank) for rank, there in theirs.items() if there
            ]
            for transfer in coming:
                transfer.wait()

    def step(self, rate: float, scale: float) -> None:
        """See StageOptimizer."""
        self._sharded.let_go()
        super().step(rate, scale)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of the parameters that this rank keeps whole."""
        for name, whole in self._sharded.whole_tensors.items():
            yield from self._stage.in_folder(name, whole)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments of this rank's rows; zeros before the first step."""
        result = {}
        for name in self.parameters:
            rows = self._sharded.part.rows(self._length(name), self._sharded.part.rank)
            for moment, value in self._adamw.moments(name).items() if rows else ():
                result[f"{name}.{moment}{TensorPart(0, rows.start, rows.stop).ending}"] = value.detach()
        return result

    def _read(self, tensors: TensorFolder, name: str, moment: str) -> torch.Tensor:
        return self._sharded.part.own(super()._read(tensors, name, moment))

    def _length(self, name: str) -> int:
        return len(self._stage.get_parameter(name))


def optimizer_of(stage: PipelineStage, fields: Optimizer, shares: MomentShares, offload: bool) -> StageOptimizer:
    """Return the optimizer of a stage, split like the stage. A sharded stage needs no `shares`. `offload`: keep moments
    in host memory.
    """
    if isinstance(stage, ShardedStage):
        return ShardedOptimizer(stage, fields, offload)
    if isinstance(stage, SharedExperts):
        return ExpertOptimizer(stage, fields, shares, offload)
    return (TensorOptimizer if stage.tensor.size > 1 else StageOptimizer)(stage, fields, shares, offload)
