"""The training role: becomes a rank of a training group, trains iterations, writes checkpoints, serves its weights.

Rule: a Train runs at most one mini-batch per `step`, so the worker can answer between them. After a Train of the policy
only, the rank serves no critic of the new version until a Train of the critics is done. If a peer is lost during a
step, this process exits at once with code 75. Must never answer a Train with weights that it does not hold.
"""

import logging
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from rlhf_api.algorithms import graph_of, has_greedy_baseline, samples_of_batch, samples_per_prompt
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.names import DRAFT_MODEL, ExitCode
from rlhf_common.schedule import ScheduleTable
from rlhf_workers.failures import WorkError
from rlhf_workers.settings import read_settings
from rlhf_workers.training.backends.registry import TrainingBackend, build_backend
from rlhf_workers.training.batches.coordinator_batches import CoordinatorBatches
from rlhf_workers.training.batches.greedy_baselines import without_greedy
from rlhf_workers.training.batches.job_batch import job_batch
from rlhf_workers.training.batches.streamed_chunks import chunks_of, missing, numbers_of, renumbered
from rlhf_workers.training.communication.communicator import PeerLostError
from rlhf_workers.training.communication.transport import TRANSPORTS
from rlhf_workers.worker_role import Outbox

log = logging.getLogger(__name__)

FIRST_GROUP: Final = 1
"""Epoch of the group that measures costs; a later group does not."""


@dataclass(frozen=True)
class KeptWeights:
    """The weights before a training, in host memory, which this rank serves during and after it."""

    version: int
    tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]
    """Model -> (parameter name, tensor) that this rank publishes."""

    @classmethod
    def from_backend(cls, backend: TrainingBackend, version: int) -> "KeptWeights":
        """Copy the weights that a rank publishes now, of `version`; a draft model only if one is trained."""
        copies = {
            model: [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in backend.published(model)]
            for model in (*backend.models, DRAFT_MODEL)
        }
        return cls(version, copies)


class BatchSource(Protocol):
    """Source of batches."""

    def fetch(self, iteration: int, chunk: int = 0) -> list[pb.TrainSample]:
        """Return all samples of an iteration's batch, or those of one chunk, counted from 1."""


class TrainingRole:
    """One rank; see `worker_role.WorkerRole` and `WeightProvider`."""

    name = "training"
    handles = frozenset({"train", "accumulate", "save_checkpoint", "measure"})

    def __init__(
        self,
        job: RLHFJob,
        backend: TrainingBackend,
        batches: BatchSource,
        version: int,
        spans: "SpanBuffer",
        leave: Callable[[int], None] = os._exit,
        *,
        rank: int = 0,
        profile: bool = False,
    ) -> None:
        """`profile`: measure costs before the first training."""
        self._rank, self._profile_pending = rank, profile
        self._job, self._backend, self._batches, self._version, self._leave = job, backend, batches, version, leave
        self._spans = spans
        self._steps_before = 0
        self._running: tuple[pb.Command, Generator[None, None, Any]] | None = None
        self._half_done: Generator[None, None, Any] | None = None
        """The training whose critics are pending."""
        self._paused = self._resumed = 0.0
        """Times at which the last training was paused and resumed, in seconds of the monotonic clock; 0: never."""
        self._last: pb.TrainResult | None = None
        self._kept: KeptWeights | None = None
        self._offloaded = False
        self._broken = False  # a Train failed half-way: the weights belong to no version

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        if command.WhichOneof("command") == "train":
            self._begin_training(command, outbox)
        elif command.WhichOneof("command") == "accumulate":
            self._begin_accumulating(command, outbox)
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
            if command.train.part == pb.TRAIN_PART_POLICY and self._backend.critics_behind:
                self._leave_critics(command, work, outbox)
        except StopIteration as finished:
            self._running = None
            if isinstance(finished.value, pb.MeasureResult):
                outbox.done(pb.CommandDone(command_id=command.id, measure=finished.value))
            elif isinstance(finished.value, pb.AccumulateResult):
                outbox.done(pb.CommandDone(command_id=command.id, accumulate=finished.value))
            else:
                self._finish_training(command, finished.value, outbox)
        except PeerLostError as error:
            log.error("%s; this rank restarts", error)
            logging.shutdown()
            self._leave(error.failure.exit_code)
        except Exception:
            changed = self._backend.critics_behind or self._backend.steps != self._steps_before
            self._running, self._broken = None, changed
            raise
        self._spans.flush(outbox)
        return True

    def give_back(self) -> list[pb.SampleProgress]:
        return []

    def versions(self) -> Mapping[str, int]:
        return dict.fromkeys(self._backend.models, self._version)

    def active(self) -> int:
        return 0

    @property
    def kept_version(self) -> int:
        """Weight version that it serves besides the current one; 0 also if there is none."""
        return self._kept.version if self._kept is not None else 0

    def offload(self) -> None:
        if self._running is not None or self._half_done is not None:
            raise WorkError("WrongVersion", "other work came to a rank that is training", retryable=True)
        self._backend.offload()
        self._offloaded = True

    def close(self) -> None:
        self._backend.close()

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of a model that this rank publishes; never those of a training in progress.

        Raises WorkError WrongVersion for a version that it cannot serve.
        """
        published = self._kept
        if published is not None and published.version == version:
            yield from published.tensors.get(model, ())
            return
        self._require_version(model, version)
        for parameter, tensor in self._backend.published(model):
            self._require_version(model, version)
            yield parameter, tensor

    def _require_version(self, model: str, version: int) -> None:
        """Raise WorkError unless this rank has a model at a version, and is not training."""
        self._refuse_broken()
        if self._version != version or self._changes_weights:
            holds = f"trains version {self._version + 1}" if self._changes_weights else f"holds version {self._version}"
            raise WorkError("WrongVersion", f"{model} version {version} was asked for; this rank {holds}")
        if self._half_done is not None and model in self._critics:
            raise WorkError("WrongVersion", f"{model} version {version} was asked for; it is yet to be trained")

    # ------------------------------------------------------------ commands

    def _begin_training(self, command: pb.Command, outbox: Outbox) -> None:
        iteration = command.train.iteration
        self._refuse_broken()
        if self._half_done is not None and command.train.part == pb.TRAIN_PART_CRITICS:
            self._running, self._half_done = (command, self._half_done), None
            self._resumed = time.monotonic()
            return
        if self._last is not None and iteration == self._version - 1:
            outbox.done(pb.CommandDone(command_id=command.id, train=self._last))
            return
        if iteration != self._version or self._running is not None or self._half_done is not None:
            busy = self._running or self._half_done
            state = "is training" if busy else f"holds version {self._version}"
            raise WorkError("WrongVersion", f"train iteration {iteration} came to a rank that {state}", retryable=True)
        if command.train.schedule:
            try:
                self._backend.use_table(ScheduleTable.model_validate_json(command.train.schedule))
            except ValueError as error:
                raise WorkError("BadSchedule", f"train.schedule: {error}") from error
        self._wake(iteration, outbox)
        self._kept = None
        if command.train.keep:
            self._kept = KeptWeights.from_backend(self._backend, self._version)
        self._spans.iteration, self._steps_before = iteration, self._backend.steps
        self._running = command, self._train(command.train, outbox)

    def _begin_measuring(self, command: pb.Command, outbox: Outbox) -> None:
        self._refuse_broken()
        if self._running is not None or self._half_done is not None:
            raise WorkError("WrongVersion", "measure came to a rank that is training", retryable=True)
        self._wake(self._version, outbox)
        self._steps_before = self._backend.steps
        self._running = command, self._backend.measure(command.measure)

    def _begin_accumulating(self, command: pb.Command, outbox: Outbox) -> None:
        order = command.accumulate
        self._refuse_broken()
        if order.iteration != self._version or self._running is not None or self._half_done is not None:
            message = (
                f"gradients of iteration {order.iteration} were asked for; this rank is at {self._version}, or busy"
            )
            raise WorkError("WrongVersion", message, retryable=True)
        self._spans.iteration, self._steps_before = order.iteration, self._backend.steps
        self._running = command, self._accumulate(order, outbox)

    @property
    def _changes_weights(self) -> bool:
        """Whether a command runs that may change or move weights, which computing gradients does not."""
        return self._running is not None and self._running[0].WhichOneof("command") != "accumulate"

    def _wake(self, iteration: int, outbox: Outbox) -> None:
        if self._offloaded:
            start_ns = time.time_ns()
            self._backend.onload()
            self._offloaded = False
            end_ns = time.time_ns()
            outbox.span("onload/training", start_ns, end_ns, iteration)
            onload = pb.OnloadObservation(role=self.name)
            outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, onload=onload))

    def _train(self, order: pb.Train, outbox: Outbox) -> Generator[None, None, dict[str, float]]:
        spec, iteration = self._job.spec, order.iteration
        start, start_ns = time.monotonic(), time.time_ns()
        self._paused = self._resumed = 0.0
        profiled = (yield from self._profile(iteration, outbox)) if self._profile_pending else {}
        samples = self._batches.fetch(iteration)
        outbox.span("train/fetch", start_ns, time.time_ns(), iteration)
        batch, shaping = job_batch(spec, iteration, samples, samples_of_batch(spec))
        if chunks := chunks_of(samples):
            yield from self._add_chunks(iteration, chunks)
        if has_greedy_baseline(spec):
            batch = without_greedy(batch, samples_per_prompt(spec))
        policy_first = order.part == pb.TRAIN_PART_POLICY
        metrics = yield from self._backend.train(iteration, batch, order.iterations, policy_first=policy_first)
        outbox.count(batch.tokens * spec.algorithm.fields.epochs)
        metrics |= shaping | profiled
        metrics["train/seconds"] = time.monotonic() - start - (self._resumed - self._paused)
        if self._resumed:
            metrics["critic_overlap_seconds"] = time.monotonic() - self._resumed
        metrics["transport"] = float(TRANSPORTS.index(self._backend.transport))
        self._observe_steps(iteration, outbox)
        metrics["bubble_seconds"] = self._backend.bubble_seconds
        if (whole := sum(self._backend.step_seconds)) > 0:
            metrics["bubble_share"] = self._backend.bubble_seconds / whole
        metrics["step_seconds"] = statistics.median(self._backend.step_seconds or [0.0])
        return metrics

    def _accumulate(self, order: pb.Accumulate, outbox: Outbox) -> Generator[None, None, pb.AccumulateResult]:
        """Compute the gradients of the missing chunks up to a number, one per step of the iterator."""
        if self._profile_pending:
            yield from self._profile(order.iteration, outbox)
        begun, microbatches = time.monotonic(), 0
        for chunk in range(len(self._backend.streamed(order.iteration)) + 1, order.chunks + 1):
            microbatches += self._add_chunk(order.iteration, self._batches.fetch(order.iteration, chunk))
            yield
        return pb.AccumulateResult(
            iteration=order.iteration,
            chunks=order.chunks,
            microbatches=microbatches,
            seconds=time.monotonic() - begun,
        )

    def _add_chunks(self, iteration: int, chunks: Sequence[Sequence[pb.TrainSample]]) -> Generator[None, None, None]:
        """Compute the gradients of the chunks of a whole batch that are missing."""
        for chunk in missing(chunks, self._backend.streamed(iteration), iteration):
            self._add_chunk(iteration, chunk)
            yield

    def _add_chunk(self, iteration: int, samples: Sequence[pb.TrainSample]) -> int:
        chunk, _ = job_batch(self._job.spec, iteration, renumbered(samples), len(samples))
        return self._backend.accumulate(iteration, numbers_of(samples), chunk)

    def _profile(self, iteration: int, outbox: Outbox) -> Generator[None, None, dict[str, float]]:
        """Report the costs of this rank, and return a metric: the seconds of measuring."""
        self._profile_pending = False
        begun, start_ns = time.monotonic(), time.time_ns()
        document = yield from self._backend.profile_costs()
        end_ns = time.time_ns()
        costs = pb.TrainingCostsObservation(rank=self._rank, world_size=self._backend.world, document=document.text())
        outbox.span("train/profile", start_ns, end_ns, iteration)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, training_costs=costs))
        return {"train/profile_seconds": time.monotonic() - begun}

    def _observe_steps(self, iteration: int, outbox: Outbox) -> None:
        """Report the duration of every mini-batch, on the first rank."""
        if self._rank:
            return
        end_ns = time.time_ns()
        for number, seconds in enumerate(self._backend.step_seconds):
            step = pb.TrainStepObservation(number=number)
            start_ns = end_ns - int(seconds * 1e9)
            outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=iteration, train_step=step))

    def _leave_critics(self, command: pb.Command, work: Generator[None, None, Any], outbox: Outbox) -> None:
        self._running, self._half_done, self._paused = None, work, time.monotonic()
        self._answer(command, pb.TrainResult(critics_behind=True), outbox)

    def _finish_training(self, command: pb.Command, metrics: dict[str, float], outbox: Outbox) -> None:
        self._answer(command, pb.TrainResult(metrics=metrics), outbox)

    def _answer(self, command: pb.Command, result: pb.TrainResult, outbox: Outbox) -> None:
        iteration, spec = command.train.iteration, self._job.spec
        result.iteration, result.version = iteration, iteration + 1
        self._version, self._last = result.version, result
        shown = spec.samples.due(iteration, command.train.iterations or spec.iterations)
        if not self._rank and shown and (advantages := self._backend.sample_advantages):
            result.advantages.CopyFrom(pack(np.array(advantages, dtype=np.float32)))
            result.shaped_rewards.CopyFrom(pack(np.array(self._backend.sample_rewards, dtype=np.float32)))
        outbox.done(pb.CommandDone(command_id=command.id, train=result))

    @property
    def _critics(self) -> set[str]:
        return set(self._backend.models) - {graph_of(self._job.spec).policy}

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
        if self._changes_weights or self._half_done is not None:
            raise WorkError("WrongVersion", "saveCheckpoint came to a rank that is training", retryable=True)
        start = time.time_ns()
        folder = Path(command.save_checkpoint.folder)
        files = self._backend.save(folder, self._version)
        outbox.span("checkpoint", start, time.time_ns(), command.save_checkpoint.iteration)
        outbox.done(pb.CommandDone(command_id=command.id, checkpoint=pb.CheckpointResult(files=files)))


class SpanBuffer:
    """Buffers the trainer's spans until the next `flush`."""

    def __init__(self) -> None:
        self.iteration = 0
        self._spans: list[tuple[str, int, int, dict[str, str]]] = []

    def __call__(self, name: str, start_ns: int, end_ns: int, **attributes: str) -> None:
        self._spans.append((name, start_ns, end_ns, attributes))

    def flush(self, outbox: Outbox) -> None:
        """Move everything to the outbox."""
        for name, start_ns, end_ns, attributes in self._spans:
            outbox.span(name, start_ns, end_ns, self.iteration, **attributes)
        self._spans.clear()


# ---------------------------------------------------------------- building


def build(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> TrainingRole:
    """Return the role for a BecomeTraining: stages loaded, group formed, state restored."""
    settings = read_settings(os.environ)
    wait = float(job.spec.run_policy.start_timeout_seconds)
    batches = CoordinatorBatches(settings.coordinator, settings.worker, certificates, wait)
    become, spans = command.become_training, SpanBuffer()
    profile = job.spec.training.profile == "Auto" and become.group_epoch == FIRST_GROUP
    return TrainingRole(
        job, build_backend(job, become, device, spans), batches, become.version, spans, rank=become.rank,
        profile=profile,
    )  # fmt: skip
