"""The training role computes gradients of chunks between commands, serves its weights meanwhile, and takes one step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training.training_ranks import Alone, make_job, make_samples, serial, trainer_of
from tests.support.training.training_roles import finish, train, trainer_in
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.training_role import SpanBuffer, TrainingRole

SIZE, CHUNKS = 4, 4
ORDER = (3, 1, 2, 4)
"""Number of the chunk of each prompt."""


class ChunkedBatches:
    """A batch source whose samples have chunks."""

    def __init__(self, order: tuple[int, ...] = ORDER) -> None:
        self.order, self.fetched = order, list[tuple[int, int]]()

    def fetch(self, iteration: int, chunk: int = 0) -> list[pb.TrainSample]:
        self.fetched.append((iteration, chunk))
        samples = make_samples(SIZE * CHUNKS, seed=iteration)
        for sample in samples:
            sample.chunk = self.order[sample.group]
        return [sample for sample in samples if chunk in (0, sample.chunk)]


def role_of(folder: Path, batches: ChunkedBatches, **training: Any) -> TrainingRole:
    algorithm = {"grpo": {"groupSize": SIZE, "miniBatchSize": SIZE * CHUNKS}}
    rollout = {"batchSize": SIZE * CHUNKS, "temperature": 0.8}
    job = make_job(folder, algorithm=algorithm, rollout=rollout, training={"stream": "Enabled", **training})
    trainer, spans = trainer_of(job, serial(job, 1, 1, models=("actor",)), 0, 1, Alone()), SpanBuffer()
    trainer._span = spans
    return TrainingRole(job, TorchBackend(trainer), batches, 0, spans, lambda code: None)


def accumulate(chunks: int, iteration: int = 0, number: int = 9) -> pb.Command:
    return pb.Command(id=number, accumulate=pb.Accumulate(iteration=iteration, chunks=chunks))


def weights(role: TrainingRole) -> dict[str, torch.Tensor]:
    version = role.versions()["actor"]
    return {name: tensor.clone() for name, tensor in role.tensors("actor", version)}


def trained(folder: Path, *chunks: int, batches: Callable[[], ChunkedBatches] = ChunkedBatches) -> TrainingRole:
    """Return a role that was asked for these numbers of chunks, and then trained."""
    role = role_of(folder, batches())
    for count in chunks:
        outbox = RecordedOutbox()
        role.handle(accumulate(count), outbox)
        finish(role, outbox)
    outbox = RecordedOutbox()
    role.handle(train(0), outbox)
    finish(role, outbox)
    assert outbox.answers[0].train.version == 1
    return role


def test_chunks_are_fetched_once_and_served_weights_stay(folder: Path) -> None:
    batches, outbox = ChunkedBatches(), RecordedOutbox()
    role = role_of(folder, batches)
    before = weights(role)
    role.handle(accumulate(2), outbox)
    role.step(outbox)
    assert role._running is not None
    assert all(torch.equal(before[name], value) for name, value in weights(role).items()), "served between two chunks"
    finish(role, outbox)
    result = outbox.answers[0].accumulate
    assert (result.iteration, result.chunks, result.microbatches) == (0, 2, 4)
    assert result.seconds > 0
    outbox.answers.clear()
    role.handle(accumulate(2, number=10), outbox)
    finish(role, outbox)
    assert (outbox.answers[0].accumulate.chunks, outbox.answers[0].accumulate.microbatches) == (2, 0)
    assert batches.fetched == [(0, 1), (0, 2)]
    outbox.answers.clear()
    role.handle(train(0), outbox)
    finish(role, outbox)
    assert batches.fetched == [(0, 1), (0, 2), (0, 0)]
    assert not all(torch.equal(before[name], value) for name, value in weights(role).items())


@pytest.mark.parametrize("chunks", [(1,), (2, 3), (1, 2, 3, 4)], ids=str)
def test_the_time_of_a_chunk_changes_no_bit(folder: Path, chunks: tuple[int, ...]) -> None:
    """A rank that computes everything in its Train, as in a replay, has the same weights and moments."""
    early, replayed = trained(folder, *chunks), trained(folder)
    expected = weights(replayed)
    assert all(torch.equal(expected[name], value) for name, value in weights(early).items())
    for left, right in zip(*(trainer_in(role).optimizers.values() for role in (early, replayed)), strict=True):
        moments = right.state()
        assert all(torch.equal(moments[name], value) for name, value in left.state().items())


def test_a_batch_with_other_chunks_restarts_the_rank(folder: Path) -> None:
    batches, outbox = ChunkedBatches(), RecordedOutbox()
    role = role_of(folder, batches)
    role.handle(accumulate(1), outbox)
    finish(role, outbox)
    batches.order = (1, 2, 3, 4)
    role.handle(train(0), outbox)
    with pytest.raises(WorkError, match="other chunks") as raised:
        finish(role, RecordedOutbox())
    assert raised.value.failure.exit_code == ExitCode.RESTART


def test_gradients_of_another_iteration_are_refused(folder: Path) -> None:
    role = role_of(folder, ChunkedBatches())
    with pytest.raises(WorkError, match="gradients of iteration 1"):
        role.handle(accumulate(1, iteration=1), RecordedOutbox())
    role.handle(accumulate(1), RecordedOutbox())
    with pytest.raises(WorkError, match="or busy"):
        role.handle(accumulate(2), RecordedOutbox())


def test_a_checkpoint_between_two_chunks_has_the_weights_before_the_step(folder: Path, tmp_path: Path) -> None:
    role, outbox = role_of(folder, ChunkedBatches()), RecordedOutbox()
    role.handle(accumulate(3), outbox)
    role.step(outbox)
    saved = RecordedOutbox()
    command = pb.Command(id=5, save_checkpoint=pb.SaveCheckpoint(folder=str(tmp_path), iteration=0))
    role.handle(command, saved)
    assert saved.answers[0].checkpoint.files
    finish(role, outbox)
    assert outbox.answers[0].accumulate.chunks == 3
