"""The training role: becomes a rank of a training group, trains iterations, writes checkpoints, serves its weights.

Rule: a Train runs one mini-batch a `step`, so the worker stays answerable between them. A lost peer ends this process
with exit code 75 at once, without a word to the coordinator, which sees the session break: the whole group must start
again, and nothing in this process is worth keeping. Must never answer a Train whose weights it does not hold.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode
from rlhf_api.schedule import ScheduleTable
from rlhf_workers.failures import WorkError
from rlhf_workers.models import model_folder
from rlhf_workers.precision import compute_dtype
from rlhf_workers.settings import read_settings
from rlhf_workers.training import checkpoint
from rlhf_workers.training.batch import batch_from
from rlhf_workers.training.coordinator_batches import CoordinatorBatches
from rlhf_workers.training.layout import Layout
from rlhf_workers.training.measuring import measure
from rlhf_workers.training.peers import PeerLostError, Peers, TorchPeers
from rlhf_workers.training.rendezvous import join_group, leave_group
from rlhf_workers.training.source_files import SourceFiles, read_source_files, write_source_files
from rlhf_workers.training.stages import Head, Stage, build_stage, read_config
from rlhf_workers.training.tensor_file import model_tensors
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

HEADS: Final[Mapping[ModelKind, Head]] = {ModelKind.POLICY: "lm", ModelKind.VALUE: "value"}


class BatchSource(Protocol):
    """Where batches come from."""

    def fetch(self, iteration: int) -> list[pb.TrainSample]:
        """All samples of an iteration's batch."""


class TrainingRole:
    """One rank; see `rlhf_workers.worker_role.Role` and `WeightProvider`."""

    name = "training"
    handles = frozenset({"train", "save_checkpoint", "measure"})

    def __init__(
        self,
        job: RLHFJob,
        trainer: Trainer,
        batches: BatchSource,
        version: int,
        spans: "SpanBuffer",
        leave: Callable[[int], None] = os._exit,
        source_files: SourceFiles = MappingProxyType({}),
    ) -> None:
        self._job, self._trainer, self._batches, self._version, self._leave = job, trainer, batches, version, leave
        self._spans, self._source_files = spans, source_files
        self._steps_before = 0
        self._running: tuple[pb.Command, Generator[None, None, Any]] | None = None
        self._last: pb.TrainResult | None = None
        self._asleep = False
        self._broken = False  # a Train failed half-way: the weights are those of no version

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        if command.WhichOneof("command") == "train":
            self._begin_training(command, outbox)
        elif command.WhichOneof("command") == "measure":
            self._begin_measuring(command, outbox)
        else:
            self._save(command, outbox)

    def step(self, outbox: Outbox) -> bool:
        if self._running is None:
            return False
        command, work = self._running
        try:
            next(work)
        except StopIteration as finished:
            self._running = None
            if isinstance(finished.value, pb.MeasureResult):
                outbox.done(pb.CommandDone(command_id=command.id, measure=finished.value))
            else:
                self._finish_training(command, finished.value, outbox)
        except PeerLostError as error:
            log.error("%s; this rank restarts", error)
            logging.shutdown()
            self._leave(error.failure.exit_code)
        except Exception:
            self._running, self._broken = None, self._trainer.progress.steps != self._steps_before
            raise
        self._spans.flush(outbox)
        return True

    def give_back(self) -> list[pb.SampleProgress]:
        return []

    def versions(self) -> Mapping[str, int]:
        return dict.fromkeys(self._trainer.layout.models, self._version)

    def active(self) -> int:
        return 0

    def offload(self) -> None:
        if self._running is not None:
            raise WorkError("WrongVersion", "other work came to a rank that is training", retryable=True)
        self._trainer.offload()
        self._asleep = True

    def close(self) -> None:
        leave_group()

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters of a model, in the type it computes in; never those of a step in progress."""
        trainer = self._trainer
        for (name, stage), optimizer in sorted(trainer.optimizers.items()):
            if name != model or not trainer.layout.publishes(name, stage):
                continue
            for parameter in optimizer.owned:
                self._refuse_broken()
                if self._version != version or self._running is not None:
                    holds = f"trains version {self._version + 1}" if self._running else f"holds version {self._version}"
                    raise WorkError("WrongVersion", f"{model} version {version} was asked for; this rank {holds}")
                yield parameter, optimizer.parameters[parameter].detach().to("cpu", trainer.compute)

    # ------------------------------------------------------------ commands

    def _begin_training(self, command: pb.Command, outbox: Outbox) -> None:
        iteration = command.train.iteration
        self._refuse_broken()
        if self._last is not None and iteration == self._version - 1:
            outbox.done(pb.CommandDone(command_id=command.id, train=self._last))
            return
        if iteration != self._version or self._running is not None:
            state = "is training" if self._running else f"holds version {self._version}"
            raise WorkError("WrongVersion", f"train iteration {iteration} came to a rank that {state}", retryable=True)
        if command.train.schedule:
            try:
                self._trainer.use_table(ScheduleTable.model_validate_json(command.train.schedule))
            except ValueError as error:
                raise WorkError("BadSchedule", f"train.schedule: {error}") from error
        self._wake(iteration, outbox)
        self._spans.iteration, self._steps_before = iteration, self._trainer.progress.steps
        self._running = command, self._train(command.train, outbox)

    def _begin_measuring(self, command: pb.Command, outbox: Outbox) -> None:
        self._refuse_broken()
        if self._running is not None:
            raise WorkError("WrongVersion", "measure came to a rank that is training", retryable=True)
        self._wake(self._version, outbox)
        self._steps_before = self._trainer.progress.steps
        self._running = command, measure(self._trainer, command.measure)

    def _wake(self, iteration: int, outbox: Outbox) -> None:
        if self._asleep:
            start_ns = time.time_ns()
            self._trainer.onload()
            self._asleep = False
            end_ns = time.time_ns()
            outbox.span("onload/training", start_ns, end_ns, iteration)
            onload = pb.OnloadObservation(role=self.name)
            outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, onload=onload))

    def _train(self, order: pb.Train, outbox: Outbox) -> Generator[None, None, dict[str, float]]:
        spec, iteration = self._job.spec, order.iteration
        start, start_ns = time.monotonic(), time.time_ns()
        samples = self._batches.fetch(iteration)
        outbox.span("train/fetch", start_ns, time.time_ns(), iteration)
        needed = (SAMPLED_FIELD, *graph_of(spec).scored_fields)
        batch = batch_from(samples, spec.rollout.batch_size, needed)
        metrics: dict[str, float] = yield from self._trainer.train(iteration, batch, order.iterations)
        outbox.count(batch.tokens * spec.algorithm.fields.epochs)
        metrics["train/seconds"] = time.monotonic() - start
        metrics["bubble_seconds"] = self._trainer.bubble_seconds
        metrics["step_seconds"] = statistics.median(self._trainer.step_seconds or [0.0])
        return metrics

    def _finish_training(self, command: pb.Command, metrics: dict[str, float], outbox: Outbox) -> None:
        self._version = command.train.iteration + 1
        self._last = pb.TrainResult(iteration=command.train.iteration, version=self._version, metrics=metrics)
        outbox.done(pb.CommandDone(command_id=command.id, train=self._last))

    def _refuse_broken(self) -> None:
        if self._broken:
            raise WorkError(
                "WrongVersion",
                f"this rank failed while it trained version {self._version + 1} and holds no whole version",
                retryable=True,
                exit_code=ExitCode.RESTART,
            )

    def _save(self, command: pb.Command, outbox: Outbox) -> None:
        self._refuse_broken()
        if self._running is not None:
            raise WorkError("WrongVersion", "saveCheckpoint came to a rank that is training", retryable=True)
        start = time.time_ns()
        folder = Path(command.save_checkpoint.folder)
        files = checkpoint.save(self._trainer, folder, self._version) + write_source_files(folder, self._source_files)
        outbox.span("checkpoint", start, time.time_ns(), command.save_checkpoint.iteration)
        outbox.done(pb.CommandDone(command_id=command.id, checkpoint=pb.CheckpointResult(files=files)))


class SpanBuffer:
    """Spans of the trainer until the next `flush`."""

    def __init__(self) -> None:
        self.iteration = 0
        self._spans: list[tuple[str, int, int, dict[str, str]]] = []

    def __call__(self, name: str, start_ns: int, end_ns: int, **attributes: str) -> None:
        self._spans.append((name, start_ns, end_ns, attributes))

    def flush(self, outbox: Outbox) -> None:
        """Hands everything to the outbox."""
        for name, start_ns, end_ns, attributes in self._spans:
            outbox.span(name, start_ns, end_ns, self.iteration, **attributes)
        self._spans.clear()


# ---------------------------------------------------------------- building


def build(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> TrainingRole:
    """The role a BecomeTraining asks for: stages loaded, group formed, state restored."""
    settings = read_settings(os.environ)
    wait = float(job.spec.run_policy.start_timeout_seconds)
    batches = CoordinatorBatches(settings.coordinator, settings.worker, certificates, wait)
    become = command.become_training
    spans = SpanBuffer()
    trainer = build_trainer(job, become, device, partial(join, become, device, wait), spans)
    files = read_source_files(job, trainer.layout, become.checkpoint)
    return TrainingRole(job, trainer, batches, become.version, spans, source_files=files)


def build_trainer(
    job: RLHFJob,
    become: pb.BecomeTraining,
    device: torch.device,
    connect: Callable[[Layout], Peers],
    span: Any,
) -> Trainer:
    """Loads this rank's stages, then meets the others by `connect`, then restores optimizer state."""
    layout = Layout(ScheduleTable.model_validate_json(become.schedule), become.rank, become.world_size)
    compute = compute_dtype(job.spec)
    stages = {key: load_stage(job, layout, *key, become.checkpoint, device) for key in layout.held}
    trainer = Trainer(job.spec, layout, stages, connect(layout), device, compute, span)
    if become.checkpoint:
        checkpoint.restore(trainer, Path(become.checkpoint), become.version)
    return trainer


def load_stage(
    job: RLHFJob, layout: Layout, model: str, stage: int, checkpoint_folder: str, device: torch.device
) -> Stage:
    """One stage from the checkpoint, or from the manifest's folder when there is none."""
    role = ModelRole(model)
    field = job.spec.models.path_field(role)
    source = job.spec.models.source(role)
    assert source is not None  # a role that is trained is a model
    folder = Path(checkpoint_folder) / model if checkpoint_folder else model_folder(source.path, field)
    config = read_config(folder, field, layout.stages(model))
    attention: Any = "eager" if job.spec.deterministic else "sdpa"
    tensors = model_tensors(folder, field)
    return build_stage(config, tensors, layout.stages(model), stage, HEADS[role.kind], device, attention)


def join(become: pb.BecomeTraining, device: torch.device, timeout: float, layout: Layout) -> Peers:
    """Peers of a real group: ranks meet, then every set of ranks that sums gets its process group."""
    join_group(become, device, timeout)
    groups = [layout.holders(model, stage) for model in layout.models for stage in range(layout.stages(model))]
    groups += [ends for model in layout.models for ends in layout.ends(model) if ends[0] != ends[1]]
    return TorchPeers(layout.rank, groups)
