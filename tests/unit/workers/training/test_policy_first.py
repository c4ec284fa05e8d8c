"""An iteration that trains the policy's mini-batches before the critics' has the same bits and metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.fused_ranks import Trained, assert_bitwise, fused_job, fused_table
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    exhaust,
    make_batch,
    make_job,
    on_ranks,
    serial,
    trainer_of,
    weights_of,
)
from tests.support.training.training_roles import finish, role_of, train
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_workers.failures import WorkError
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.training_role import TrainingRole


def trained(job: RLHFJob, table: ScheduleTable, *, policy_first: bool, iterations: int = 2) -> list[Trained]:
    world = len(table.rows)

    def work(rank: int, peers: ThreadCommunicator) -> Trained:
        trainer = trainer_of(job, table, rank, world, peers)
        batches = (make_batch(seed=number, abstained=(0, 1)) for number in range(iterations))
        return trainer, [exhaust(trainer.train(i, batch, policy_first=policy_first)) for i, batch in enumerate(batches)]

    return on_ranks(world, work)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_weights_moments_and_metrics_are_those_of_both_at_once(folder: Path, pipeline: int) -> None:
    optimizer = {"learningRate": 1e-2, "schedule": "Cosine", "warmupSteps": 3, "weightDecay": 0.1}
    job = make_job(folder, folder, algorithm=TWO_EPOCHS, training={"optimizer": optimizer})
    table = serial(job, pipeline, 1)
    assert_bitwise(trained(job, table, policy_first=True), trained(job, table, policy_first=False))


@pytest.mark.full
def test_they_are_those_of_a_fused_table(tmp_path: Path) -> None:
    job = fused_job(tmp_path)
    fused = trained(job, fused_table(job, 2, 1, FUSED_SPLIT), policy_first=False)
    assert_bitwise(trained(job, serial(job, 2, 1), policy_first=True), fused)


def test_the_policy_does_not_change_any_more_once_critics_are_behind(folder: Path) -> None:
    job = make_job(folder, folder, algorithm=TWO_EPOCHS)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    spans: Any = trainer.spans  # type: ignore[attr-defined]
    steps = trainer.train(0, make_batch(), policy_first=True)
    while not trainer.critics_behind:
        next(steps)
    assert "train/actor/F" in spans
    assert not [name for name in spans if name.startswith("train/critic")]
    policy = copied_weights(trainer, "actor")
    exhaust(steps)
    assert "train/critic/F" in spans
    assert not trainer.critics_behind
    assert all(torch.equal(value, policy[name]) for name, value in copied_weights(trainer, "actor").items())


def test_a_step_that_the_policy_leaves_out_no_critic_takes(folder: Path) -> None:
    """A NaN log-probability in one of two mini-batches, which only the policy reads."""
    job = make_job(folder, folder, algorithm={"ppo": {"miniBatchSize": 4, "klIn": "Loss", "whitenAdvantages": False}})

    def run(policy_first: bool) -> tuple[Trainer, dict[str, float]]:
        trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
        batch = make_batch()
        log_p = batch.fields["log_probabilities"].clone()
        log_p[0, 0] = torch.nan
        batch = batch.with_fields(log_probabilities=log_p)
        return trainer, exhaust(trainer.train(0, batch, policy_first=policy_first))

    (first, metrics), (both, expected) = run(True), run(False)
    assert metrics["train/nonfinite_steps"] == expected["train/nonfinite_steps"] == 1.0
    assert first.progress == both.progress
    left, right = weights_of([first]), weights_of([both])
    assert all(torch.equal(value, right[name]) for name, value in left.items())


def copied_weights(trainer: Trainer, model: str) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in weights_of([trainer]).items() if name.startswith(model)}


def step(role: TrainingRole, command: pb.Command) -> pb.TrainResult:
    outbox = RecordedOutbox()
    role.handle(command, outbox)
    finish(role, outbox)
    (answer,) = outbox.answers
    return answer.train


def part(number: int, iteration: int, which: pb.TrainPart.ValueType) -> pb.Command:
    return pb.Command(id=number, train=pb.Train(iteration=iteration, part=which))


def test_a_rank_serves_the_policy_while_its_critics_are_behind(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> pb.TrainResult:
        role = role_of(folder, peers, rank)
        result = step(role, part(1, 0, pb.TRAIN_PART_POLICY))
        assert (result.version, result.critics_behind, dict(result.metrics)) == (1, True, {})
        assert dict(role.tensors("actor", 1))
        with pytest.raises(WorkError, match="critic version 1 was asked for; it is yet to be trained"):
            dict(role.tensors("critic", 1))
        for refused in (
            pb.Command(id=2, save_checkpoint=pb.SaveCheckpoint(folder="x")),
            pb.Command(id=3, measure=pb.Measure()),
            train(1, 4),
        ):
            with pytest.raises(WorkError, match="came to a rank that is training"):
                role.handle(refused, RecordedOutbox())
        assert step(role, part(5, 0, pb.TRAIN_PART_POLICY)) == result, "asked again, it answers again"
        whole = step(role, part(6, 0, pb.TRAIN_PART_CRITICS))
        assert not whole.critics_behind
        assert whole.metrics["critic_overlap_seconds"] > 0
        assert dict(role.tensors("critic", 1))
        assert step(role, part(7, 0, pb.TRAIN_PART_CRITICS)) == whole
        return whole

    apart = on_ranks(2, work)
    both = on_ranks(2, lambda rank, peers: step(role_of(folder, peers, rank), train(0)))
    times = {"train/seconds", "bubble_seconds", "bubble_share", "step_seconds", "critic_overlap_seconds"}
    for ours, theirs in zip(apart, both, strict=True):
        left, right = (
            {name: value for name, value in result.metrics.items() if name not in times} for result in (ours, theirs)
        )
        assert left == right
