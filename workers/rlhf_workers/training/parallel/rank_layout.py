"""The place of a rank: from a schedule table and a rank number to stages, replicas and groups of ranks that sum
gradients.

Owns the arithmetic of global ranks. A table of R rows describes one data parallel block. T ranks run each row, so rank
(d*R + r)*T + t is number t of row r in block d. C consecutive blocks are one replica, and E consecutive blocks share
the experts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from rlhf_api.algorithms import ModelRole
from rlhf_api.job.groups import TrainingParallelism
from rlhf_common.schedule import Action, Pipeline, ScheduleTable
from rlhf_planner.schedule.frozen_model import without_model
from rlhf_planner.schedule.serial import METHOD as SERIAL
from rlhf_planner.schedule.serial import serial_table


@dataclass(frozen=True)
class RankLayout:
    """The place of one rank in a training group."""

    table: ScheduleTable
    rank: int
    world: int
    tensor: int = 1
    """Ranks per row."""
    expert: int = 1
    """Blocks that divide the experts of a layer."""
    context: int = 1
    """Blocks that divide the samples of a replica by position."""

    def __post_init__(self) -> None:
        if self.world % self.block_size or not 0 <= self.rank < self.world:
            by = f" by {self.tensor} tensor parallel ranks each" if self.tensor > 1 else ""
            raise ValueError(
                f"rank {self.rank} of {self.world}: a table of {self.rows} rows{by} needs a multiple of "
                f"{self.block_size} ranks"
            )
        for name, size in {"expert": self.expert, "context": self.context}.items():
            if self.blocks % size:
                raise ValueError(f"{self.blocks} blocks of ranks are no multiple of {size} {name} parallel ones")
        for model in self.models:
            shapes = {(len(p.stage_ranks), p.microbatches, p.width) for p in self.table.pipelines if p.model == model}
            if len(shapes) != 1:
                raise ValueError(
                    f"pipelines of model {model} differ in (stages, micro-batches, width): {sorted(shapes)}"
                )

    @classmethod
    def for_rank(cls, table: ScheduleTable, rank: int, world: int, parallelism: TrainingParallelism) -> "RankLayout":
        """Return the place of a rank in a group with a job's sizes. Raises ValueError like the class."""
        any_of = table.pipelines[0]
        tensor = parallelism.tensor_of(ModelRole(any_of.model)) // any_of.width
        return cls(table, rank, world, tensor, parallelism.expert, parallelism.context)

    @property
    def rows(self) -> int:
        """Rows of the table of one data-parallel block."""
        return len(self.table.rows)

    @property
    def block_size(self) -> int:
        """Ranks of one data-parallel block."""
        return self.rows * self.tensor

    @property
    def local(self) -> int:
        """Number of the row that this rank runs."""
        return self.rank % self.block_size // self.tensor

    @property
    def number(self) -> int:
        """Number of this rank in its row."""
        return self.rank % self.tensor

    def tensor_rank(self, model: str) -> int:
        """Return the number of this rank in the tensor group of a model's stage."""
        return self.rank % (self._width(model) * self.tensor)

    def tensor_group(self, model: str) -> tuple[int, ...]:
        """Return the global ranks that together hold this rank's stage of a model."""
        first = self.rank - self.tensor_rank(model)
        return tuple(range(first, first + self._width(model) * self.tensor))

    @property
    def in_tensor_groups(self) -> bool:
        """Whether several ranks hold a stage of any model together."""
        return any(len(self.tensor_group(model)) > 1 for model in self.models)

    @property
    def expert_rank(self) -> int:
        """Number of this rank in its expert group, and of its part of the experts."""
        return self.block % self.expert

    @property
    def expert_group(self) -> tuple[int, ...]:
        """Global ranks that together hold all experts of this rank's layers."""
        return self._same_place(self.block - self.expert_rank, self.expert)

    @property
    def context_rank(self) -> int:
        """Number of this rank in its context group, and of its part of the positions of each sample."""
        return self.block % self.context

    @property
    def context_group(self) -> tuple[int, ...]:
        """Global ranks that together compute all positions of this rank's samples."""
        return self._same_place(self.block - self.context_rank, self.context)

    def _same_place(self, first: int, blocks: int) -> tuple[int, ...]:
        return tuple(self.global_rank(block, self.local, self.number) for block in range(first, first + blocks))

    def speaks(self, model: str) -> bool:
        """Return whether this rank reports results that several ranks compute alike: the first of its tensor group and
        context group does."""
        return not self.tensor_rank(model) and not self.context_rank

    def _width(self, model: str) -> int:
        return next(p for p in self.table.pipelines if p.model == model).width

    @property
    def first_rank(self) -> int:
        """Global rank of row 0 of this rank's block, with this rank's number in its row."""
        return self.global_rank(self.block, 0, self.number)

    def global_rank(self, block: int, row: int, number: int) -> int:
        """Return the rank of a place."""
        return (block * self.rows + row) * self.tensor + number

    def with_table(self, table: ScheduleTable) -> "RankLayout":
        """Return the same place with another order of the same work. Raises ValueError if the pipelines differ."""
        if table.pipelines != self.table.pipelines:
            raise ValueError(f"table {table.method} places its stages otherwise than {self.table.method}")
        return replace(self, table=table)

    def with_microbatches(self, counts: Mapping[str, int]) -> "RankLayout":
        """Return the same place with these numbers of micro-batches per replica for each named model. Raises ValueError
        if they differ and the table is not serial.
        """
        if all(self.microbatches(model) == count for model, count in counts.items()):
            return self
        if self.table.method != SERIAL:
            raise ValueError(f"a table {self.table.method} is for the micro-batches that it has")
        return replace(self, table=_serial(self.table.pipelines, tuple(sorted(counts.items()))))

    def of_models(self, models: Collection[str]) -> "RankLayout":
        """Return the same place with the parts of its table that train these models."""
        layout = self
        for model in self.models:
            if model not in models:
                layout = layout.with_table(without_model(layout.table, model))
        return layout

    @property
    def block(self) -> int:
        """Index of this rank's block in the group."""
        return self.rank // self.block_size

    @property
    def blocks(self) -> int:
        """Number of blocks in the group."""
        return self.world // self.block_size

    @property
    def row(self) -> Sequence[Action]:
        """Actions of this rank for one mini-batch."""
        return self.table.rows[self.local]

    @property
    def models(self) -> tuple[str, ...]:
        """Model roles, in table order."""
        return tuple(dict.fromkeys(pipeline.model for pipeline in self.table.pipelines))

    @cached_property
    def local_stages(self) -> tuple[tuple[str, int], ...]:
        """(model, stage) of every stage on this rank, sorted."""
        return tuple(
            sorted(
                {
                    (p.model, stage)
                    for index, p in enumerate(self.table.pipelines)
                    for stage in range(len(p.stage_ranks))
                    if self.runs(index, stage)
                }
            )
        )

    @property
    def every_rank_has_all(self) -> bool:
        """Whether every rank of the group has a stage of every model."""
        places = [
            (p.model, first + place)
            for p in self.table.pipelines
            for first in p.stage_ranks
            for place in range(p.width)
        ]
        return len(set(places)) == len(self.models) * self.rows

    def runs(self, pipeline: int, stage: int) -> bool:
        """Return whether this rank's row has a stage of a pipeline."""
        of = self.table.pipelines[pipeline]
        return 0 <= self.local - of.stage_ranks[stage] < of.width

    def stages(self, model: str) -> int:
        """Return the number of stages of a model."""
        return len(next(p for p in self.table.pipelines if p.model == model).stage_ranks)

    def microbatches(self, model: str) -> int:
        """Return the number of micro-batches per replica of a model in one mini-batch."""
        return next(p for p in self.table.pipelines if p.model == model).microbatches

    def pipelines(self, model: str) -> tuple[int, ...]:
        """Return the indexes of a model's pipelines in the table."""
        return tuple(index for index, p in enumerate(self.table.pipelines) if p.model == model)

    def replicas(self, model: str) -> int:
        """Return the number of copies of a model with their own samples in the whole group."""
        return self.blocks // self.context * len(self.pipelines(model))

    def replica(self, pipeline: int) -> int:
        """Return the number of the model's copy to which a pipeline of this rank's block belongs."""
        same = self.pipelines(self.table.pipelines[pipeline].model)
        return self.block // self.context * len(same) + same.index(pipeline)

    def holders(self, model: str, stage: int) -> tuple[int, ...]:
        """Return the global ranks that hold the same part of a stage, block by block; they sum its gradients. The part
        is that of this rank in its tensor group.
        """
        place = self.local % self._width(model)
        rows = [self.table.pipelines[index].stage_ranks[stage] + place for index in self.pipelines(model)]
        return tuple(
            dict.fromkeys(self.global_rank(block, row, self.number) for block in range(self.blocks) for row in rows)
        )

    def by_experts(self, model: str, stage: int) -> tuple[int, ...]:
        """Return the `holders` with the same part of the stage's experts as this rank."""
        holders = self.holders(model, stage)
        return tuple(rank for rank in holders if rank // self.block_size % self.expert == self.expert_rank)

    def ends(self, model: str) -> tuple[tuple[int, int], ...]:
        """Return (rank of the first stage, rank of the last) of every pipeline of a model in every block, with this
        rank's number in a tensor group."""
        place = self.local % self._width(model)
        return tuple(
            (
                self.global_rank(block, p.stage_ranks[0] + place, self.number),
                self.global_rank(block, p.stage_ranks[-1] + place, self.number),
            )
            for block in range(self.blocks)
            for p in (self.table.pipelines[index] for index in self.pipelines(model))
        )

    def groups(self) -> list[tuple[int, ...]]:
        """Return the sets of ranks that communicate together, the same list on every rank."""
        found: list[tuple[int, ...]] = []
        sizes = {model: self._width(model) * self.tensor for model in self.models}
        for number in range(max(sizes.values())):
            of = replace(self, rank=number)
            found += [of.holders(model, stage) for model in of.models for stage in range(of.stages(model))]
            found += [ends for model in of.models for ends in of.ends(model) if ends[0] != ends[1]]
        for size in sorted({size for size in sizes.values() if size > 1}):
            found += [tuple(range(first, first + size)) for first in range(0, self.world, size)]
        if self.expert > 1:
            ranks = [replace(self, rank=rank) for rank in range(self.world)]
            found += [of.by_experts(*key) for of in ranks for key in of.local_stages]
            found += [of.expert_group for of in ranks]
        if self.context > 1:
            found += [replace(self, rank=rank).context_group for rank in range(self.world)]
        return list(dict.fromkeys(found))

    def writes(self, model: str, stage: int) -> bool:
        """Return whether this rank saves a stage, or its part of it: it is the first of `by_experts`."""
        return self.by_experts(model, stage)[0] == self.rank

    def publishes(self, model: str, stage: int) -> bool:
        """Return whether this rank serves a stage, or its part of it: it is the first holder of its block."""
        return next(rank for rank in self.holders(model, stage) if rank // self.block_size == self.block) == self.rank


@lru_cache(maxsize=64)
def _serial(pipelines: tuple[Pipeline, ...], counts: tuple[tuple[str, int], ...]) -> ScheduleTable:
    """Return the serial table of pipelines with other numbers of micro-batches; cached, since many mini-batches need
    the same."""
    wanted = dict(counts)
    return serial_table(
        [
            pipeline.model_copy(update={"microbatches": wanted.get(pipeline.model, pipeline.microbatches)})
            for pipeline in pipelines
        ]
    )
