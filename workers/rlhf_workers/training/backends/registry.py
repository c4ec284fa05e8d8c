"""The interface of a training backend, and the module of each name in `spec.training.backend`.

Rule: importing this module loads no backend.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final, Protocol, cast

import torch

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.plan_search.cost_document import CostDocument
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
    """Receives measured times."""

    def __call__(self, name: str, start_ns: int, end_ns: int, **attributes: str) -> None: ...


class TrainingBackend(Protocol):
    """One rank. The worker's compute thread calls its methods; `published` may be called from other threads."""

    @property
    def models(self) -> tuple[str, ...]:
        """Model roles that the group trains, in the order of its schedule table."""

    @property
    def world(self) -> int:
        """Number of ranks of the group."""

    @property
    def steps(self) -> int:
        """Number of optimizer steps so far; while critics train behind the policy, it counts their steps."""

    @property
    def transport(self) -> TransportKind:
        """Transport of tensors between ranks."""

    @property
    def step_seconds(self) -> list[float]:
        """Seconds in this rank's row of the table for each mini-batch of the last iteration with a token to train
        on."""

    @property
    def sample_advantages(self) -> list[float]:
        """Advantage of each sample of the last iteration, mean over its trained tokens, NaN without any; empty: no
        advantages."""

    @property
    def sample_rewards(self) -> list[float]:
        """Shaped reward of each sample of the last iteration, NaN for a sample that is not valid."""

    @property
    def bubble_seconds(self) -> float:
        """Seconds of the last iteration's mini-batches in which this rank computed nothing."""

    @property
    def critics_behind(self) -> bool:
        """Whether only the policy of the current iteration is trained; its weights are then final."""

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int, *, policy_first: bool
    ) -> Generator[None, None, dict[str, float]]:
        """Train an iteration, at most one mini-batch per step of the iterator; return its metrics.

        `iterations`: total of the job. `policy_first`: train the policy's mini-batches before those of other models,
        with a step of the iterator in between.
        """

    def streamed(self, iteration: int) -> Sequence[tuple[int, ...]]:
        """Return the chunks of an iteration whose gradients this rank has, in order: the numbers of their samples."""

    def accumulate(self, iteration: int, samples: tuple[int, ...], chunk: TrainingBatch) -> int:
        """Add the gradients of the next chunk of an iteration; return its micro-batches on this rank. The next `train`
        takes the step with them."""

    def measure(self, command: pb.Measure) -> Generator[None, None, pb.MeasureResult]:
        """Measure stages and transfers, or schedules, a bounded part per step of the iterator; change no weight and no
        moment."""

    def profile_costs(self) -> Generator[None, None, CostDocument]:
        """Measure costs for the plan search, a bounded part per step of the iterator; change no weight and no
        moment."""

    def use_table(self, table: ScheduleTable) -> None:
        """Use another table from the next mini-batch on. Raises ValueError if it has other pipelines."""

    def save(self, folder: Path, version: int) -> list[pb.CheckpointFile]:
        """Write this rank's files of a checkpoint and return them. Raises WorkError StorageFull, StorageDenied,
        StorageFailed."""

    def published(self, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face parameter name, tensor) for the weights that this rank publishes, in the compute type;
        adapters that are published alone are float32.

        Other threads may call this.
        """

    def offload(self) -> None:
        """Move weights and moments to host memory as far as the backend can, and free the gradients."""

    def onload(self) -> None:
        """Move them back unchanged."""

    def close(self) -> None:
        """Leave the group."""


class BackendModule(Protocol):
    """A module that builds a backend."""

    def build_backend(
        self, job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink
    ) -> TrainingBackend:
        """Load the rank's stages, join the group and restore the checkpoint of the command."""


def build_backend(job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink) -> TrainingBackend:
    """Return the job's backend, ready to train. Raises WorkError if this worker lacks it."""
    name = job.spec.training.backend
    if name not in BACKENDS:
        message = f"{FIELD}: {name} is not available in this worker; use {', '.join(BACKENDS)}"
        raise WorkError("BackendUnavailable", message, field=FIELD, exit_code=ExitCode.USAGE)
    module = cast(BackendModule, import_module(BACKENDS[name]))
    return module.build_backend(job, become, device, span)
