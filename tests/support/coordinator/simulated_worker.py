"""A worker without models: a real gRPC client that follows the control plane and computes deterministic fake results.

Tokens are a function of (random key, position), scores of the tokens, and "weights" are a hash chain over the batches a
rank trained on. So the final weights of a run prove that every sample was trained on once, in its iteration, despite
all kills: `expected_weights` computes them without any worker. Ranks meet in a `Collective` before they finish a Train,
as real ones do: when one dies, the others hang until the coordinator ends them.
"""

import asyncio
import contextlib
import itertools
import json
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from tests.support.coordinator.simulated_rank import RECONNECT_SECONDS, Collective, Pace, SimulatedRank
from tests.support.coordinator.simulated_samples import SimulatedSamples

from rlhf_api.protocol import PROTOCOL
from rlhf_common import control_pb2 as pb
from rlhf_common.channels import aio_channel
from rlhf_common.control_pb2_grpc import CoordinatorStub
from rlhf_common.names import Group, worker_name
from rlhf_common.worker_roles import write_roles

if TYPE_CHECKING:
    from rlhf_common.control_pb2_grpc import CoordinatorAsyncStub

Call = grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.CoordinatorMessage]


class SimulatedWorker(SimulatedSamples, SimulatedRank):
    """One worker; `run` covers any number of processes (incarnations) and sessions."""

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
        self.device, self.device_memory = "cpu", 0
        self.protocol = PROTOCOL
        self.learns_siblings = False
        self.siblings: list[pb.SiblingTokens] = []
        """Sibling tokens that it received as draft hints."""
        self.job = ""
        """Job of its Welcome message."""
        self.exits: list[pb.Exit] = []
        self.refusals: list[str] = []
        self.registered = 0
        self.trained: list[tuple[int, int, int]] = []
        """(incarnation number, group epoch, iteration) of every Train this worker finished."""
        self.schedules: list[str] = []
        """Method of the table of every Train."""
        self.lengths: list[int] = []
        self.schedule = ""
        self.offloads: list[str] = []
        self.clashes: list[str] = []
        """Commands to one role that arrived while the other was working; a worker that is also a rank takes turns."""
        self.measures = 0
        self.address = f"simulated:{self.name}"
        self._peers[f"{coordinator}/{self.address}"] = self
        self.decoded, self.scored, self.prefixes = {}, [], 0
        self._kill = asyncio.Event()
        self._drop = asyncio.Event()
        self._gone = False
        self._fresh_process()

    # ---------------------------------------------------------------- faults

    def kill(self) -> None:
        """Let the process die (kill -9) and start a new one."""
        self._kill.set()

    def leave(self) -> None:
        """End the process permanently."""
        self._gone = True
        self._kill.set()

    def drop_session(self) -> None:
        """Break the stream; the process continues."""
        self._drop.set()

    # ---------------------------------------------------------------- life

    def _fresh_process(self) -> None:
        self.number = next(self._incarnations)
        self.roles: set[str] = set()
        self.versions: dict[str, int] = {}
        self.trained_version, self.trained_models = 0, []
        self.weights = ""
        self.group_epoch = 0
        self.last_train: pb.TrainResult | None = None
        self.parts: list[tuple[int, int]] = []
        self.critics_seconds, self.whole_result = 0.0, pb.TrainResult()
        self._running = 0
        self._answer: pb.CommandDone | None = None
        self._hold_nothing()
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until told to exit with another code than 75; return that code."""
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
            if code != 75 or self._gone:
                return code
            self._fresh_process()
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _live(self) -> int:
        while True:
            # One channel per session, as in a real worker: its certificates may have been renewed.
            async with aio_channel(self.coordinator, self.certificates) as channel:
                code = await self._session(CoordinatorStub(channel))
            if code is not None:
                return code
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _session(self, stub: "CoordinatorAsyncStub") -> int | None:
        call = stub.Session()
        ticking = None
        self._drop.clear()
        try:
            await call.write(pb.WorkerMessage(register=self._register()))
            self._give_back()
            message: Any = await call.read()
            if message is grpc.aio.EOF:
                return None
            self.registered += 1
            self.job = message.welcome.job
            ticking = asyncio.create_task(self._tick(call, message.welcome.heartbeat_seconds))
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.command.HasField("exit"):
                    self.exits.append(message.command.exit)
                    return int(message.command.exit.code)
                if message.HasField("siblings"):
                    self.siblings.append(message.siblings)
                else:
                    self._obey(message.command)
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
            versions=self.versions,
            trained_version=self.trained_version,
            group_epoch=self.group_epoch,
            busy=self._running != 0,
            command_id=self._running,
            command="train" if self._running else "",
            last_train=self.last_train,
        )
        write_roles(state, self.roles)
        progress = [self._progress(item, 0) for item in self._decoding.values()]
        return pb.Register(
            worker=self.name,
            group=self.group.value,
            index=self.index,
            incarnation=f"{self.name}#{self.number}",
            address=self.address,
            rendezvous=f"simulated:{self.number}",
            device=self.device,
            device_memory_bytes=self.device_memory,
            state=state,
            held=progress,
            protocol=self.protocol,
            accumulates=True,
            draws_by_request=True,
        )

    def _give_back(self) -> None:
        for task in self._moving:
            task.cancel()
        self._decoding.clear()
        self._scores.clear()
        self._to_score.clear()
        self._begun.clear()
        self._outbox.clear()

    # ---------------------------------------------------------------- work

    async def _tick(
        self, call: grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.CoordinatorMessage], heartbeat_seconds: float
    ) -> None:
        beat = progress = 0.0
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while True:
                if self._drop.is_set():
                    call.cancel()
                    return
                now = time.monotonic()
                if now >= beat:
                    busy = pb.Heartbeat(active_samples=len(self._decoding), tokens=self._tokens, busy_seconds=now)
                    busy.learns_siblings = self.learns_siblings
                    self._outbox.append(pb.WorkerMessage(heartbeat=busy))
                    beat = now + heartbeat_seconds
                if now >= progress and self._decoding and self.pace.draft_acceptance is not None:
                    self._outbox.append(pb.WorkerMessage(observation=_drafted(self.pace.draft_acceptance)))
                self._decode(report=now >= progress)
                progress = now + self.pace.progress_seconds if now >= progress else progress
                self._score()
                self._score_slowly(now)
                if self._answer is not None:
                    self._outbox.append(pb.WorkerMessage(done=self._answer))
                    self._answer, self._running = None, 0
                if self._outbox:
                    messages, self._outbox = self._outbox, []
                    await call.write(pb.WorkerMessage(batch=pb.Batch(messages=messages)))
                await asyncio.sleep(self.pace.tick_seconds)
        # No more messages can be written, so a new session begins, as in a real worker.
        self._drop.set()
        call.cancel()

    # ---------------------------------------------------------------- commands

    def _obey(self, command: pb.Command) -> None:
        kind = str(command.WhichOneof("command"))
        self._watch_turns(kind)
        if kind == "train":
            self._start(command.id, self._train(command.id, command.train))
            return
        if kind == "migrate":
            self._moving.add(self._start(0, self._migrate(command.id, command.migrate)))
            return
        done = pb.CommandDone(command_id=command.id)
        getattr(self, f"_on_{kind}")(getattr(command, kind), done)
        self._outbox.append(pb.WorkerMessage(done=done))

    def _watch_turns(self, kind: str) -> None:
        training, samples = kind in ("train", "become_training"), bool(self._decoding or self._scores or self._to_score)
        if samples if training else self._running and kind not in ("save_checkpoint", "offload", "withdraw"):
            self.clashes.append(kind)

    def _on_load_weights(self, order: pb.LoadWeights, done: pb.CommandDone) -> None:
        assert order.sources
        self.versions[order.model] = done.load.version = order.version
        done.load.bytes, done.load.seconds = 4096, self.pace.tick_seconds

    def _on_become_generation(self, order: pb.BecomeGeneration, done: pb.CommandDone) -> None:
        self._become("generation", [order.weights])

    def _on_become_inference(self, order: pb.BecomeInference, done: pb.CommandDone) -> None:
        self.versions |= {"critic": 0} if "values" in order.tasks else {}
        self._become("inference", list(order.weights))

    def _on_offload(self, order: pb.Offload, done: pb.CommandDone) -> None:
        self.offloads.append(order.role)

    def _start(self, command_id: int, work: "asyncio.Future[None] | object") -> "asyncio.Task[None]":
        self._running = command_id or self._running
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _become(self, role: str, loads: list[pb.LoadWeights]) -> None:
        assert all(load.sources for load in loads)
        self.roles.add(role)
        self.versions |= {load.model: load.version for load in loads}

    def _on_measure(self, order: pb.Measure, done: pb.CommandDone) -> None:
        self.measures += 1
        failure = self.pace.fail_measure(self.index, order) if self.pace.fail_measure is not None else None
        if failure is not None:
            done.failure.CopyFrom(failure)
            return
        done.measure.measurement_id = order.measurement_id
        if order.role:
            self._measure_work(done.measure, order.role)
            return
        times = {"forward": 0.1, "backward": 0.2, "input_gradient": 0.1, "weight_gradient": 0.1}
        for schedule in order.schedules:
            seconds = self.pace.step_seconds[json.loads(schedule)["method"]]
            done.measure.tables.add(seconds=[seconds] * order.rounds)
        if not order.schedules:
            for model, stage in (("actor", self.index), ("critic", 1 - self.index)):
                done.measure.stages.add(model=model, stage=stage, activation_bytes=1000, **times)

    def _measure_work(self, result: pb.MeasureResult, role: str) -> None:
        """Answer a measurement: steps take the same time for any number of samples; scores come one after the other."""
        pace = self.pace
        if role == "generation":
            step = pace.tick_seconds / pace.tokens_per_tick
            for batch in (1, 64):
                result.generation.decode.add(batch=batch, tokens=16, seconds=step)
            result.generation.kv_bytes_per_token, result.generation.max_batch_size = 100, 64
            return
        for task in ("reference", "values", "reward"):
            for batch in (1, 4):
                cost = pb.StepCost(batch=batch, tokens=16, seconds=batch * pace.score_seconds)
                result.scoring.tasks.add(task=task, costs=[cost])


def _drafted(acceptance: float) -> pb.Observation:
    """Return ten steps of one sample, each with a hundred drafted tokens."""
    tokens = 1000
    count = pb.DraftCount(drafter="Ngram", drafted=tokens, judged=tokens, accepted=acceptance * tokens)
    learned = pb.LearnedDrafts(counts=[count])
    message = pb.SpeculationObservation(
        steps=10, drafted_steps=10, samples=10, tokens=10, seconds=0.01, learned=learned
    )
    return pb.Observation(start_ns=0, end_ns=1, speculation=message)


class Crew:
    """All simulated workers of a job, each as a task."""

    def __init__(self, workers: list[SimulatedWorker]) -> None:
        self.workers = workers
        self._tasks = [asyncio.create_task(worker.run()) for worker in workers]

    def __getitem__(self, name: str) -> SimulatedWorker:
        return next(worker for worker in self.workers if worker.name == name)

    def victims(self, seed: int) -> "itertools.cycle[SimulatedWorker]":
        """Yield workers in a random order, endlessly."""
        return itertools.cycle(random.Random(seed).sample(self.workers, len(self.workers)))

    async def end(self, seconds: float = 3.0) -> list[int]:
        """Return the exit codes; workers that are never told to exit are ended after `seconds` (-1)."""
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
    """Start all workers of a job; without a training group every generation worker has a rank."""
    ranks = Group.TRAINING if Group.TRAINING in counts else Group.GENERATION
    collective = Collective(counts[ranks])
    return Crew(
        [
            SimulatedWorker(
                group,
                index,
                coordinator,
                collective=collective if group is ranks else None,
                pace=pace,
                certificates=certificates,
            )
            for group, count in counts.items()
            for index in range(count)
        ]
    )
