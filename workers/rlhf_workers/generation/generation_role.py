"""The generation role of a worker: commands in, progress and finished samples out, an engine in between.

Rule: speaks the wire on one side and `engine.Engine` on the other, and decides nothing about decoding. Every token
goes out within a quarter of a second of its step, so a lost worker costs that much work; a finished sample goes out at
once. Must never answer a command twice, and never report a sample that was withdrawn or given back. When the process
dies here, the coordinator goes on from the tokens it was told.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJob
from rlhf_api.names import ExitCode
from rlhf_api.samples import ResponsePart
from rlhf_workers import weights
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import Engine, EngineError, MeasuresCosts, Sleeps
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.migration.incoming import IncomingMigrations
from rlhf_workers.generation.migration.outgoing import OutgoingMigrations
from rlhf_workers.generation.step_observations import Activity
from rlhf_workers.models import load_tokenizer
from rlhf_workers.sample_codec import finished_message, key_of, progress_message, request_of
from rlhf_workers.worker_role import Outbox

PROGRESS_NS: Final = 250_000_000
"""Between progress messages: what a lost worker costs, at four small messages a second a sample."""
ACTOR: Final = GENERATE.model
ACTOR_FIELD: Final = f"{ACTOR.manifest_path}.path"
EXIT_CODES: Final = {"PromptLength": ExitCode.BAD_DATA, "TokenOutsideVocabulary": ExitCode.BAD_DATA}


class Fetch(Protocol):
    """`weights.fetch`: all tensors of a model at a version, or WorkError."""

    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> dict[str, torch.Tensor]: ...


class GenerationRole:
    """Implements `WorkerRole`."""

    name: str = "generation"
    handles: frozenset[str] = frozenset({"generate", "withdraw", "load_weights", "migrate", "measure", "offload"})

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        certificates: Path | None = None,
        *,
        fetch: Fetch = weights.fetch,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._certificates = certificates
        self._fetch = fetch
        self._clock_ns = clock_ns
        self._activity = Activity()
        self._migrations = OutgoingMigrations(engine, certificates, clock_ns)
        self.receiver = IncomingMigrations(engine, clock_ns)
        """See ReceivesSamples."""
        self._progress_ns = clock_ns()
        self._iteration = 0
        self._measuring: Iterator[pb.CommandDone | None] | None = None
        self._offloaded = False

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """See WorkerRole; every command but Migrate and Measure is answered before this returns."""
        done = pb.CommandDone(command_id=command.id)
        try:
            match command.WhichOneof("command"):
                case "generate":
                    self._generate(command.generate, outbox)
                case "withdraw":
                    done.withdraw.CopyFrom(self._withdraw(command.withdraw))
                case "load_weights":
                    done.load.CopyFrom(self.load(command.load_weights, outbox))
                case "offload":
                    if not self._engine.held:
                        self._sleep()
                case "measure":
                    if not isinstance(self._engine, MeasuresCosts):
                        raise WorkError("NotMeasurable", "this worker's engine does not say what its work costs")
                    self._measuring = self._measure(self._engine, command)
                    return
                case "migrate":
                    self._migrations.begin(command.id, command.migrate, outbox)
                    return
                case other:
                    raise WorkError("WrongRole", f"the generation role does not take the command {other}")
        except EngineError as error:
            raise _work_error(error) from error
        outbox.done(done)

    def step(self, outbox: Outbox) -> bool:
        """See WorkerRole: what moves is moved on, one engine step, and the messages that are due."""
        moved = self._migrations.step()
        if self._measuring is not None:
            done = next(self._measuring)
            if done is not None:
                self._measuring = None
                outbox.done(done)
            return True
        if not self._engine.held:
            self._activity.flush(outbox)
            return moved
        start_ns = self._clock_ns()
        try:
            report = self._engine.step()
        except EngineError as error:
            raise _work_error(error) from error
        end_ns = self._clock_ns()
        outbox.count(report.decoded)
        for response in report.finished:
            outbox.finished(finished_message(response, self._text(response)))
        if not 0 <= end_ns - self._progress_ns < PROGRESS_NS:
            self._progress_ns = end_ns
            for response in self._engine.progress():
                outbox.progress(progress_message(response))
        if not (report.decoded or report.prefilled or report.finished):  # all that is held is on its way out
            return moved
        self._activity.add(report, self._iteration, start_ns, end_ns, outbox)
        return True

    def give_back(self) -> list[pb.SampleProgress]:
        """See WorkerRole; what is on its way out or in is not moved."""
        self._migrations.stop(None, "the source's session broke")
        self.receiver.clear()
        return [progress_message(response) for response in self._engine.withdraw()]

    def versions(self) -> Mapping[str, int]:
        """See WorkerRole."""
        return {ACTOR: self._engine.version}

    def active(self) -> int:
        """See WorkerRole."""
        return self._engine.held

    def offload(self) -> None:
        """See WorkerRole: weights to host memory, key-value cache gone."""
        self._sleep()
        self._offloaded = True

    def close(self) -> None:
        """See WorkerRole."""
        self.give_back()
        self._sleep()

    def load(self, command: pb.LoadWeights, outbox: Outbox | None) -> pb.LoadResult:
        """Fetches and loads a version of the actor, whole or not at all."""
        if command.model != ACTOR:
            raise WorkError("WrongModel", f"the generation role holds the actor, not {command.model!r}")
        start_ns = self._clock_ns()
        tensors = self._fetch(command.model, command.version, command.sources, self._certificates)
        self._migrations.stop(None, f"weight version {command.version} was loaded on the source")
        size = self._engine.load_weights(tensors, command.version)
        end_ns = self._clock_ns()
        if outbox is not None:
            self._activity.flush(outbox)
            outbox.span("load-weights", start_ns, end_ns, command.version, bytes=str(size))
        return pb.LoadResult(version=command.version, bytes=size, seconds=(end_ns - start_ns) / 1e9)

    def _generate(self, command: pb.Generate, outbox: Outbox) -> None:
        requests = [request_of(sample) for sample in command.samples]
        self._onload(outbox)
        self._engine.submit(requests)
        iteration = max((request.key.iteration for request in requests), default=self._iteration)
        if iteration != self._iteration:
            self._iteration = iteration
            self.receiver.begin_iteration(iteration)

    def _sleep(self) -> None:
        if isinstance(self._engine, Sleeps):
            self._engine.sleep()

    def _onload(self, outbox: Outbox) -> None:
        if not isinstance(self._engine, Sleeps):
            return
        if not self._offloaded:
            self._engine.wake()
            return
        start_ns = self._clock_ns()
        self._engine.wake()
        self._offloaded = False
        end_ns = self._clock_ns()
        outbox.span("onload/generation", start_ns, end_ns, self._iteration)
        onload = pb.OnloadObservation(role=self.name)
        outbox.observe(pb.Observation(start_ns=start_ns, end_ns=end_ns, iteration=self._iteration, onload=onload))

    def _measure(self, engine: MeasuresCosts, command: pb.Command) -> Iterator[pb.CommandDone | None]:
        """Yield None while it goes on, then the answer."""
        costs = yield from engine.measure()
        message = pb.GenerationCosts(
            kv_bytes_per_token=costs.kv_bytes_per_token,
            kv_room_bytes=costs.kv_room_bytes,
            max_batch_size=costs.max_batch_size,
            replays=costs.replays,
        )
        for kind, points in (("decode", costs.decode), ("prefill", costs.prefill)):
            getattr(message, kind).extend(pb.StepCost(**point._asdict()) for point in points)
        result = pb.MeasureResult(measurement_id=command.measure.measurement_id, generation=message)
        yield pb.CommandDone(command_id=command.id, measure=result)

    def _withdraw(self, command: pb.Withdraw) -> pb.WithdrawResult:
        keys = [key_of(key) for key in command.keys]
        self._migrations.stop(keys, "it was withdrawn")
        self.receiver.fence(keys)
        return pb.WithdrawResult(samples=[progress_message(response) for response in self._engine.withdraw(keys)])

    def _text(self, response: ResponsePart) -> str:
        return str(self._tokenizer.decode(response.tokens.tolist(), skip_special_tokens=True))


def build(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> GenerationRole:
    """Loads the policy and its engine; WorkError when the folder, the engine's arguments or the sizes do not fit."""
    path = job.spec.models.actor.path
    tokenizer = load_tokenizer(path, ACTOR_FIELD)
    role = GenerationRole(build_engine(job.spec, tokenizer, device), tokenizer, certificates)
    wanted = command.become_generation.weights
    if wanted.version or any(location.folder != path for location in wanted.sources):
        role.load(wanted, None)
    return role


def _work_error(error: EngineError) -> WorkError:
    code = EXIT_CODES.get(error.reason, ExitCode.FAILED)
    return WorkError(error.reason, str(error), field=error.field, exit_code=code)
