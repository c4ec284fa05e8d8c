"""The training half of a simulated worker, the pace of workers, and their injected faults.

"Weights" are a hash chain over the batches a rank trained on. Ranks meet in a `Collective` before they finish a Train,
as real ones do: when one dies, the others hang until the coordinator ends them.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.support.coordinator.simulated_results import next_weights

from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub

RECONNECT_SECONDS = 0.05


@dataclass
class Collective:
    """Meeting point of the simulated ranks of a job."""

    size: int
    arrived: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def meet(self, group_epoch: int, iteration: int, rank: int) -> None:
        """Return when all ranks of the group have arrived; otherwise never."""
        async with self.changed:
            arrived = self.arrived.setdefault((group_epoch, iteration), set())
            arrived.add(rank)
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(arrived) == self.size)


@dataclass
class Pace:
    """Speed and injected faults of a simulated worker."""

    tick_seconds: float = 0.005
    tokens_per_tick: int = 8
    score_seconds: float = 0.0
    token_seconds: float = 0.0
    """Seconds for each token that was not scored early; workers with a value above 0 report their passes."""
    train_seconds: float = 0.01
    part_seconds: tuple[float, float, float] | None = None
    """Seconds to train a token, instead of `train_seconds`: all models at once, the policy alone, the others alone.
    Ranks report these times instead of measured ones.
    """
    training_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of every training besides its loss."""
    progress_seconds: float = 0.02
    fail_decode: Callable[[str, pb.SampleKey], str | None] | None = None
    """(worker, sample) -> "refused" (the worker releases it and reports that) or "crashed" (its process ends)."""
    fail_checkpoint: Callable[[], pb.Failure | None] | None = None
    """Returns the failure to answer instead of a checkpoint."""
    fail_score: Callable[[pb.ScoreSample, str, int], pb.ScoredSample | None] | None = None
    """(sample, task, earlier tries that arrived) -> answer instead of the result."""
    fail_measure: Callable[[int, pb.Measure], pb.Failure | None] | None = None
    """(rank, command) -> answer instead of measured times."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Schedule -> measured seconds of a mini-batch."""
    most_prefixes: int = 1000
    """Number of unfinished samples that a worker has room for."""
    transfer_seconds: float = 0.0
    """Seconds of a Migrate, for all its samples."""
    receipt_seconds: float = 0.0
    """Seconds from the destination's report of a sample until the paused source receives its receipt."""
    fail_migrate: Callable[[str, pb.MigrateSample], str | None] | None = None
    """(source, sample) -> "refused" (the destination lacks it) or "unheard" (it has it, but the receipt is lost)."""
    draft_acceptance: float | None = None
    """Share of accepted draft tokens of workers that report drafts; None if they report none."""


class SimulatedRank:
    """The behaviour of a simulated worker as a rank of a training group."""

    name: str
    index: int
    coordinator: str
    certificates: Path | None
    pace: Pace
    collective: Collective | None
    roles: set[str]
    trained_version: int
    trained_models: list[str]
    weights: str
    group_epoch: int
    number: int
    schedule: str
    schedules: list[str]
    lengths: list[int]
    trained: list[tuple[int, int, int]]
    last_train: pb.TrainResult | None
    parts: list[tuple[int, int]]
    critics_seconds: float
    whole_result: pb.TrainResult
    _answer: pb.CommandDone | None
    _outbox: list[pb.WorkerMessage]

    def _on_become_training(self, order: pb.BecomeTraining, done: pb.CommandDone) -> None:
        assert not self.roles, "a rank joins one group in its life"
        self.roles, self.group_epoch = {"training"}, order.group_epoch
        self.weights = "initial"
        if order.checkpoint:
            self.weights = min(Path(order.checkpoint).glob("actor/*.safetensors")).read_text()
        table = json.loads(order.schedule)
        self.schedule = table["method"]
        self.trained_models = sorted({pipeline["model"] for pipeline in table["pipelines"]})
        self.trained_version = order.version

    async def _train(self, command_id: int, order: pb.Train) -> None:
        iteration = order.iteration
        self.parts.append((iteration, order.part))
        if order.part == pb.TRAIN_PART_CRITICS:
            await self._train_critics(command_id, iteration)
            return
        self.schedule = json.loads(order.schedule)["method"] if order.schedule else self.schedule
        self.schedules.append(self.schedule)
        self.lengths.append(order.iterations)
        assert self.trained_version == iteration, f"trains {iteration} at {self.trained_version}"
        samples: list[pb.TrainSample] | None = None
        while samples is None:
            samples = await self._fetch(iteration)
        apart = order.part == pb.TRAIN_PART_POLICY
        seconds = self._seconds(samples, 1 if apart else 0)
        await asyncio.sleep(seconds)
        if self.collective is not None:
            await self.collective.meet(self.group_epoch, iteration, self.index)
        self.weights = next_weights(self.weights, samples)
        self.trained_version = iteration + 1
        self.trained.append((self.number, self.group_epoch, iteration))
        result = pb.TrainResult(
            iteration=iteration,
            version=iteration + 1,
            metrics={"actor/loss": 1.0 / (iteration + 1), **self.pace.training_metrics},
        )
        if self.pace.part_seconds is not None:
            self.critics_seconds = self._seconds(samples, 2) if apart else 0.0
            result.metrics["train/seconds"] = seconds + self.critics_seconds
        if apart:
            self.whole_result = result
            result = pb.TrainResult(iteration=iteration, version=iteration + 1, critics_behind=True)
        self.last_train = result
        if self.index == 0:
            step = pb.Observation(end_ns=int(1e9 * self.pace.train_seconds), iteration=iteration)
            step.train_step.number = 0
            self._outbox.append(pb.WorkerMessage(observation=step))
        self._answer = pb.CommandDone(command_id=command_id, train=result)

    async def _train_critics(self, command_id: int, iteration: int) -> None:
        assert self.last_train is not None, "the policy comes first"
        assert self.last_train.critics_behind, "and the critics once"
        await asyncio.sleep(self.critics_seconds)
        self.last_train = self.whole_result
        self.last_train.metrics["critic_overlap_seconds"] = self.critics_seconds
        self._answer = pb.CommandDone(command_id=command_id, train=self.last_train)

    def _seconds(self, samples: list[pb.TrainSample], part: int) -> float:
        if self.pace.part_seconds is None:
            return self.pace.train_seconds
        tokens = sum(len(array.data) // 4 for sample in samples for array in (sample.prompt, sample.response))
        return self.pace.part_seconds[part] * tokens

    async def _fetch(self, iteration: int) -> list[pb.TrainSample] | None:
        """Fetch on a separate channel: training continues when the session and its channel are gone."""
        request = pb.FetchBatchRequest(worker=self.name, iteration=iteration)
        try:
            async with aio_channel(self.coordinator, self.certificates) as channel:
                parts = [part async for part in CoordinatorStub(channel).FetchBatch(request, wait_for_ready=True)]
        except grpc.RpcError:
            await asyncio.sleep(RECONNECT_SECONDS)
            return None
        samples = [sample for part in parts for sample in part.samples]
        assert len(samples) == parts[0].total
        return samples

    def _on_save_checkpoint(self, order: pb.SaveCheckpoint, done: pb.CommandDone) -> None:
        folder = Path(order.folder)
        failure = self.pace.fail_checkpoint() if self.pace.fail_checkpoint is not None else None
        if not folder.is_dir():  # another rank failed earlier, and the attempt is over
            done.failure.CopyFrom(pb.Failure(reason="StorageDenied", message=f"{folder}: No such file or directory"))
        elif failure is not None:
            (folder / "half-written").write_bytes(b"?")
            done.failure.CopyFrom(failure)
        else:
            done.checkpoint.CopyFrom(self._save(folder))

    def _save(self, folder: Path) -> pb.CheckpointResult:
        data = self.weights.encode()
        files = []
        for model in self.trained_models:
            path = folder / model / f"model-stage-{self.index:05d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            name = str(path.relative_to(folder))
            files.append(pb.CheckpointFile(path=name, bytes=len(data), sha256=digest, model=model, parameters=["w"]))
        return pb.CheckpointResult(files=files)
