"""What the training role asks of a backend, and which module builds which: by its name in `spec.training.backend`.

A backend is one rank's part of a training group: stages, optimizers, the group's communication, its files of a
checkpoint. Rule: importing this module loads no backend. To add one: a module with `build_backend` and a line in
`BACKENDS`. What users are told that this version lacks is in `rlhf_api.rules.unavailable`; a test holds
the two together.
"""

from collections.abc import Generator, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

import torch

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_common.schedule import ScheduleTable
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.communication.transport import TransportKind

FIELD: Final = "spec.training.backend"
BACKENDS: Final[Mapping[str, str]] = {
    "torch": "rlhf_workers.training.backends.torch_backend",
    "megatron": "rlhf_workers.training.backends.megatron_backend",
}
"""Name -> module with `build_backend(job, become, device, span) -> TrainingBackend`."""


class SpanSink(Protocol):
    """Where measured times go."""

    def __call__(self, name: str, start_ns: int, end_ns: int, **attributes: str) -> None: ...


class TrainingBackend(Protocol):
    """One rank. All its methods are called by the worker's compute thread, but `published`."""

    @property
    def models(self) -> tuple[str, ...]:
        """Model roles that the group trains, in the order of its schedule table."""

    @property
    def steps(self) -> int:
        """Optimizer steps that the weights have seen."""

    @property
    def transport(self) -> TransportKind:
        """Which way tensors go between ranks."""

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of every mini-batch of the last iteration: from its first action on this rank to its last."""

    @property
    def sample_advantages(self) -> list[float]:
        """Advantage of each sample of the last iteration, mean over its tokens, NaN without any; empty: it has none."""

    @property
    def sample_rewards(self) -> list[float]:
        """Reward of each sample of the last iteration after all shaping, NaN where it is not trained on."""

    @property
    def bubble_seconds(self) -> float:
        """Seconds of the last iteration's mini-batches in which this rank computed nothing."""

    @property
    def critics_behind(self) -> bool:
        """Whether only the policy of the iteration in progress is trained; its weights will not change any more."""

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int, *, policy_first: bool
    ) -> Generator[None, None, dict[str, float]]:
        """Train an iteration of a job of so many, one mini-batch per step of the iterator; return its metrics.

        `policy_first`: with a step between the policy's mini-batches and those of other models, where there are both.
        """

    def measure(self, command: pb.Measure) -> Generator[None, None, pb.MeasureResult]:
        """Measure stages, transfers or schedules, a bounded piece per step of the iterator; change nothing."""

    def use_table(self, table: ScheduleTable) -> None:
        """Train by another table from the next iteration on; ValueError when it places stages on other ranks."""

    def save(self, folder: Path, version: int) -> list[pb.CheckpointFile]:
        """Write this rank's files of a checkpoint and return them. WorkError StorageFull, StorageDenied."""

    def published(self, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face parameter name, tensor in the type it computes in) of what this rank publishes, where it
        is held.

        Called from other threads; a tensor is read when it is asked for.
        """

    def offload(self) -> None:
        """Move weights and optimizer to host memory."""

    def onload(self) -> None:
        """Move them back, as they were."""

    def close(self) -> None:
        """Leave the group."""


class BackendModule(Protocol):
    """A module that builds a backend."""

    def build_backend(
        self, job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink
    ) -> TrainingBackend:
        """Load the rank's stages, join the group and restore the checkpoint that the command names."""


def build_backend(job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink) -> TrainingBackend:
    """Return the backend that the job names, ready to train. WorkError when this worker has none of that name."""
    name = job.spec.training.backend
    if name not in BACKENDS:
        message = f"{FIELD}: {name} is not available in this worker; use {', '.join(BACKENDS)}"
        raise WorkError("BackendUnavailable", message, field=FIELD, exit_code=ExitCode.USAGE)
    module = cast(BackendModule, import_module(BACKENDS[name]))
    return module.build_backend(job, become, device, span)
