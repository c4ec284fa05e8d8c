"""AdamW over this rank's part of a sharded stage, and the gathering of whole parameters after a training.

Gradients are summed over ranks by the backward itself, into the same flat array as elsewhere. A file of moments has
those of this rank's rows, `<parameter>.<moment>.rows-<first>-<after the last>`; whole weights are written by the rank
that keeps them. Rule: only `gather` speaks to other ranks, and all ranks call it together.
"""

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from rlhf_api.job.groups import Optimizer
from rlhf_workers.training.communicator import Communicator
from rlhf_workers.training.optimizer import MOMENTS, StageOptimizer, moment_of
from rlhf_workers.training.pipeline_stage import PipelineStage
from rlhf_workers.training.sharded_stage import ShardedStage
from rlhf_workers.training.shared_moments import MomentShares
from rlhf_workers.training.tensor_file import TensorFolder
from rlhf_workers.training.tensor_optimizer import TensorOptimizer
from rlhf_workers.training.tensor_parts import TensorPart


class ShardedOptimizer(StageOptimizer):
    """Its `parameters` are this rank's rows."""

    over_data = True

    def __init__(self, stage: ShardedStage, fields: Optimizer, peak: float) -> None:
        self._sharded = stage
        self.part = f"-shard-{stage.part.rank:05d}"
        super().__init__(stage, fields, peak)

    def _trained(self, stage: PipelineStage) -> dict[str, torch.Tensor]:
        return {name: rows.detach().requires_grad_() for name, rows in self._sharded.local()}

    def make_gradients(self) -> None:
        """See StageOptimizer. The backward adds to gradients that it finds, and makes new ones where it finds none."""
        super().make_gradients()
        for name, parameter in self._sharded.named_parameters():
            whole = cast(DTensor, parameter)
            parameter.grad = DTensor.from_local(
                self._views[name], whole.device_mesh, whole.placements, run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip

    def gather(self, communicator: Communicator) -> None:
        """Bring the parameters that every rank keeps whole up to date: one at a time, in one order on every rank."""
        self._sharded.let_go()
        part = self._sharded.part
        for name, rows in self._sharded.local():
            keeper = self._sharded.keepers[name]
            if keeper != part.rank:
                if len(rows):
                    communicator.send(rows.contiguous(), keeper).wait()
                continue
            whole = self._sharded.kept[name]
            part.own(whole).copy_(rows)
            theirs = {rank: part.rows(len(whole), rank) for rank in range(part.count) if rank != part.rank}
            coming = [
                communicator.receive(whole[there.start : there.stop], rank) for rank, there in theirs.items() if there
            ]
            for one in coming:
                one.wait()

    def step(self, rate: float, scale: float) -> None:
        """See StageOptimizer."""
        self._sharded.let_go()
        super().step(rate, scale)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, master weight) of the parameters that this rank keeps whole."""
        for name, whole in self._sharded.kept.items():
            yield from self._stage.in_folder(name, whole)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the moments of this rank's rows; zeros before the first step."""
        result = {}
        for name, rows in self.parameters.items():
            held = self._sharded.part.rows(self._length(name), self._sharded.part.rank)
            state = self._adamw.state.get(rows, {})
            for moment in MOMENTS if held else ():
                value = state[moment] if state else torch.zeros_like(rows)
                result[f"{name}.{moment}{TensorPart(0, held.start, held.stop).ending}"] = value.detach()
        return result

    def load_state(self, tensors: TensorFolder, steps: int) -> None:
        """See StageOptimizer: one whole moment is in memory at a time."""
        for name, rows in self.parameters.items():
            if not len(rows):
                continue
            moments = {
                moment: self._sharded.part.own(self._stage.of_folder(name, partial(moment_of, tensors, moment))).to(
                    rows.device, copy=True
                )
                for moment in MOMENTS
            }
            step = torch.tensor(float(steps), device=rows.device)
            self._adamw.state[rows] = {"step": step, **moments}

    def _length(self, name: str) -> int:
        return len(self._stage.get_parameter(name))


def optimizer_of(stage: PipelineStage, fields: Optimizer, peak: float, shares: MomentShares) -> StageOptimizer:
    """Return the optimizer of a stage, in parts as the stage is; its parts are moments' too, which need no `shares`."""
    if isinstance(stage, ShardedStage):
        return ShardedOptimizer(stage, fields, peak)
    return (TensorOptimizer if stage.tensor.size > 1 else StageOptimizer)(stage, fields, peak, shares)
