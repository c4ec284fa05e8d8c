"""Who holds what: a schedule table and a rank number as stages, replicas and groups of ranks that sum gradients.

Owns the arithmetic of ranks. A table describes one data-parallel block; block d holds global ranks d*R .. d*R+R-1 for a
table of R rows. Several pipelines of one model in a block are further replicas of that model. Pure; no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_api.schedule import Action, ScheduleTable


@dataclass(frozen=True)
class RankLayout:
    """The place of one rank in a training group."""

    table: ScheduleTable
    rank: int
    world: int

    def __post_init__(self) -> None:
        rows = len(self.table.rows)
        if self.world % rows or not 0 <= self.rank < self.world:
            raise ValueError(
                f"rank {self.rank} of {self.world}: a table of {rows} rows needs a multiple of {rows} ranks"
            )
        for model in self.models:
            shapes = {(len(p.stage_ranks), p.microbatches) for p in self.table.pipelines if p.model == model}
            if len(shapes) != 1:
                raise ValueError(f"pipelines of model {model} differ in (stages, micro-batches): {sorted(shapes)}")

    @property
    def block_size(self) -> int:
        """Ranks of one data-parallel block."""
        return len(self.table.rows)

    @property
    def local(self) -> int:
        """Number of this rank in its block."""
        return self.rank % self.block_size

    def with_table(self, table: ScheduleTable) -> "RankLayout":
        """Return the same place under another order of the same work; ValueError when stages are on other ranks."""
        if table.pipelines != self.table.pipelines:
            raise ValueError(f"table {table.method} places its stages otherwise than {self.table.method}")
        return replace(self, table=table)

    @property
    def block(self) -> int:
        """Data-parallel block of this rank."""
        return self.rank // self.block_size

    @property
    def blocks(self) -> int:
        """Data-parallel blocks of the group."""
        return self.world // self.block_size

    @property
    def row(self) -> Sequence[Action]:
        """What this rank does for one mini-batch."""
        return self.table.rows[self.local]

    @property
    def models(self) -> tuple[str, ...]:
        """Model roles, in table order."""
        return tuple(dict.fromkeys(pipeline.model for pipeline in self.table.pipelines))

    @cached_property
    def held(self) -> tuple[tuple[str, int], ...]:
        """(model, stage) of every stage on this rank, sorted."""
        return tuple(
            sorted(
                {
                    (p.model, s)
                    for p in self.table.pipelines
                    for s, rank in enumerate(p.stage_ranks)
                    if rank == self.local
                }
            )
        )

    def stages(self, model: str) -> int:
        """Return how many stages a model has."""
        return len(next(p for p in self.table.pipelines if p.model == model).stage_ranks)

    def microbatches(self, model: str) -> int:
        """Return how many micro-batches a replica of a model runs in one mini-batch."""
        return next(p for p in self.table.pipelines if p.model == model).microbatches

    def pipelines(self, model: str) -> tuple[int, ...]:
        """Return the indexes of a model's pipelines in the table."""
        return tuple(index for index, p in enumerate(self.table.pipelines) if p.model == model)

    def replicas(self, model: str) -> int:
        """Return how many copies of a model are in the whole group."""
        return self.blocks * len(self.pipelines(model))

    def replica(self, pipeline: int) -> int:
        """Return which copy of its model a pipeline of this rank's block is."""
        same = self.pipelines(self.table.pipelines[pipeline].model)
        return self.block * len(same) + same.index(pipeline)

    def holders(self, model: str, stage: int) -> tuple[int, ...]:
        """Return the global ranks that hold a stage, replica by replica; they add up its gradients."""
        local = [self.table.pipelines[index].stage_ranks[stage] for index in self.pipelines(model)]
        return tuple(dict.fromkeys(block * self.block_size + rank for block in range(self.blocks) for rank in local))

    def ends(self, model: str) -> tuple[tuple[int, int], ...]:
        """Return (rank of the first stage, rank of the last) of every replica of a model."""
        return tuple(
            (block * self.block_size + p.stage_ranks[0], block * self.block_size + p.stage_ranks[-1])
            for block in range(self.blocks)
            for p in (self.table.pipelines[index] for index in self.pipelines(model))
        )

    def writes(self, model: str, stage: int) -> bool:
        """Return whether this rank saves a stage: it is the first holder of all."""
        return self.holders(model, stage)[0] == self.rank

    def publishes(self, model: str, stage: int) -> bool:
        """Return whether this rank serves a stage: it is the first holder of its block."""
        return next(rank for rank in self.holders(model, stage) if rank // self.block_size == self.block) == self.rank
