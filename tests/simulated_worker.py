"""A worker without models: a real gRPC client that obeys the control plane and computes deterministic fake results.

Tokens are a function of (random key, position), scores of the tokens, and "weights" are a hash chain over the batches a
rank trained on. So the final weights of a run prove that every sample was trained on, once, in its iteration, whatever
was killed on the way: `expected_weights` computes them without any worker. Ranks meet in a `Collective` before they
finish a Train, as real ones do: when one dies, the others hang until they are told to exit.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from rlhf_api import control_pb2 as pb
from rlhf_api.channels import aio_channel
from rlhf_api.control_pb2_grpc import CoordinatorStub
from rlhf_api.names import Group, worker_name

RECONNECT_SECONDS = 0.05
VOCABULARY = 1000


def response_length(random_key: int, limit: int) -> int:
    """Tokens of a response: 1 .. limit."""
    return 1 + random_key % limit


def token(random_key: int, position: int) -> int:
    """Token at a position of the response."""
    digest = hashlib.blake2b(struct.pack("<QI", random_key, position), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def response(random_key: int, start: int, end: int) -> tuple[bytes, bytes]:
    """(tokens, log-probabilities) of positions start .. end-1, packed."""
    tokens = [token(random_key, position) for position in range(start, end)]
    return struct.pack(f"<{len(tokens)}i", *tokens), struct.pack(f"<{len(tokens)}f", *(-t / 1000 for t in tokens))


def score(task: str, tokens: bytes) -> bytes:
    """Result of a scoring task, packed: one number for a reward, else one a token."""
    numbers = struct.unpack(f"<{len(tokens) // 4}i", tokens)
    if task == "reward":
        return struct.pack("<f", sum(numbers) % 101 / 100)
    shift = 1 if task == "reference" else 2
    return struct.pack(f"<{len(numbers)}f", *(-(number + shift) / 1000 for number in numbers))


def next_weights(weights: str, samples: "list[pb.TrainSample]") -> str:
    """Weights after training on a batch."""
    digest = hashlib.sha256(weights.encode())
    for sample in samples:
        digest.update(sample.SerializeToString(deterministic=True))
    return digest.hexdigest()


@dataclass
class Collective:
    """Where the ranks of a group meet; shared by the simulated ranks of a job."""

    size: int
    arrived: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def meet(self, group_epoch: int, iteration: int, rank: int) -> None:
        """Returns when all ranks of the group are here; for ever otherwise."""
        async with self.changed:
            here = self.arrived.setdefault((group_epoch, iteration), set())
            here.add(rank)
            self.changed.notify_all()
            await self.changed.wait_for(lambda: len(here) == self.size)


@dataclass
class Pace:
    """How fast a simulated worker is, and how it misbehaves."""

    tick_seconds: float = 0.005
    tokens_per_tick: int = 8
    score_seconds: float = 0.0
    train_seconds: float = 0.01
    progress_seconds: float = 0.02
    fail_checkpoint: Callable[[], pb.Failure | None] | None = None
    """What to answer instead of a checkpoint."""
    fail_score: Callable[[pb.ScoreSample, str, int], pb.ScoredSample | None] | None = None
    """(sample, task, earlier tries here) -> what to answer instead of the result."""
    fail_measure: Callable[[int, pb.Measure], pb.Failure | None] | None = None
    """(rank, command) -> what to answer instead of measured times."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Schedule -> measured seconds of a mini-batch."""


@dataclass
class _Decoding:
    message: pb.GenerateSample
    length: int
    position: int
    reported: int


class SimulatedWorker:
    """One worker; `run` lives through any number of processes (incarnations) and sessions."""

    _incarnations = itertools.count(1)

    def __init__(
        self,
        group: Group,
        index: int,
        coordinator: str,
        *,
        collective: Collective | None = None,
        pace: Pace | None = None,
        certificates: Path | None = None,
    ) -> None:
        self.name = worker_name(group, index)
        self.group, self.index = group, index
        self.coordinator, self.certificates = coordinator, certificates
        self.pace = pace or Pace()
        self.collective = collective
        self.exits: list[pb.Exit] = []
        self.refusals: list[str] = []
        self.registered = 0
        self.trained: list[tuple[int, int, int]] = []
        self.schedules: list[str] = []
        """Method of the table of every Train."""
        self.schedule = ""
        self.measures = 0
        """(incarnation number, group epoch, iteration) of every Train this worker finished."""
        self._kill = asyncio.Event()
        self._drop = asyncio.Event()
        self._fresh_process()

    # ---------------------------------------------------------------- faults

    def kill(self) -> None:
        """The process dies (kill -9) and a new one is started."""
        self._kill.set()

    def drop_session(self) -> None:
        """The stream breaks; the process goes on."""
        self._drop.set()

    # ---------------------------------------------------------------- life

    def _fresh_process(self) -> None:
        self.number = next(self._incarnations)
        self.role = ""
        self.versions: dict[str, int] = {}
        self.weights = ""
        self.group_epoch = 0
        self.last_train: pb.TrainResult | None = None
        self._decoding: dict[tuple[int, int], _Decoding] = {}
        self._scores: list[tuple[pb.ScoreSample, str]] = []
        self._tries: dict[tuple[int, int, str], int] = {}
        self._running = 0
        self._answer: pb.CommandDone | None = None
        self._outbox: list[pb.WorkerMessage] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._tokens = 0

    async def run(self) -> int:
        """Until told to exit with another code than 75; returns that code."""
        while True:
            self._kill.clear()
            life = asyncio.create_task(self._live())
            death = asyncio.create_task(self._kill.wait())
            await asyncio.wait({life, death}, return_when=asyncio.FIRST_COMPLETED)
            death.cancel()
            code = life.result() if life.done() else 75
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            for task in self._tasks:
                task.cancel()
            if code != 75:
                return code
            self._fresh_process()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _live(self) -> int:
        async with aio_channel(self.coordinator, self.certificates) as channel:
            stub = CoordinatorStub(channel)
            while True:
                code = await self._session(stub)
                if code is not None:
                    return code
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _session(self, stub: CoordinatorStub) -> int | None:
        call = stub.Session()
        ticking = None
        self._drop.clear()
        try:
            await call.write(pb.WorkerMessage(register=self._register()))
            self._give_back()
            message = await call.read()
            if message is grpc.aio.EOF:
                return None
            self.registered += 1
            ticking = asyncio.create_task(self._tick(call, message.welcome.heartbeat_seconds))
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.command.HasField("exit"):
                    self.exits.append(message.command.exit)
                    return message.command.exit.code
                self._obey(message.command, stub)
            return None
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            if ticking is None and call.done():
                self.refusals.append(f"{await call.code()}: {await call.details()}")
            return None
        except asyncio.CancelledError:
            if self._drop.is_set():
                return None
            raise
        finally:
            if ticking is not None:
                ticking.cancel()
            call.cancel()
            self._outbox.clear()

    def _register(self) -> pb.Register:
        state = pb.WorkerState(
            role=self.role,
            versions=self.versions,
            group_epoch=self.group_epoch,
            busy=self._running != 0,
            command_id=self._running,
            last_train=self.last_train,
        )
        held = [self._progress(item, 0) for item in self._decoding.values()]
        return pb.Register(
            worker=self.name,
            group=self.group.value,
            index=self.index,
            incarnation=f"{self.name}#{self.number}",
            address=f"simulated:{7000 + self.index}",
            rendezvous=f"simulated:{self.number}",
            device="cpu",
            state=state,
            held=held,
        )

    def _give_back(self) -> None:
        self._decoding.clear()
        self._scores.clear()
        self._outbox.clear()

    # ---------------------------------------------------------------- work

    async def _tick(self, call: grpc.aio.StreamStreamCall, heartbeat_seconds: float) -> None:
        beat = progress = 0.0
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                if self._drop.is_set():
                    call.cancel()
                    return
                now = time.monotonic()
                if now >= beat:
                    busy = pb.Heartbeat(active_samples=len(self._decoding), tokens=self._tokens, busy_seconds=now)
                    self._outbox.append(pb.WorkerMessage(heartbeat=busy))
                    beat = now + heartbeat_seconds
                self._decode(report=now >= progress)
                progress = now + self.pace.progress_seconds if now >= progress else progress
                self._score()
                if self._answer is not None:
                    self._outbox.append(pb.WorkerMessage(done=self._answer))
                    self._answer, self._running = None, 0
                if self._outbox:
                    messages, self._outbox = self._outbox, []
                    await call.write(pb.WorkerMessage(batch=pb.Batch(messages=messages)))
                await asyncio.sleep(self.pace.tick_seconds)

    def _progress(self, item: _Decoding, start: int) -> pb.SampleProgress:
        message = item.message
        tokens, log_probabilities = response(message.random_key, start, item.position)
        count = item.position - start
        return pb.SampleProgress(
            key=message.key,
            offset=start,
            tokens=pb.Array(dtype="int32", shape=[count], data=tokens),
            log_probabilities=pb.Array(dtype="float32", shape=[count], data=log_probabilities),
            versions=[pb.VersionSpan(version=self.versions["actor"], tokens=count)],
        )

    def _decode(self, *, report: bool) -> None:
        for key, item in list(self._decoding.items()):
            before = item.position
            item.position = min(item.length, item.position + self.pace.tokens_per_tick)
            self._tokens += item.position - before
            if item.position == item.length:
                whole = self._progress(item, 0)
                finished = pb.FinishedSample(
                    key=item.message.key,
                    tokens=whole.tokens,
                    log_probabilities=whole.log_probabilities,
                    versions=whole.versions,
                    finish_reason="stop",
                    text=f"response of {item.length}",
                )
                self._outbox.append(pb.WorkerMessage(finished=finished))
                del self._decoding[key]
            elif report:
                self._outbox.append(pb.WorkerMessage(progress=self._progress(item, item.reported)))
                item.reported = item.position

    def _score(self) -> None:
        if not self._scores or self.pace.score_seconds:
            return
        for sample, task in self._scores:
            self._outbox.append(pb.WorkerMessage(scored=self._scored(sample, task)))
        self._scores.clear()

    def _scored(self, sample: pb.ScoreSample, task: str) -> pb.ScoredSample:
        tries = (sample.key.iteration, sample.key.sample, task)
        self._tries[tries] = self._tries.get(tries, 0) + 1
        if self.pace.fail_score is not None:
            instead = self.pace.fail_score(sample, task, self._tries[tries] - 1)
            if instead is not None:
                return instead
        data = score(task, sample.response.data)
        result = pb.Array(dtype="float32", shape=[len(data) // 4], data=data)
        return pb.ScoredSample(key=sample.key, task=task, result=result)

    # ---------------------------------------------------------------- commands

    def _obey(self, command: pb.Command, stub: CoordinatorStub) -> None:
        kind = command.WhichOneof("command")
        if kind == "train":
            self._start(command.id, self._train(command.id, command.train, stub))
            return
        done = pb.CommandDone(command_id=command.id)
        if kind == "generate":
            for sample in command.generate.samples:
                length = response_length(sample.random_key, sample.max_response_tokens)
                known = len(sample.tokens.data) // 4
                item = _Decoding(sample, length, known, known)
                self._decoding[sample.key.iteration, sample.key.sample] = item
        elif kind == "score":
            pairs = [(sample, task) for sample in command.score.samples for task in sample.tasks]
            if self.pace.score_seconds:
                self._start(0, self._score_slowly(pairs))
            else:
                self._scores += pairs
        elif kind == "load_weights":
            assert command.load_weights.sources
            self.versions[command.load_weights.model] = command.load_weights.version
            done.load.version = command.load_weights.version
        elif kind == "become_generation":
            self._become("generation", [command.become_generation.weights])
        elif kind == "become_inference":
            self._become("inference", list(command.become_inference.weights))
        elif kind == "become_training":
            self._join(command.become_training)
        elif kind == "measure":
            self._measure(done, command.measure)
        elif kind == "save_checkpoint":
            self._checkpoint(done, Path(command.save_checkpoint.folder))
        self._outbox.append(pb.WorkerMessage(done=done))

    def _start(self, command_id: int, work: "asyncio.Future[None] | object") -> None:
        self._running = command_id or self._running
        task = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _score_slowly(self, pairs: list[tuple[pb.ScoreSample, str]]) -> None:
        for sample, task in pairs:
            await asyncio.sleep(self.pace.score_seconds)
            self._outbox.append(pb.WorkerMessage(scored=self._scored(sample, task)))

    def _become(self, role: str, loads: list[pb.LoadWeights]) -> None:
        assert all(load.sources for load in loads)
        self.role = role
        self.versions = {load.model: load.version for load in loads}

    def _join(self, order: pb.BecomeTraining) -> None:
        assert not self.role, "a rank joins one group in its life"
        self.role, self.group_epoch = "training", order.group_epoch
        self.weights = "initial"
        if order.checkpoint:
            self.weights = min(Path(order.checkpoint).glob("actor/*.safetensors")).read_text()
        table = json.loads(order.schedule)
        self.schedule = table["method"]
        models = {pipeline["model"] for pipeline in table["pipelines"]}
        self.versions = dict.fromkeys(models, order.version)

    def _measure(self, done: pb.CommandDone, order: pb.Measure) -> None:
        self.measures += 1
        failure = self.pace.fail_measure(self.index, order) if self.pace.fail_measure is not None else None
        if failure is not None:
            done.failure.CopyFrom(failure)
            return
        done.measure.attempt = order.attempt
        times = {"forward": 0.1, "backward": 0.2, "input_gradient": 0.1, "weight_gradient": 0.1}
        for schedule in order.schedules:
            seconds = self.pace.step_seconds[json.loads(schedule)["method"]]
            done.measure.tables.add(seconds=[seconds] * order.rounds)
        if not order.schedules:
            for model, stage in (("actor", self.index), ("critic", 1 - self.index)):
                done.measure.stages.add(model=model, stage=stage, activation_bytes=1000, **times)

    async def _train(self, command_id: int, order: pb.Train, stub: CoordinatorStub) -> None:
        iteration = order.iteration
        self.schedule = json.loads(order.schedule)["method"] if order.schedule else self.schedule
        self.schedules.append(self.schedule)
        assert self.versions["actor"] == iteration, f"trains {iteration} at {self.versions}"
        samples: list[pb.TrainSample] | None = None
        while samples is None:
            samples = await self._fetch(iteration, stub)
        await asyncio.sleep(self.pace.train_seconds)
        if self.collective is not None:
            await self.collective.meet(self.group_epoch, iteration, self.index)
        self.weights = next_weights(self.weights, samples)
        self.versions = dict.fromkeys(self.versions, iteration + 1)
        self.trained.append((self.number, self.group_epoch, iteration))
        result = pb.TrainResult(
            iteration=iteration, version=iteration + 1, metrics={"actor/loss": 1.0 / (iteration + 1)}
        )
        self.last_train = result
        self._answer = pb.CommandDone(command_id=command_id, train=result)

    async def _fetch(self, iteration: int, stub: CoordinatorStub) -> list[pb.TrainSample] | None:
        request = pb.FetchBatchRequest(worker=self.name, iteration=iteration)
        try:
            parts = [part async for part in stub.FetchBatch(request, wait_for_ready=True)]
        except grpc.RpcError:
            await asyncio.sleep(RECONNECT_SECONDS)
            return None
        samples = [sample for part in parts for sample in part.samples]
        assert len(samples) == parts[0].total
        return samples

    def _checkpoint(self, done: pb.CommandDone, folder: Path) -> None:
        failure = self.pace.fail_checkpoint() if self.pace.fail_checkpoint is not None else None
        if failure is not None:
            (folder / "half-written").write_bytes(b"?")
            done.failure.CopyFrom(failure)
        else:
            done.checkpoint.CopyFrom(self._save(folder))

    def _save(self, folder: Path) -> pb.CheckpointResult:
        data = self.weights.encode()
        files = []
        for model in self.versions:
            path = folder / model / f"model-stage-{self.index:05d}.safetensors"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            name = str(path.relative_to(folder))
            files.append(pb.CheckpointFile(path=name, bytes=len(data), sha256=digest, model=model, parameters=["w"]))
        return pb.CheckpointResult(files=files)


class Crew:
    """All simulated workers of a job, each as a task."""

    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self.workers = workers
        self._tasks = [asyncio.create_task(worker.run()) for worker in workers]

    def __getitem__(self, name: str) -> SimulatedWorker:
        return next(worker for worker in self.workers if worker.name == name)

    def victims(self, seed: int) -> "itertools.cycle[SimulatedWorker]":
        """Workers in a random order, for ever."""
        return itertools.cycle(random.Random(seed).sample(self.workers, len(self.workers)))

    async def end(self, seconds: float = 3.0) -> list[int]:
        """Exit codes; workers that were never told to exit are ended after a moment (-1)."""
        done, waiting = await asyncio.wait(self._tasks, timeout=seconds)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return [task.result() if task in done else -1 for task in self._tasks]


def crew(
    counts: dict[Group, int],
    coordinator: str,
    *,
    pace: Pace | None = None,
    certificates: Path | None = None,
) -> Crew:
    """Starts all workers of a job."""
    collective = Collective(counts.get(Group.TRAINING, 0))
    return Crew(
        [
            SimulatedWorker(
                group,
                index,
                coordinator,
                collective=collective if group is Group.TRAINING else None,
                pace=pace,
                certificates=certificates,
            )
            for group, count in counts.items()
            for index in range(count)
        ]
    )
