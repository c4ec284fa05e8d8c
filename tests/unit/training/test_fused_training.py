"""Actor and critic trained at the same time in opposite pipelines: the same bits as one after the other.

Gradients of every stage add up micro-batch by micro-batch in one order under every table, split backward included, so
weights, moments and metrics are equal bit by bit; no tolerance anywhere in this file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import models
from tests.unit.training.test_training_iterations import finish_folder
from tests.unit.training.test_training_role import Outbox, finish, role_of
from tests.unit.training.training_ranks import (
    ThreadPeers,
    exhaust,
    make_batch,
    make_job,
    on_ranks,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_api import control_pb2 as pb
from rlhf_api.job import RLHFJob
from rlhf_api.schedule import ScheduleTable
from rlhf_planner.schedule.choice import FUSED, FUSED_SPLIT, opposite
from rlhf_planner.schedule.measured import StageCost, coarse, exact_instance, forecast, options, table_of
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
from rlhf_workers.role import WorkError
from rlhf_workers.training import checkpoint
from rlhf_workers.training.measuring import measure
from rlhf_workers.training.trainer import Trainer

LAYOUTS = [(2, 1), (4, 1), (2, 2), (4, 2)]
"""(pipeline, data)."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> RLHFJob:
    """Actor and critic of different family, depth and width; 4 optimizer steps an iteration."""
    root = tmp_path_factory.mktemp("models")
    actor = models.write_policy(root / "actor", "qwen2", seed=1, num_hidden_layers=4)
    critic = models.write_policy(root / "critic", "llama", seed=2, num_hidden_layers=5, hidden_size=48)
    return make_job(
        actor,
        critic,
        algorithm={"ppo": {"miniBatchSize": 8, "epochs": 2, "klTarget": 2.0}},
        training={"microBatchSize": 1},
        rollout={"batchSize": 8, "temperature": 0.8, "maxPromptTokens": 12, "maxResponseTokens": 24},
    )


def fused_table(job: RLHFJob, pipeline: int, data: int, method: str) -> ScheduleTable:
    """What the search finds for made-up times: a critic that is slower than the actor, and unequal stages."""
    pipes = opposite(("actor", "critic"), pipeline, 8 // data)
    costs = {
        (model, stage): StageCost(0.02 * scale, 0.045 * scale, 0.02 * scale, 0.03 * scale, 1000.0)
        for model, factor in (("actor", 1.0), ("critic", 1.4))
        for stage in range(pipeline)
        for scale in (factor * (1 + 0.1 * stage),)
    }
    transfers = {(rank, rank + 1): 0.002 for rank in range(pipeline - 1)}
    asked = coarse(exact_instance(pipes, costs, transfers, method == FUSED_SPLIT))
    solution = solve(asked, options(method, 0.2), iter(range(1000)).__next__)
    table = table_of(asked, pipes, solution_json(solution), method)
    serial_seconds, fused_seconds = (forecast(each, costs, transfers)[0] for each in (serial_table(pipes), table))
    assert fused_seconds < serial_seconds
    return table


Trained = tuple[Trainer, list[dict[str, float]]]


def train(
    job: RLHFJob, table: ScheduleTable, data: int, iterations: range, restore: str = "", save: Path | None = None
) -> list[Trained]:
    world = data * len(table.rows)

    def work(rank: int, peers: ThreadPeers) -> Trained:
        trainer = trainer_of(job, table, rank, world, peers, restore, iterations.start)
        metrics = [exhaust(trainer.train(i, make_batch(seed=i))) for i in iterations]
        if save is not None:
            checkpoint.save(trainer, save, iterations.stop)
        return trainer, metrics

    return on_ranks(world, work)


def moments_of(trainers: Sequence[Trainer]) -> dict[str, torch.Tensor]:
    return {
        f"{model}:{name}": value
        for trainer in trainers
        for (model, _), optimizer in trainer.optimizers.items()
        for name, value in optimizer.state().items()
    }


def assert_bitwise(ours: list[Trained], theirs: list[Trained]) -> None:
    for state in (weights_of, moments_of):
        left, right = (state([trainer for trainer, _ in side]) for side in (ours, theirs))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    assert ours[0][1] == theirs[0][1]


@pytest.mark.parametrize(("pipeline", "data"), LAYOUTS)
def test_fused_and_split_train_the_same_bits_as_serial(pipeline: int, data: int, job: RLHFJob) -> None:
    off = train(job, serial(job, pipeline, data), data, range(1))
    for method in (FUSED, FUSED_SPLIT):
        table = fused_table(job, pipeline, data, method)
        kinds = {action.kind for row in table.rows for action in row}
        assert ("W" in kinds) == (method == FUSED_SPLIT)
        assert_bitwise(train(job, table, data, range(1)), off)


def test_a_fused_group_that_starts_again_from_its_checkpoint_ends_with_the_bits_of_serial(
    job: RLHFJob, tmp_path: Path
) -> None:
    """A lost rank takes its group with it: the group comes back with the same table, from critic stages that were
    written by the opposite ranks."""
    table = fused_table(job, 2, 1, FUSED_SPLIT)
    train(job, table, 1, range(1), save=tmp_path)
    assert job.spec.models.critic is not None
    finish_folder(tmp_path, Path(job.spec.models.actor.path), Path(job.spec.models.critic.path))
    resumed = train(job, table, 1, range(1, 2), restore=str(tmp_path))
    straight = train(job, serial(job, 2, 1), 1, range(2))
    assert_bitwise(resumed, [(trainer, metrics[1:]) for trainer, metrics in straight])


def test_measuring_changes_nothing_that_training_reads(job: RLHFJob) -> None:
    tables = [fused_table(job, 2, 1, method) for method in (FUSED, FUSED_SPLIT)]
    base = serial_table(tables[0].pipelines)

    def work(rank: int, peers: ThreadPeers) -> tuple[Trained, list[pb.MeasureResult]]:
        trainer = trainer_of(job, base, rank, 2, peers)
        random = torch.random.get_rng_state()
        metrics, results = [], []
        for iteration in range(2):
            schedules = [table.model_dump_json() for table in (base, *tables)]
            results += [
                exhaust(measure(trainer, pb.Measure(attempt=7))),
                exhaust(measure(trainer, pb.Measure(attempt=8, schedules=schedules, rounds=2))),
            ]
            assert torch.equal(torch.random.get_rng_state(), random)
            trainer.use_table(tables[iteration])  # between two iterations the order may change, too
            metrics.append(exhaust(trainer.train(iteration, make_batch(seed=iteration))))
        return (trainer, metrics), results

    ranks = on_ranks(2, work)
    assert_bitwise([trained for trained, _ in ranks], train(job, serial(job, 2, 1), 1, range(2)))
    for rank, (_, (stages, timed, *_)) in enumerate(ranks):
        assert (stages.attempt, timed.attempt) == (7, 8)
        assert {(one.model, one.stage) for one in stages.stages} == {("actor", rank), ("critic", 1 - rank)}
        for one in stages.stages:
            assert min(one.forward, one.backward, one.input_gradient, one.weight_gradient) > 0
            assert one.activation_bytes > 0
        assert [(edge.rank, edge.peer) for edge in stages.transfers] == [(0, 1)]
        assert [len(table.seconds) for table in timed.tables] == [2, 2, 2]


def test_a_train_may_bring_another_table_of_the_same_placement_only(job: RLHFJob) -> None:
    fused, other = fused_table(job, 2, 1, FUSED), serial(job, 2, 1)
    folder = Path(job.spec.models.actor.path)
    changes: dict[str, Any] = {
        name: getattr(job.spec, name).model_dump(by_alias=True, exclude_none=True)
        for name in ("algorithm", "training", "rollout")
    }

    def work(rank: int, peers: ThreadPeers) -> str:
        outbox = Outbox()
        role = role_of(folder, peers, rank, table=serial_table(fused.pipelines), **changes)
        role.handle(pb.Command(id=1, measure=pb.Measure(attempt=3)), outbox)
        finish(role, outbox)
        assert outbox.answers.pop().measure.attempt == 3
        order = pb.Train(iteration=0, schedule=fused.model_dump_json())
        role.handle(pb.Command(id=2, train=order), outbox)
        finish(role, outbox)
        assert outbox.answers[0].train.metrics["bubble_seconds"] > 0
        assert "train/step" in outbox.spans
        with pytest.raises(WorkError, match="places its stages otherwise"):
            role.handle(pb.Command(id=3, train=pb.Train(iteration=1, schedule=other.model_dump_json())), outbox)
        return role._trainer.layout.table.method

    assert on_ranks(2, work) == [FUSED, FUSED]
