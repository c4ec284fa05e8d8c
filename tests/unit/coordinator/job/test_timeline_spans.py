"""A rank's timeline shows its own row of the predicted schedule."""

import pytest

from rlhf_api.job.groups import TrainingParallelism
from rlhf_coordinator.job.timeline_spans import row_of
from rlhf_planner.schedule.methods import placed
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.parallel.rank_layout import RankLayout


@pytest.mark.parametrize(("pipeline", "tensor", "critic"), [(4, 1, 1), (2, 4, 4), (2, 4, 1), (4, 1, 2), (4, 2, 8)])
@pytest.mark.parametrize("data", [1, 2])
def test_a_rank_is_drawn_beside_the_row_that_it_runs(pipeline: int, tensor: int, critic: int, data: int) -> None:
    parallelism = TrainingParallelism(pipeline=pipeline, data=data, tensor=tensor, critic_tensor=critic)
    table = serial_table(placed({"actor": tensor, "critic": critic}, pipeline * tensor, 2))
    for rank in range(parallelism.ranks):
        layout = RankLayout.for_rank(table, rank, parallelism.ranks, parallelism)
        assert row_of(rank, len(table.rows), parallelism) == layout.local
