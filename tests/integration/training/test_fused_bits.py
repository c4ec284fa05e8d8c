"""The larger half of the fused training tests, bitwise: pipelines of 4, and measuring between iterations."""

import pytest
import torch
from tests.support.training.fused_ranks import (
    Trained,
    assert_bitwise,
    assert_fused_and_split_train_the_bits_of_serial,
    fused_job,
    fused_table,
    train,
)
from tests.support.training.training_ranks import ThreadCommunicator, exhaust, make_batch, on_ranks, serial, trainer_of

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.schedule.step_timing import measure

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RLHFJob:
    return fused_job(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("pipeline", "data"), [(4, 1), (4, 2)])
def test_fused_and_split_train_the_same_bits_as_serial(pipeline: int, data: int, job: RLHFJob) -> None:
    assert_fused_and_split_train_the_bits_of_serial(job, pipeline, data)


def test_measuring_changes_nothing_that_training_reads(job: RLHFJob) -> None:
    tables = [fused_table(job, 2, 1, method) for method in (FUSED, FUSED_SPLIT)]
    base = serial_table(tables[0].pipelines)

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trained, list[pb.MeasureResult]]:
        trainer = trainer_of(job, base, rank, 2, peers)
        random = torch.random.get_rng_state()
        metrics, results = [], []
        for iteration in range(2):
            schedules = [table.model_dump_json() for table in (base, *tables)]
            results += [
                exhaust(measure(trainer, pb.Measure(measurement_id=7))),
                exhaust(measure(trainer, pb.Measure(measurement_id=8, schedules=schedules, rounds=2))),
            ]
            assert torch.equal(torch.random.get_rng_state(), random)
            trainer.use_table(tables[iteration])  # between two iterations the order may change, too
            metrics.append(exhaust(trainer.train(iteration, make_batch(seed=iteration))))
        return (trainer, metrics), results

    ranks = on_ranks(2, work)
    assert_bitwise([trained for trained, _ in ranks], train(job, serial(job, 2, 1), 1, range(2)))
    for rank, (_, (stages, timed, *_)) in enumerate(ranks):
        assert (stages.measurement_id, timed.measurement_id) == (7, 8)
        assert {(stage.model, stage.stage) for stage in stages.stages} == {("actor", rank), ("critic", 1 - rank)}
        for stage in stages.stages:
            assert min(stage.forward, stage.backward, stage.input_gradient, stage.weight_gradient) > 0
            assert stage.activation_bytes > 0
        assert [(edge.rank, edge.peer) for edge in stages.transfers] == [(0, 1)]
        assert [len(table.seconds) for table in timed.tables] == [2, 2, 2]
