"""The training role of a rank without its agent: a test sends commands and reads the stored reports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.training.training_ranks import ThreadCommunicator, make_job, make_samples, serial, trainer_of
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import ScheduleTable
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.stages.stage_copy import StageCopies, StageCopy
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.training_role import SpanBuffer, TrainingRole


class MadeBatches:
    """A batch source with one batch per iteration."""

    def fetch(self, iteration: int, chunk: int = 0) -> list[pb.TrainSample]:
        return make_samples(seed=iteration)


def role_of(
    folder: Path,
    peers: ThreadCommunicator,
    rank: int = 0,
    leave: Callable[[int], None] = lambda code: None,
    table: ScheduleTable | None = None,
    profile: bool = False,
    **spec: Any,
) -> TrainingRole:
    job = make_job(folder, folder, **spec)
    trainer = trainer_of(job, table or serial(job, 2, 1), rank, 2, peers)
    spans = SpanBuffer()
    trainer._span = spans
    return TrainingRole(job, TorchBackend(trainer), MadeBatches(), 0, spans, leave, rank=rank, profile=profile)


def trainer_in(role: TrainingRole) -> Trainer:
    """Return the trainer of a role whose backend is torch."""
    assert isinstance(role._backend, TorchBackend)
    return role._backend.trainer


def stage_copies(trainer: Trainer) -> list[StageCopy]:
    """Return the copies that move the stages of a trainer to host memory."""
    return next(hook for hook in trainer.hooks if isinstance(hook, StageCopies)).copies


def finish(role: TrainingRole, outbox: RecordedOutbox) -> None:
    while not outbox.answers or role._running is not None:
        role.step(outbox)


def train(iteration: int, number: int = 1) -> pb.Command:
    return pb.Command(id=number, train=pb.Train(iteration=iteration))
