"""Steps with a non-finite gradient or loss are skipped on all ranks and counted; too many in a row fail the job."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    make_batch,
    make_job,
    on_ranks,
    prepared,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.minibatches import epoch_order
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.trainer import Trainer


def poisoned(batch: TrainingBatch, *rows: int) -> TrainingBatch:
    """Set one log-probability of each of `rows` to NaN."""
    log_p = batch.fields["log_probabilities"].clone()
    log_p[list(rows), 0] = float("nan")
    return batch.with_fields(log_probabilities=log_p)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("pipeline", "data"), [(1, 1), (2, 1), (2, 2)])
def test_a_step_whose_gradient_is_not_finite_is_skipped_on_all_ranks(folder: Path, pipeline: int, data: int) -> None:
    """One sample of one micro-batch of one replica is NaN: its mini-batch changes nothing, the other is trained."""
    job = make_job(folder, algorithm={"grpo": {"miniBatchSize": 4, "groupSize": 4}}, seed=3)
    table, world = serial(job, pipeline, data, models=("actor",)), pipeline * data
    order = epoch_order(3, 0, 0, 8)

    def trained(*rows: int) -> tuple[list[Trainer], dict[str, float]]:
        def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, dict[str, float]]:
            trainer = trainer_of(job, table, rank, world, peers)
            metrics = exhaust(trainer.train(0, poisoned(make_batch(), *rows)))
            return trainer, {name: value for name, value in metrics.items() if not name.startswith("actor/kl")}

        results = on_ranks(world, work)
        assert all(metrics == results[0][1] for _, metrics in results), "ranks report different metrics"
        return [trainer for trainer, _ in results], results[0][1]

    trainers, metrics = trained(order[0])
    assert metrics["train/nonfinite_steps"] == metrics["train/nonfinite_steps_total"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert [trainer.progress.steps for trainer in trainers] == [1] * world
    assert metrics["gradient_norm/actor"] > 0
    unchanged, metrics = trained(order[0], order[4])
    assert metrics["train/nonfinite_steps"] == 2
    start = weights_of([trainer_of(job, serial(job, 1, 1, models=("actor",)), 0, 1, Alone())])
    assert all(torch.equal(start[name], value) for name, value in weights_of(unchanged).items())
    assert not all(torch.equal(start[name], value) for name, value in weights_of(trainers).items())


def test_a_skipped_step_leaves_what_a_batch_without_it_would(folder: Path) -> None:
    """Weights, moments and metrics equal those of a run in which that mini-batch abstained."""
    job = make_job(folder, algorithm={"grpo": {"miniBatchSize": 4, "groupSize": 4}}, seed=3)
    order = epoch_order(3, 0, 0, 8)
    table = serial(job, 1, 1, models=("actor",))
    skipped, without = (trainer_of(job, table, 0, 1, Alone()) for _ in range(2))
    metrics = exhaust(skipped.train(0, poisoned(make_batch(), order[0])))
    ready = prepared(job, make_batch())
    objectives = without.objectives()
    objectives["actor"].first_pass = True
    norms = without._step(0, ready, order[4:], objectives)
    assert_bitwise([skipped], [without])
    assert metrics["gradient_norm/actor"] == norms["actor"]
    assert metrics["actor/entropy"] == objectives["actor"].metrics()["actor/entropy"]
    assert metrics["actor/mismatch"] == objectives["actor"].metrics()["actor/mismatch"] > 0


def test_gradients_that_are_not_finite_several_times_in_a_row_fail_the_job(folder: Path) -> None:
    optimizer = {"learningRate": 1e-2, "maxNonFiniteSteps": 2}
    job = make_job(folder, folder, algorithm=TWO_EPOCHS, training={"optimizer": optimizer})
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    stages: dict[tuple[str, int], Any] = dict(trainer.stages)
    stages["actor", 0].model.norm.weight.data[0] = float("nan")
    critic = stages["critic", 0].model.norm.weight
    before = critic.detach().clone()
    said = (
        r"iteration 3: .*the gradient of the actor is nan \(pipeline stage 0\) at optimizer step 0, as it was 2 times"
    )
    with pytest.raises(WorkError, match=said) as caught:
        exhaust(trainer.train(3, make_batch()))
    assert "spec.training.optimizer.maxNonFiniteSteps is 2" in caught.value.failure.message
    assert not caught.value.failure.retryable
    assert torch.equal(before, critic)


def test_a_finite_gradient_in_between_begins_the_count_anew_and_checkpoints_keep_it(
    folder: Path, tmp_path: Path
) -> None:
    optimizer = {"learningRate": 1e-2, "maxNonFiniteSteps": 1}
    job = make_job(folder, folder, training={"optimizer": optimizer})
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    for iteration in range(4):
        rows = [0] * (iteration % 2)
        metrics = exhaust(trainer.train(iteration, poisoned(make_batch(), *rows)))
    assert metrics["train/nonfinite_steps_total"] == 2
    checkpoint.save(trainer, tmp_path, 4)
    finish_folder(tmp_path, folder)
    again = trainer_of(job, serial(job, 1, 1), 0, 1, Alone(), str(tmp_path), 4)
    assert again.progress == trainer.progress
    with pytest.raises(WorkError, match="as it was 1 times in a row before"):
        exhaust(again.train(4, poisoned(make_batch(), 0)))


def test_a_sample_whose_log_ratio_is_extreme_does_not_erase_the_others(folder: Path) -> None:
    """Its tokens have no effect beyond the limit; the gradient is that of the other samples, not of e^200."""
    job = make_job(folder, algorithm={"grpo": {"miniBatchSize": 8, "groupSize": 4}})
    batch = make_batch()
    log_p = batch.fields["log_probabilities"].clone()
    log_p[0] = -200.0
    trainer = trainer_of(job, serial(job, 1, 1, models=("actor",)), 0, 1, Alone())
    metrics = exhaust(trainer.train(0, batch.with_fields(log_probabilities=log_p)))
    assert metrics["train/nonfinite_steps"] == 0
    assert 0 < metrics["gradient_norm/actor"] < 100
