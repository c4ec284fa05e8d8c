"""A stage whose parameters are divided over the ranks of its group: PyTorch's `fully_shard` around a `ModelStage`.

Owns which rows of a parameter are this rank's, and which whole parameters it keeps for readers.

Rule: within a step the group only gathers and sums, in the same order on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from rlhf_workers.training.batches.packed_rows import PackedRow
from rlhf_workers.training.communication.communicator import waiting_for
from rlhf_workers.training.parallel.context_group import ContextCut
from rlhf_workers.training.parallel.tensor_parts import near_equal_keepers
from rlhf_workers.training.stages.model_stages import ModelStage
from rlhf_workers.training.stages.pipeline_stage import Head

FIELD: Final = "spec.training.parallelism.shard"


@dataclass(frozen=True)
class Part:
    """Division of parameters over ranks: row blocks of one size, the last ones smaller or empty."""

    rank: int
    count: int

    def rows(self, length: int, rank: int) -> range:
        """Return a rank's rows of a parameter with `length` rows."""
        size = -(-length // self.count)
        return range(min(length, rank * size), min(length, (rank + 1) * size))

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, as a view."""
        mine = self.rows(len(whole), self.rank)
        return whole[mine.start : mine.stop]


class ShardedStage(ModelStage):
    """All of a model, of which this rank holds a part."""

    part: Part
    keepers: dict[str, int]
    """Parameter name -> the rank that keeps it whole."""
    whole_tensors: dict[str, torch.Tensor]
    """Whole parameters, float32, on this stage's device, as of the last gathering or loading."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """See PipelineStage. The stage's own forward gathers a tied embedding with the head."""
        embedded: torch.Tensor = self(tokens) if self.tied else super().embed(tokens)
        return embedded

    def forward(
        self, hidden: torch.Tensor, packed: PackedRow | None = None, cut: ContextCut | None = None
    ) -> torch.Tensor:
        """See PipelineStage; `hidden` may be token ids, which it embeds."""
        return super().forward(hidden, packed, cut) if hidden.is_floating_point() else super().embed(hidden)

    def let_go(self) -> None:
        """Free the gathered parameters of a forward without a backward, which a step would make stale."""
        cast(FSDPModule, self).reshard()

    def local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (parameter name, this rank's rows), writable, in the same order on every rank."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                yield name, cast(Any, parameter).to_local()

    def _take(self, name: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
        own: torch.Tensor = cast(Any, parameter).to_local()
        own.copy_(self.part.own(value))
        if self.keepers[name] == self.part.rank:
            self.whole_tensors[name] = value.to(own.device, torch.float32, copy=True)


def sharding(device: torch.device, compute: torch.dtype) -> Callable[[Any, range, int, Head], ModelStage]:
    """Return a function that creates a sharded stage without memory, over all ranks of the default process group."""
    ranks = dist.get_world_size()
    mesh = DeviceMesh.from_group(dist.group.WORLD, device.type, mesh=list(range(ranks)))  # type: ignore[arg-type]

    def make(skeleton: Any, layers: range, stages_after: int, head: Head) -> ModelStage:
        stage = ShardedStage(skeleton, layers, stages_after, head)
        stage.part, stage.whole_tensors = Part(dist.get_rank(), ranks), {}
        stage.keepers = near_equal_keepers({name: value.numel() for name, value in stage.named_parameters()}, ranks)
        policy = MixedPrecisionPolicy()
        if compute != torch.float32:
            policy = MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
        for layer in stage.model.layers.values():
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        if not stage.tied:
            fully_shard(stage.model.embed_tokens, mesh=mesh)
        fully_shard(stage, mesh=mesh)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # losses already have weights for the whole mini-batch
                module.set_force_sum_reduction_for_comms(True)
                module.set_custom_all_gather(cast(Any, _NamedAllGather()))
                module.set_custom_reduce_scatter(cast(Any, _NamedReduceScatter()))
        return stage

    return make


def begin(stage: ModelStage) -> None:
    """Make the stage the root of its modules before one of them is used separately."""
    cast(Any, fully_shard).state(stage)._lazy_init()


class _CallBuffers:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for one call."""
        return torch.empty(*size, dtype=dtype, device=device)


class _NamedAllGather(_CallBuffers):
    """Gathering of a group of parameters, which names the peers for which it waits."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> "dist.Work | None":
        with waiting_for(f"all {group.size()} ranks to gather parameters"):
            work: dist.Work | None = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _NamedReduceScatter(_CallBuffers):
    """Sum of a group of gradients, which names the peers for which it waits."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> "dist.Work | None":
        with waiting_for(f"all {group.size()} ranks to sum gradients"):
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op, group=group, async_op=async_op
            )
        return work
