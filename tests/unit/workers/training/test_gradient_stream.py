"""Gradients of chunks are those of the whole batch, whenever the chunks come, and a replay has the same bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.gradient_comparison import relative_error
from tests.support.training.training_ranks import (
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    gradients_of,
    make_job,
    make_samples,
    on_ranks,
    parts_of,
    serial,
    trainer_of,
    united,
    weights_of,
)

from rlhf_api.algorithms import full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.streamed_chunks import numbers_of, renumbered
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from
from rlhf_workers.training.trainer import Trainer

GROUPS = 4
"""Prompts of a batch, with four responses each."""
TOLERANCE = 1e-6
"""Largest distance of all gradients together, relative to their length, and of one number."""
AGGREGATIONS = ("SequenceMean", "TokenMean", "ConstantLength")
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{f"grpo, {name}": {"grpo": {"lossAggregation": name}} for name in AGGREGATIONS},
    "dr. grpo": {"grpo": {"lossAggregation": "ConstantLength", "advantageScale": "None", "klCoefficient": 0}},
    "rloo": {"rloo": {"klIn": "Loss", "lossAggregation": "SequenceMean"}},
    "rloo, divergence in the reward": {"rloo": {"ratioLevel": "Sequence"}},
    "dapo": {"dapo": {"refillRounds": 0, "overlongPenalty": 0.5, "entropyCoefficient": 0.01}},
    "gspo": {"gspo": {"klCoefficient": 0.1}},
    "cispo": {"cispo": {"lossAggregation": "TokenMean"}},
}


def job_of(folder: Path, algorithm: dict[str, Any], **training: Any) -> RLHFJob:
    ((name, fields),) = algorithm.items()
    chosen = {name: {"miniBatchSize": 16, "groupSize": 4, **fields}}
    rollout = {"batchSize": 16, "temperature": 0.8, "maxResponseTokens": 16}
    stream = {"stream": "Enabled", "packing": True, **training}
    return make_job(folder, algorithm=chosen, rollout=rollout, training=stream)


def samples_of(abstained: Sequence[int] = (), seed: int = 0) -> list[pb.TrainSample]:
    return make_samples(4 * GROUPS, seed, abstained=abstained)


def batch_of(job: RLHFJob, samples: Sequence[pb.TrainSample]) -> TrainingBatch:
    needed = (SAMPLED_FIELD, *full_graph(job.spec.algorithm.name).scored_fields)
    return batch_from(renumbered(samples), len(samples), needed)


def add(trainer: Trainer, samples: list[pb.TrainSample], groups: Sequence[int], iteration: int = 0) -> int:
    """Add the gradients of one chunk of these prompts."""
    chunk = [sample for group in groups for sample in samples[4 * group : 4 * group + 4]]
    return trainer.accumulate(iteration, numbers_of(chunk), batch_of(trainer.spec_job, chunk))  # type: ignore[attr-defined]


def rank_of(job: RLHFJob, rank: int, data: int, peers: ThreadCommunicator) -> Trainer:
    trainer = trainer_of(job, serial(job, 1, data, models=("actor",)), rank, data, peers)
    trainer.spec_job = job  # type: ignore[attr-defined]
    return trainer


def streamed(
    job: RLHFJob, samples: list[pb.TrainSample], chunks: Sequence[Sequence[int]], data: int = 1
) -> tuple[list[Trainer], dict[str, float]]:
    """Train an iteration in chunks; return the ranks and the metrics."""

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, dict[str, float]]:
        trainer = rank_of(job, rank, data, peers)
        for chunk in chunks:
            add(trainer, samples, chunk)
        return trainer, exhaust(trainer.train(0, batch_of(job, samples)))

    results = on_ranks(data, work)
    assert all(metrics == results[0][1] for _, metrics in results)
    return [trainer for trainer, _ in results], results[0][1]


def streamed_gradients(
    job: RLHFJob, samples: list[pb.TrainSample], chunks: Sequence[Sequence[int]], data: int
) -> dict[str, torch.Tensor]:
    def work(rank: int, peers: ThreadCommunicator) -> Any:
        trainer = rank_of(job, rank, data, peers)
        for optimizer in trainer.optimizers.values():
            optimizer.step = lambda *_: None  # type: ignore[method-assign]
        for chunk in chunks:
            add(trainer, samples, chunk)
        exhaust(trainer.train(0, batch_of(job, samples)))
        return parts_of(trainer, gradients=True)

    return united(on_ranks(data, work))


def assert_close(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == whole.keys()
    assert relative_error(ours, whole) <= TOLERANCE
    assert max(float((ours[name] - value).abs().max()) for name, value in whole.items()) <= TOLERANCE


@pytest.mark.full(quick=4)
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_gradients_in_chunks_are_those_of_the_whole_batch(folder: Path, algorithm: dict[str, Any]) -> None:
    """A masked sample, and a prompt without any response to train on, take part."""
    job, samples = job_of(folder, algorithm), samples_of(abstained=(2, 8, 9, 10, 11))
    whole = gradients_of(job, serial(job, 1, 1, models=("actor",)), 1, batch_of(job, samples))
    assert any(value.abs().max() > 1e-4 for value in whole.values())
    assert_close(streamed_gradients(job, samples, ((3, 1), (0,), (2,)), 1), whole)


def test_gradients_of_two_data_parallel_ranks_are_those_of_one(folder: Path) -> None:
    job, samples = job_of(folder, ALGORITHMS["grpo, TokenMean"]), samples_of(abstained=(2, 8, 9, 10, 11))
    whole = gradients_of(job, serial(job, 1, 1, models=("actor",)), 1, batch_of(job, samples))
    assert_close(streamed_gradients(job, samples, ((1,), (3, 2), (0,)), 2), whole)


@pytest.mark.parametrize(
    "training", [{"packing": False}, {"microBatchTokens": 24}, {"sharedPrompts": "Enabled"}], ids=str
)
def test_every_split_of_a_chunk_has_these_gradients(folder: Path, training: dict[str, Any]) -> None:
    job, samples = job_of(folder, ALGORITHMS["grpo, SequenceMean"], **training), samples_of()
    whole = gradients_of(job, serial(job, 1, 1, models=("actor",)), 1, batch_of(job, samples))
    assert_close(streamed_gradients(job, samples, ((1,), (3,), (0,), (2,)), 1), whole)


def test_a_replay_in_the_same_order_has_the_same_bits_and_the_metrics_of_the_whole_step(folder: Path) -> None:
    job, samples = job_of(folder, ALGORITHMS["grpo, TokenMean"]), samples_of()
    order = ((2,), (0,), (3,), (1,))
    first, metrics = streamed(job, samples, order, data=2)
    again, same = streamed(job, samples, order, data=2)
    assert_bitwise(first, again)
    assert metrics == same
    assert [trainer.progress.steps for trainer in first] == [1, 1]

    def whole(rank: int, peers: ThreadCommunicator) -> dict[str, float]:
        return exhaust(rank_of(job, rank, 2, peers).train(0, batch_of(job, samples)))

    expected = on_ranks(2, whole)[0]
    assert metrics.keys() == expected.keys()
    by_split = {"train/largest_micro_batch_tokens", "train/padding"}
    for name in expected.keys() - by_split:
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_micro_batches_are_counted_and_no_weight_moves_before_the_step(folder: Path) -> None:
    job, samples = job_of(folder, ALGORITHMS["grpo, SequenceMean"]), samples_of(abstained=(4, 5, 6, 7))
    trainer = rank_of(job, 0, 1, Alone())
    before = {name: value.clone() for name, value in weights_of([trainer]).items()}
    assert [add(trainer, samples, groups) for groups in ((0,), (1,), (2, 3))] == [2, 0, 4]
    assert trainer.stream.chunks(0) == [(0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8, 16))]
    assert trainer.stream.chunks(1) == ()
    assert trainer.progress.steps == 0
    assert all(torch.equal(before[name], value) for name, value in weights_of([trainer]).items())
    exhaust(trainer.train(0, batch_of(job, samples)))
    assert len(trainer.step_seconds) == 1
    assert not trainer.stream.chunks(0)
    assert not any(torch.equal(before[name], value) for name, value in weights_of([trainer]).items())


def test_a_batch_without_a_token_to_train_on_takes_no_step(folder: Path) -> None:
    job, samples = job_of(folder, ALGORITHMS["dapo"]), samples_of(abstained=range(16))
    (trainer,), metrics = streamed(job, samples, ((0,), (1,), (2,), (3,)))
    assert (trainer.progress.steps, metrics["train/skipped_steps"]) == (0, 1.0)
    exhaust(trainer.train(1, batch_of(job, samples_of(seed=1))))
    assert trainer.progress.steps == 1


def test_a_chunk_that_fails_leaves_no_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, samples = job_of(folder, ALGORITHMS["rloo"]), samples_of()
    trainer, chunks = rank_of(job, 0, 1, Alone()), ((0,), (1,), (2,), (3,))
    add(trainer, samples, (3,))

    def fail(batch: TrainingBatch) -> TrainingBatch:
        raise WorkError("OutOfMemory", "no memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(trainer.algorithm, "prepare", fail)
        with pytest.raises(WorkError, match="no memory"):
            add(trainer, samples, (2,))
    assert trainer.stream.chunks(0) == ()
    assert not any(optimizer.gradients.any() for optimizer in trainer.optimizers.values())
    for chunk in chunks:
        add(trainer, samples, chunk)
    exhaust(trainer.train(0, batch_of(job, samples)))
    undisturbed, _ = streamed(job, samples, chunks)
    assert_bitwise([trainer], undisturbed)


def test_a_number_that_is_not_finite_skips_the_step(folder: Path) -> None:
    job, samples = job_of(folder, ALGORITHMS["grpo, TokenMean"]), samples_of()
    trainer = rank_of(job, 0, 1, Alone())
    before = {name: value.clone() for name, value in weights_of([trainer]).items()}
    for group in range(GROUPS):
        chunk = samples[4 * group : 4 * group + 4]
        batch = batch_of(job, chunk)
        if group == 1:
            log_p = batch.fields[SAMPLED_FIELD].clone()
            log_p[0, 0] = float("nan")
            batch = batch.with_fields(**{SAMPLED_FIELD: log_p})
        trainer.accumulate(0, numbers_of(chunk), batch)
    metrics = exhaust(trainer.train(0, batch_of(job, samples)))
    assert metrics["train/nonfinite_steps"] == 1
    assert all(torch.equal(before[name], value) for name, value in weights_of([trainer]).items())
    assert not any(optimizer.gradients.any() for optimizer in trainer.optimizers.values())
