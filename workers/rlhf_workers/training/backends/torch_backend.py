"""The backend `torch`: stages of Hugging Face models in PyTorch, run by the executor of schedule tables.

Owns the construction of a rank: its layout, its stages, the process groups, the restored state.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ADAPTER_FIELD, DRAFT_MODEL, ExitCode
from rlhf_common.schedule import ScheduleTable
from rlhf_planner.plan_search.cost_document import CostDocument
from rlhf_workers.devices.device import compute_deterministically
from rlhf_workers.failures import WorkError
from rlhf_workers.models.loading import checked_folder, model_folder
from rlhf_workers.models.precision import compute_dtype
from rlhf_workers.training.backends.registry import SpanSink
from rlhf_workers.training.batches.training_batch import TrainingBatch
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.checkpoints.draft_files import build_draft_training
from rlhf_workers.training.checkpoints.source_files import (
    SourceFiles,
    read_source_files,
    saved_type,
    write_source_files,
)
from rlhf_workers.training.communication.communicator import Communicator, TorchCommunicator
from rlhf_workers.training.communication.host_transport import CpuCopies, CudaCopies, HostCommunicator
from rlhf_workers.training.communication.rendezvous import join_group, leave_group
from rlhf_workers.training.communication.transport import GroupTransport, TransportKind
from rlhf_workers.training.cost_profile import profile_costs
from rlhf_workers.training.parallel.expert_group import ExpertGroup
from rlhf_workers.training.parallel.expert_stage import require_experts, sharing
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.parallel.sharded_stage import FIELD as SHARD_FIELD
from rlhf_workers.training.parallel.sharded_stage import begin, sharding
from rlhf_workers.training.schedule import step_timing
from rlhf_workers.training.stages import adapters
from rlhf_workers.training.stages.model_stages import ModelStage, attention_of, build_stage, read_config
from rlhf_workers.training.stages.pipeline_stage import Head, PipelineStage
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.training.trainer_build import new_trainer
from rlhf_workers.weights.tensor_file import CHECKPOINT_FIELD, TensorFolder, checkpoint_tensors, model_tensors

HEADS: Final[Mapping[ModelKind, Head]] = {
    ModelKind.POLICY: "lm",
    ModelKind.VALUE: "value",
    ModelKind.REWARD: "score",
}


class LoadStage(Protocol):
    """Loads one stage of a backend."""

    def __call__(
        self,
        job: RLHFJob,
        layout: RankLayout,
        model: str,
        stage: int,
        checkpoint_folder: str,
        device: torch.device,
        trunk: adapters.Trunk,
    ) -> PipelineStage:
        """Return the stage; `checkpoint_folder` is empty without a checkpoint."""


class TorchBackend:
    """Implements `registry.TrainingBackend` for stages of any kind."""

    def __init__(self, trainer: Trainer, source_files: SourceFiles = MappingProxyType({})) -> None:
        self.trainer, self._source_files = trainer, source_files

    @property
    def models(self) -> tuple[str, ...]:
        return self.trainer.layout.models

    @property
    def world(self) -> int:
        return self.trainer.layout.world

    @property
    def steps(self) -> int:
        return self.trainer.progress.steps

    @property
    def transport(self) -> TransportKind:
        return self.trainer.communicator.transport.kind

    @property
    def step_seconds(self) -> list[float]:
        return self.trainer.step_seconds

    @property
    def bubble_seconds(self) -> float:
        return self.trainer.bubble_seconds

    @property
    def sample_advantages(self) -> list[float]:
        return self.trainer.sample_advantages

    @property
    def sample_rewards(self) -> list[float]:
        return self.trainer.sample_rewards

    @property
    def critics_behind(self) -> bool:
        return self.trainer.critics_behind

    def train(
        self, iteration: int, batch: TrainingBatch, iterations: int, *, policy_first: bool
    ) -> Generator[None, None, dict[str, float]]:
        return self.trainer.train(iteration, batch, iterations, policy_first=policy_first)

    def streamed(self, iteration: int) -> Sequence[tuple[int, ...]]:
        return self.trainer.stream.chunks(iteration)

    def accumulate(self, iteration: int, samples: tuple[int, ...], chunk: TrainingBatch) -> int:
        return self.trainer.accumulate(iteration, samples, chunk)

    def measure(self, command: pb.Measure) -> Generator[None, None, pb.MeasureResult]:
        return step_timing.measure(self.trainer, command)

    def profile_costs(self) -> Generator[None, None, CostDocument]:
        return profile_costs(self.trainer)

    def use_table(self, table: ScheduleTable) -> None:
        self.trainer.use_table(table)

    def save(self, folder: Path, version: int) -> list[pb.CheckpointFile]:
        return checkpoint.save(self.trainer, folder, version) + write_source_files(folder, self._source_files)

    def published(self, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        trainer = self.trainer
        if model == DRAFT_MODEL and trainer.draft is not None:
            yield from trainer.draft.published()
        for (name, stage), optimizer in sorted(trainer.optimizers.items()):
            if name != model or not trainer.layout.publishes(name, stage):
                continue
            if (settings := trainer.spec.training.adapters(ModelRole(name))) is not None:
                of_stage = adapters.merged_parameters if settings.publish == "Merged" else adapters.published_alone
                yield from of_stage(trainer.stages[name, stage], trainer.compute)
            else:
                for parameter, weight in optimizer.weights():
                    yield parameter, weight.to(trainer.compute)

    def offload(self) -> None:
        self.trainer.offload()

    def onload(self) -> None:
        self.trainer.onload()

    def close(self) -> None:
        leave_group()


def build_backend(job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink) -> TorchBackend:
    """Return the backend of this rank for a BecomeTraining command, ready to train."""
    return backend_of(job, become, device, span, load_stage)


def backend_of(
    job: RLHFJob, become: pb.BecomeTraining, device: torch.device, span: SpanSink, load: LoadStage
) -> TorchBackend:
    """Return a backend like `build_backend`, with the stages from `load`."""
    if job.spec.deterministic:
        compute_deterministically(device)
    wait = float(job.spec.run_policy.start_timeout_seconds)
    trainer = build_trainer(job, become, device, partial(join, become, device, wait), span, load)
    return TorchBackend(trainer, read_source_files(job, trainer.layout, become.checkpoint))


def build_trainer(
    job: RLHFJob,
    become: pb.BecomeTraining,
    device: torch.device,
    connect: Callable[[RankLayout], Communicator],
    span: Any,
    load: LoadStage | None = None,
) -> Trainer:
    """Return a trainer with this rank's stages, in the group from `connect`, restored if there is a checkpoint."""
    parallelism, table = job.spec.training.parallelism, ScheduleTable.model_validate_json(become.schedule)
    layout = RankLayout.for_rank(table, become.rank, become.world_size, parallelism)
    compute = compute_dtype(job.spec)
    trunk: adapters.Trunk = {}
    load = load or load_stage
    stages: dict[tuple[str, int], PipelineStage]
    if parallelism.shard > 1:  # the group determines this rank's part of a stage
        communicator = connect(layout)
        require_shards(job, layout, communicator.transport)
        stages = {key: load_sharded_stage(job, layout, *key, become.checkpoint, device) for key in layout.local_stages}
    elif layout.in_tensor_groups:  # a chunk asks torch.distributed for its place in the group
        communicator = connect(layout)
        stages = {key: load(job, layout, *key, become.checkpoint, device, trunk) for key in layout.local_stages}
        for stage in stages.values():
            stage.join(communicator)
    else:
        stages = {key: load(job, layout, *key, become.checkpoint, device, trunk) for key in layout.local_stages}
        communicator = connect(layout)
        for stage in stages.values():
            stage.join(communicator)
    draft = build_draft_training(job, layout, communicator, become.checkpoint, device, span)
    trainer = new_trainer(job.spec, layout, stages, communicator, device, compute, span, draft)
    if become.checkpoint:
        checkpoint.restore(trainer, Path(become.checkpoint), become.version)
    return trainer


def load_stage(
    job: RLHFJob,
    layout: RankLayout,
    model: str,
    stage: int,
    checkpoint_folder: str,
    device: torch.device,
    trunk: adapters.Trunk,
) -> ModelStage:
    """Return one stage from the checkpoint, or from the manifest's folder without a checkpoint; frozen weights always
    come from the manifest's folder."""
    role = ModelRole(model)
    settings = job.spec.training.adapters(role)
    if checkpoint_folder and settings is None:
        adapters.require_none(Path(checkpoint_folder) / model)
    source = job.spec.models.source(role)
    assert source is not None  # a trained role has a model
    saved = Path(checkpoint_folder) / model
    folder, field = weights_folder(job, role, checkpoint_folder if settings is None else "")
    config, attention = read_config(folder, field, layout.stages(model)), attention_of(job)
    if settings is not None:
        adapters.require_no_experts(config, field)
    freeze = None if settings is None else partial(adapters.freeze, compute=compute_dtype(job.spec))
    tensors = weights_tensors(folder, role, field, checkpoint_folder if settings is None else "")
    parts = config, tensors, layout.stages(model), stage, HEADS[role.kind]
    make = None
    if layout.expert > 1:
        require_experts(config, layout.expert, field)
        make = sharing(ExpertGroup(layout.expert_rank, layout.expert_group))
    built = build_stage(*parts, device, attention, freeze, make)
    built.saved_type = type_in_checkpoints(job, role, folder)
    if settings is not None:
        if settings.trunk == "Shared":
            adapters.share(built, source.path, trunk)
        adapters.put_in(built, settings, job.spec.seed, model)
        if checkpoint_folder:
            adapters.load(built, saved, settings, CHECKPOINT_FIELD)
        elif settings.adapter is not None and role is graph_of(job.spec).policy:
            adapters.load(built, model_folder(settings.adapter, ADAPTER_FIELD), settings, ADAPTER_FIELD)
    return built


def load_sharded_stage(
    job: RLHFJob, layout: RankLayout, model: str, stage: int, checkpoint_folder: str, device: torch.device
) -> ModelStage:
    """Return this rank's part of a stage, like `load_stage`; the group must exist."""
    role = ModelRole(model)
    folder, field = weights_folder(job, role, checkpoint_folder)
    if checkpoint_folder:
        adapters.require_none(folder)
    config = read_config(folder, field, layout.stages(model))
    tensors = weights_tensors(folder, role, field, checkpoint_folder)
    parts = config, tensors, layout.stages(model), stage, HEADS[role.kind]
    built = build_stage(*parts, device, attention_of(job), make=sharding(device, compute_dtype(job.spec)))
    built.saved_type = type_in_checkpoints(job, role, folder)
    begin(built)
    return built


def require_shards(job: RLHFJob, layout: RankLayout, transport: GroupTransport) -> None:
    """Raise WorkError if this group cannot hold models in parts: its backend, ranks or devices do not fit."""
    shard = job.spec.training.parallelism.shard
    why = ""
    if job.spec.training.backend != "torch" or layout.block_size != 1 or layout.world != shard:
        why = f"{shard} needs backend torch and {shard} ranks of one pipeline stage, and the group has {layout.world}"
    elif transport.kind == "host":
        why = f"{shard} needs a GPU of its own for every rank: {transport.reason}; use 1"
    if why:
        raise WorkError("BadSchedule", f"{SHARD_FIELD}: {why}", field=SHARD_FIELD, exit_code=ExitCode.USAGE)


def weights_folder(job: RLHFJob, role: ModelRole, checkpoint_folder: str) -> tuple[Path, str]:
    """Return the folder of a role's weights, in the checkpoint if there is one, and the field that names the model."""
    field, source = job.spec.models.path_field(role), job.spec.models.source(role)
    assert source is not None  # a trained role has a model
    if checkpoint_folder:
        return Path(checkpoint_folder) / role, field
    return checked_folder(source.path, field, head=HEADS[role.kind] == "lm"), field


def type_in_checkpoints(job: RLHFJob, role: ModelRole, folder: Path) -> torch.dtype:
    """Return the number type of a role's weights in checkpoints; the role starts from `folder`."""
    source = job.spec.models.source(role)
    assert source is not None  # a trained role has a model
    return saved_type(job.spec, source.path, folder)


def weights_tensors(folder: Path, role: ModelRole, field: str, checkpoint_folder: str) -> TensorFolder:
    """Return the tensors of the folder from `weights_folder`, in float32 if it is a checkpoint."""
    if checkpoint_folder:
        return checkpoint_tensors(Path(checkpoint_folder), role, field)
    return model_tensors(folder, field)


def join(become: pb.BecomeTraining, device: torch.device, timeout: float, layout: RankLayout) -> Communicator:
    """Return the communicator of a real group, once all ranks have met and every reducing set has its process group."""
    transport = join_group(become, device, timeout)
    communicator = TorchCommunicator(layout.rank, layout.groups(), transport)
    if transport.kind != "host":
        return communicator
    copies = CudaCopies(device) if device.type == "cuda" else CpuCopies()
    return HostCommunicator(communicator, copies, transport)
