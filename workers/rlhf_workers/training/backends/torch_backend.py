"""The backend `torch`: stages of Hugging Face models in PyTorch, run by the executor of schedule tables.

Owns how a rank of it is built: the layout of its table, its stages, the process groups, the restored state. What it
does then is `Trainer`, `step_timing` and `checkpoint`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.schedule import ScheduleTable
from rlhf_workers.models import model_folder
from rlhf_workers.precision import compute_dtype
from rlhf_workers.training import checkpoint, step_timing
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.communicator import Communicator, TorchCommunicator
from rlhf_workers.training.model_stages import Head, ModelStage, build_stage, read_config
from rlhf_workers.training.rank_layout import RankLayout
from rlhf_workers.training.rendezvous import join_group, leave_group
from rlhf_workers.training.source_files import SourceFiles, read_source_files, write_source_files
from rlhf_workers.training.tensor_file import model_tensors
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.training_batch import TrainingBatch

HEADS: Final[Mapping[ModelKind, Head]] = {ModelKind.POLICY: "lm", ModelKind.VALUE: "value"}


class TorchBackend:
    """Implements `registry.TrainingBackend`."""

    def __init__(self, trainer: Trainer, source_files: SourceFiles = MappingProxyType({})) -> None:
        self.trainer, self._source_files = trainer, source_files

    @property
    def models(self) -> tuple[str, ...]:
        return self.trainer.layout.models

    @property
    def steps(self) -> int:
        return self.trainer.progress.steps

    @property
    def step_seconds(self) -> list[float]:
        return self.trainer.step_seconds

    @property
    def bubble_seconds(self) -> float:
        return self.trainer.bubble_seconds

    def train(self, iteration: int, batch: TrainingBatch, iterations: int) -> Generator[None, None, dict[str, float]]:
        return self.trainer.train(iteration, batch, iterations)

    def measure(self, command: pb.Measure) -> Generator[None, None, pb.MeasureResult]:
        return step_timing.measure(self.trainer, command)

    def use_table(self, table: ScheduleTable) -> None:
        self.trainer.use_table(table)

    def save(self, folder: Path, version: int) -> list[pb.CheckpointFile]:
        return checkpoint.save(self.trainer, folder, version) + write_source_files(folder, self._source_files)

    def published(self, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        trainer = self.trainer
        for (name, stage), optimizer in sorted(trainer.optimizers.items()):
            if name == model and trainer.layout.publishes(name, stage):
                for parameter in optimizer.owned:
                    yield parameter, optimizer.parameters[parameter].detach().to("cpu", trainer.compute)

    def offload(self) -> None:
        self.trainer.offload()

    def onload(self) -> None:
        self.trainer.onload()

    def close(self) -> None:
        leave_group()


def build_backend(job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink) -> TorchBackend:
    """Return this rank of the group that a BecomeTraining describes, ready to train."""
    wait = float(job.spec.run_policy.start_timeout_seconds)
    trainer = build_trainer(job, become, device, partial(join, become, device, wait), span)
    return TorchBackend(trainer, read_source_files(job, trainer.layout, become.checkpoint))


def build_trainer(
    job: RLHFJob,
    become: pb.BecomeTraining,
    device: torch.device,
    connect: Callable[[RankLayout], Communicator],
    span: Any,
) -> Trainer:
    """Return a trainer: loads this rank's stages, joins the others by `connect`, then restores the checkpoint."""
    layout = RankLayout(ScheduleTable.model_validate_json(become.schedule), become.rank, become.world_size)
    compute = compute_dtype(job.spec)
    stages = {key: load_stage(job, layout, *key, become.checkpoint, device) for key in layout.held}
    trainer = Trainer(job.spec, layout, stages, connect(layout), device, compute, span)
    if become.checkpoint:
        checkpoint.restore(trainer, Path(become.checkpoint), become.version)
    return trainer


def load_stage(
    job: RLHFJob, layout: RankLayout, model: str, stage: int, checkpoint_folder: str, device: torch.device
) -> ModelStage:
    """Return one stage from the checkpoint, or from the manifest's folder when there is none."""
    role = ModelRole(model)
    field = job.spec.models.path_field(role)
    source = job.spec.models.source(role)
    assert source is not None  # a role that is trained is a model
    folder = Path(checkpoint_folder) / model if checkpoint_folder else model_folder(source.path, field)
    config = read_config(folder, field, layout.stages(model))
    attention: Any = "eager" if job.spec.deterministic else "sdpa"
    tensors = model_tensors(folder, field)
    return build_stage(config, tensors, layout.stages(model), stage, HEADS[role.kind], device, attention)


def join(become: pb.BecomeTraining, device: torch.device, timeout: float, layout: RankLayout) -> Communicator:
    """Return the communicator of a real group, once all ranks are there and every set that reduces has its group."""
    join_group(become, device, timeout)
    groups = [layout.holders(model, stage) for model in layout.models for stage in range(layout.stages(model))]
    groups += [ends for model in layout.models for ends in layout.ends(model) if ends[0] != ends[1]]
    return TorchCommunicator(layout.rank, groups)
