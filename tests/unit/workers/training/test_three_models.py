"""Three trained models on the same ranks: a fused schedule has the same bits as the serial one."""

from pathlib import Path

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import gradients_of, make_batch, make_job

from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.candidate_tables import StageCost, coarse, exact_instance, table_of
from rlhf_planner.schedule.methods import FUSED, opposite
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import SearchOptions, solve

TRAINED = ("actor", "critic", "cost_critic")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("model"), "llama", seed=1)


def fused(serial: ScheduleTable) -> ScheduleTable:
    """Return the solver's table for stages with equal times.

    Its clock stands still, so its budget of tries ends the search.
    """
    costs = {(model, stage): StageCost(1.0, 2.0, 1.0, 1.0, 1.0) for model in TRAINED for stage in range(2)}
    instance = coarse(exact_instance(serial.pipelines, costs, {}, split=False))
    solved = solve(instance, SearchOptions(seconds=0.1, split=False), lambda: 0.0)
    return table_of(instance, serial.pipelines, solution_json(solved), FUSED)


def test_a_fused_schedule_of_three_models_gives_the_gradients_of_the_serial_one(folder: Path) -> None:
    job = make_job(folder, algorithm={"safeRlhf": {"miniBatchSize": 8}})
    batch, serial = make_batch("safeRlhf"), serial_table(opposite(TRAINED, 2, 4))
    table = fused(serial)
    assert table.rows != serial.rows
    ours, theirs = (gradients_of(job, each, 2, batch) for each in (table, serial))
    assert ours.keys() == theirs.keys()
    assert {name.partition(":")[0] for name in ours} == set(TRAINED)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
