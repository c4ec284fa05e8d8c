"""The generation role of a worker: takes commands, drives an engine, and reports progress and finished samples.

Rule: it makes no decision about decoding. It must never answer a command twice. If the process dies, the coordinator
continues from the reported tokens.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from prometheus_client.registry import Collector

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.model_files.text_tokens import response_text, text_ends
from rlhf_common.names import ExitCode
from rlhf_common.samples import ResponsePart, SampleKey, is_ahead
from rlhf_workers.devices.device import memory_in_use
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import (
    Engine,
    EngineError,
    MeasuresCosts,
    ReportsLoad,
    ServesMetrics,
    Sleeps,
    StepReport,
    TakesWeightsWhileOffloaded,
)
from rlhf_workers.generation.engine_choice import EngineChoice
from rlhf_workers.generation.engine_registry import build_engine, chosen_engine
from rlhf_workers.generation.engine_totals import EngineTotals, QueueTimes
from rlhf_workers.generation.environment.environment_calls import ENVIRONMENT_FAILURES
from rlhf_workers.generation.environment.environment_engine import HasEnvironment, with_environment
from rlhf_workers.generation.migration.incoming import IncomingMigrations
from rlhf_workers.generation.migration.outgoing import OutgoingMigrations
from rlhf_workers.generation.speculation.job_drafting import JobDrafting
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals
from rlhf_workers.generation.speculation.speculator import Speculates
from rlhf_workers.generation.step_observations import Activity
from rlhf_workers.generation.weight_updates import WeightUpdates
from rlhf_workers.models.loading import generation_config, load_tokenizer, model_folder
from rlhf_workers.sample_codec import finished_message, key_message, key_of, progress_message, request_of
from rlhf_workers.shared_memory.choice import borrowed_by
from rlhf_workers.weights.adapters import AdapterWeights, WeightFetcher, starts_elsewhere
from rlhf_workers.weights.fetching import fetch_weights
from rlhf_workers.worker_role import NO_VERSION, Outbox

log = logging.getLogger(__name__)

PROGRESS_NS: Final = 250_000_000
"""Least nanoseconds between two reports of the engine's progress, unless the clock is set back."""
ACTOR: Final = GENERATE.model
ACTOR_FIELD: Final = f"{ACTOR.manifest_path}.path"
EXIT_CODES: Final = {"PromptLength": ExitCode.BAD_DATA, "TokenOutsideVocabulary": ExitCode.BAD_DATA} | dict.fromkeys(
    ENVIRONMENT_FAILURES, ExitCode.USER_CODE
)


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
        weight_fetcher: WeightFetcher = fetch_weights,
        clock_ns: Callable[[], int] = time.time_ns,
        choice: EngineChoice | None = None,
        in_use: Callable[[], int] = lambda: 0,
        drafting: JobDrafting | None = None,
        ends: frozenset[int] | None = None,
    ) -> None:
        """`ends`: ids that are not text at the end of a response; None for the tokenizer's. `in_use` returns the bytes
        in use. `drafting` connects the engine's speculator with the job; None without one.
        """
        self._engine = engine
        self.engine_choice = choice
        """See engine_totals.MeasuresEngine."""
        self._tokenizer = tokenizer
        self._ends = text_ends(tokenizer) if ends is None else ends
        self._updates = WeightUpdates(engine, certificates, weight_fetcher)
        self._clock_ns = clock_ns
        self._activity = Activity()
        self._in_use = in_use
        self._drafting = drafting or JobDrafting()
        self.engine_totals = EngineTotals()
        """See engine_totals.MeasuresEngine."""
        self._queue_times = QueueTimes()
        self._migrations = OutgoingMigrations(engine, certificates, clock_ns)
        self.receiver = IncomingMigrations(engine, clock_ns)
        """See ReceivesSamples."""
        self._progress_ns = clock_ns()
        self._iteration = 0
        self._ahead: set[SampleKey] = set()
        """Samples in the engine that are decoded ahead."""
        self._measuring: Iterator[pb.CommandDone | None] | None = None
        self._offloaded = False

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        """See WorkerRole; Migrate and Measure are answered later."""
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
                    if not self._engine.in_flight:
                        self._sleep()
                case "measure":
                    if not isinstance(self._engine, MeasuresCosts):
                        raise WorkError("NotMeasurable", "this worker's engine does not measure its costs")
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
        """See WorkerRole: advance migrations, then run a part of a measurement or an engine step, and send what is
        due."""
        moved = self._migrations.step()
        if self._measuring is not None:
            done = next(self._measuring)
            if done is not None:
                self._measuring = None
                outbox.done(done)
            return True
        if not self._engine.in_flight or self._engine.version == NO_VERSION:  # NO_VERSION: samples wait for weights
            self._activity.flush(outbox)
            self._drafting.report(self._iteration, self._clock_ns(), outbox, idle=True)
            return moved
        start_ns = self._clock_ns()
        self._queue_times.step_begins(start_ns)
        try:
            report = self._engine.step()
        except EngineError as error:
            if error.key is None:
                raise _work_error(error) from error
            self._fail_sample(error.key, _work_error(error).failure, outbox)
            return True
        end_ns = self._clock_ns()
        ahead = bool(self._ahead)
        if isinstance(self._engine, ReportsLoad):
            self.engine_totals.load = self._engine.load
        if not ahead:
            outbox.count(report.decoded)
            self.engine_totals.add(report, end_ns - start_ns)
            self._queue_times.began(report.began, end_ns)
        self._report_samples(report, end_ns, outbox)
        if not (report.decoded or report.prefilled or report.finished):  # its samples are paused or wait
            return moved
        if ahead:  # such steps cost what others do, but are no work of the iteration
            self._activity.flush(outbox)
        else:
            self._activity.add(report, self._iteration, start_ns, end_ns, outbox)
        self._drafting.report(self._iteration, end_ns, outbox, idle=ahead)
        return True

    def _report_samples(self, report: StepReport, end_ns: int, outbox: Outbox) -> None:
        """Report the samples that a step finished and, if that is due, the progress of others."""
        for response in report.finished:
            self._ahead.discard(response.key)
            queued, drafted = self._queue_times.of_finished(response.key), self._drafting.of_finished(response.key)
            self._activity.finished(response.key, drafted)
            outbox.finished(finished_message(response, self._text(response), queued, drafted))
        if not 0 <= end_ns - self._progress_ns < PROGRESS_NS:
            self._progress_ns = end_ns
            for response in self._engine.progress():
                outbox.progress(progress_message(response))

    @property
    def learns_siblings(self) -> bool:
        """See DraftsBySiblings."""
        return self._drafting.learns_siblings

    @property
    def decodes_ahead(self) -> bool:
        """See DecodesAhead."""
        return self._drafting.decodes_ahead

    def learn(self, message: pb.SiblingTokens) -> None:
        """See DraftsBySiblings."""
        self._drafting.learn(message)

    @property
    def engine_registry(self) -> Collector | None:
        """See engine_totals.MeasuresEngine."""
        return self._engine.registry if isinstance(self._engine, ServesMetrics) else None

    @property
    def speculation_totals(self) -> SpeculationTotals | None:
        """See engine_totals.MeasuresEngine."""
        speculator = self._engine.speculator if isinstance(self._engine, Speculates) else None
        return None if speculator is None else speculator.totals

    def give_back(self) -> list[pb.SampleProgress]:
        """See WorkerRole; running migrations are stopped."""
        self._migrations.stop(None, "the source's session broke")
        self.receiver.clear()
        self._drafting.begin_session()
        self._ahead.clear()
        return [progress_message(response) for response in self._engine.withdraw()]

    def versions(self) -> Mapping[str, int]:
        """See WorkerRole."""
        return {ACTOR: self._engine.version, **self._updates.draft_versions}

    def active(self) -> int:
        """See WorkerRole."""
        return self._engine.in_flight

    @property
    def loads_while_offloaded(self) -> bool:
        """See LoadsWhileOffloaded; it depends on the engine."""
        takes = isinstance(self._engine, TakesWeightsWhileOffloaded) and self._engine.takes_weights_while_offloaded
        return self._offloaded and takes

    def offload(self) -> None:
        """See WorkerRole: let the engine sleep, if it can."""
        self._sleep()
        self._offloaded = True

    def close(self) -> None:
        """See WorkerRole."""
        self.give_back()
        self._sleep()
        if isinstance(self._engine, HasEnvironment):
            self._engine.close()

    def load(self, command: pb.LoadWeights, outbox: Outbox | None) -> pb.LoadResult:
        """Fetch and load a version of the actor, and of a draft model trained with it; see `WeightUpdates`."""
        if command.model != ACTOR:
            raise WorkError("WrongModel", f"the generation role holds the actor, not {command.model!r}")
        start_ns = self._clock_ns()
        with self._updates.fetched(command) as update:
            copy_ns = self._clock_ns()
            why = f"weight version {command.version} was loaded on the source"
            size = self._updates.load(command, update, partial(self._migrations.stop, None, why))
            end_ns = self._clock_ns()
        self._drafting.policy_changed()
        if outbox is not None:
            self._activity.flush(outbox)
            copied = f"{(end_ns - copy_ns) / 1e9:.4f}"
            outbox.span(
                "load-weights", start_ns, end_ns, command.version, bytes=str(size), way=update.ways, copy_seconds=copied
            )
            for way, count in update.bytes_by_way.items():
                outbox.moved(f"weights_{way}", count, (end_ns - start_ns) / 1e9)
        seconds, copy_seconds = (end_ns - start_ns) / 1e9, (end_ns - copy_ns) / 1e9
        return pb.LoadResult(version=command.version, bytes=size, seconds=seconds, copy_seconds=copy_seconds)

    def _generate(self, command: pb.Generate, outbox: Outbox) -> None:
        requests = [request_of(sample) for sample in command.samples]
        if self._engine.version == NO_VERSION:
            raise WorkError("NotReady", "the last update of the weights broke off half-way", retryable=True)
        self._onload(outbox)
        self._engine.submit(requests)
        self._ahead |= {request.key for request in requests if is_ahead(request.key.sample)}
        keys = [request.key for request in requests if request.key not in self._ahead]
        iteration = max((key.iteration for key in keys), default=self._iteration)
        if iteration != self._iteration:
            self._iteration = iteration
            self.receiver.begin_iteration(iteration)
            self._drafting.begin_iteration(iteration)
            self._queue_times.begin_iteration()
        self._queue_times.submitted(keys)

    def _sleep(self) -> None:
        if isinstance(self._engine, Sleeps):
            before = self._in_use()
            self._engine.sleep()
            self.engine_totals.slept(before - self._in_use())

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
        """Yield None during the measurement, then the answer."""
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

    def _fail_sample(self, key: SampleKey, failure: pb.Failure, outbox: Outbox) -> None:
        """Drop one sample and report its failure, so that the others continue."""
        self._migrations.stop([key], "decoding it failed")
        self.receiver.fence([key])
        self._ahead.discard(key)
        message = pb.FailedSample(key=key_message(key), failure=failure)
        for response in self._engine.withdraw([key]):
            message.progress.CopyFrom(progress_message(response))
        outbox.failed(message)

    def _withdraw(self, command: pb.Withdraw) -> pb.WithdrawResult:
        keys = [key_of(key) for key in command.keys]
        self._migrations.stop(keys, "it was withdrawn")
        self.receiver.fence(keys)
        self._ahead.difference_update(keys)
        return pb.WithdrawResult(samples=[progress_message(response) for response in self._engine.withdraw(keys)])

    def _text(self, response: ResponsePart) -> str:
        return response_text(self._tokenizer, response.tokens.tolist(), self._ends)


def build(job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> GenerationRole:
    """Return the role with the job's engine; load the command's weights unless they are those of the manifest's
    folder."""
    path = job.spec.models.actor.path
    tokenizer = load_tokenizer(path, ACTOR_FIELD)
    fetch = partial(fetch_weights, sharings=borrowed_by(job.spec, device), path_field=job.spec.models.path_field)
    weight_fetcher = AdapterWeights(job.spec, fetch)
    choice = chosen_engine(job.spec, device)
    log.info("the engine is %s", choice.words)
    engine = build_engine(job.spec, tokenizer, device)
    defaults = generation_config(model_folder(path, ACTOR_FIELD))
    ends = text_ends(tokenizer, defaults.eos_token_id, job.spec.rollout.stop_token_ids)
    if job.spec.rollout.environment is not None:
        engine = with_environment(engine, job.spec, tokenizer, ends)
    in_use = partial(memory_in_use, device)
    drafting = JobDrafting.for_engine(engine, job.spec, command.become_generation.learned)
    role = GenerationRole(
        engine,
        tokenizer,
        certificates,
        weight_fetcher=weight_fetcher,
        choice=choice,
        in_use=in_use,
        drafting=drafting,
        ends=ends,
    )
    wanted = command.become_generation.weights
    elsewhere = any(location.folder != path for location in wanted.sources) or starts_elsewhere(job.spec)
    if wanted.version or elsewhere:
        role.load(wanted, None)
    return role


def _work_error(error: EngineError) -> WorkError:
    code = EXIT_CODES.get(error.reason, ExitCode.FAILED)
    return WorkError(error.reason, str(error), field=error.field, exit_code=code)
