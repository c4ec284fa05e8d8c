"""The answers to commands: a worker's new state, or the failure of a command and its consequence.

Rule: an answer to an unknown command changes nothing.
"""

import logging
import time
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_coordinator.fusion import fusion_planning, incremental_scoring, sample_moves
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop import sample_failures
from rlhf_coordinator.speculation import drafting_ahead
from rlhf_coordinator.state.worker import CommandKind, PendingCommand, Worker
from rlhf_coordinator.training import gradient_streaming, schedule_choice
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

log = logging.getLogger(__name__)

MAX_RETRY_SECONDS: Final = 10.0
"""Longest delay between retries of a failed command, in seconds."""

FINAL_EXIT_CODES: Final = frozenset({ExitCode.USER_CODE, ExitCode.BAD_MODEL, ExitCode.BAD_DATA, ExitCode.STORAGE})
"""Exit codes of a worker's failure outside any command that end the job, unless the failure is retryable."""


class CommandResults:
    """Processes the CommandDone messages of the workers of one job."""

    def __init__(self, run: JobRun, checkpoints: CheckpointSaver) -> None:
        self._run = run
        self._checkpoints = checkpoints

    def done(self, name: str, message: pb.CommandDone) -> None:
        """Process one answer, or, without a command id, the failure of a worker; ignore an unknown id.

        Raises ValueError for an invalid answer.
        """
        worker = self._run.state.fleet.workers[name]
        if not message.command_id:
            measurements.failed(self._run, worker, message.failure)
            self._take_worker_failure(worker, message.failure)
            return
        pending = worker.pending.pop(message.command_id, None)
        if pending is None:
            return
        measurements.failed(self._run, worker, message.failure)
        worker.last_progress = time.monotonic()
        if pending.kind is CommandKind.WITHDRAW:
            drafting_ahead.returned(self._run, message.withdraw)
        if pending.kind in (CommandKind.MIGRATE, CommandKind.WITHDRAW):
            sample_moves.take_answer(self._run, name, pending, message)
        elif message.HasField("failure"):
            self._failed(worker, pending, message.failure)
        else:
            worker.failures = 0
            self._run.totals.progressed()
            if message.WhichOneof("result") == "load":
                measurements.weights_loaded(self._run, worker, message.load)
            self._succeeded(worker, pending, message)
        self._run.wake()

    def _succeeded(self, worker: Worker, pending: PendingCommand, message: pb.CommandDone) -> None:
        context = self._run.context
        kind = message.WhichOneof("result")
        if kind == "measure" and pending.role == Group.TRAINING:
            schedule_choice.take_measurement(self._run, worker.name, message.measure)
        elif kind == "measure":
            fusion_planning.take_measured_costs(self._run, worker.name, pending.role, message.measure)
        elif kind == "train":
            worker.trained_version, worker.last_train = message.train.version, message.train
            if pending.kind is CommandKind.TRAIN:
                self._run.state.fleet.pace.trained(pending.sent, worker.last_progress)
        elif kind == "accumulate":
            gradient_streaming.accumulated(self._run, worker, message.accumulate)
        elif pending.kind is CommandKind.CHECKPOINT:
            self._checkpoints.written(worker.name, message.checkpoint)
        elif pending.kind is CommandKind.BECOME:
            worker.add_role(pending.role)
            if pending.role == Group.TRAINING:
                worker.trained_version = pending.version
            else:
                models = (context.graph.policy,) if pending.role == Group.GENERATION else context.scored_models
                worker.versions |= dict.fromkeys(models, pending.version)
        elif pending.kind is CommandKind.LOAD:
            worker.versions[pending.model] = pending.version
        elif kind == "load" and worker.group is Group.GENERATION:
            worker.versions[context.graph.policy] = message.load.version
        elif (
            pending.kind is CommandKind.UNKNOWN
            and not pending.from_ranks
            and worker.rank is not None
            and not worker.trains
        ):
            # It joined a group of an earlier coordinator; its version is unknown.
            message_text = "it joined a training group of an earlier coordinator"
            self._training_failed(worker, pb.Failure(message=message_text, exit_code=ExitCode.RESTART))

    def _failed(self, worker: Worker, pending: PendingCommand, failure: pb.Failure) -> None:
        log.warning("%s failed to %s: %s", worker.name, pending.detail, failure.message)
        self._run.event("command-failed", f"{worker.name} to {pending.detail}: {failure.message}", worker=worker.name)
        if pending.kind is CommandKind.CHECKPOINT:
            self._checkpoints.not_written(worker.name, failure)
        elif worker.rank is not None and self._of_rank(pending):
            if pending.kind is CommandKind.MEASURE and failure.exit_code != ExitCode.RESTART:
                schedule_choice.use_serial_schedule(
                    self._run, f"{worker.name} could not {pending.detail}: {failure.message}"
                )
            self._training_failed(worker, failure)
        elif pending.kind is CommandKind.MEASURE or (pending.role == Group.INFERENCE and self._can_do_without(worker)):
            fusion_planning.disable_fusion(self._run, f"{worker.name} could not {pending.detail}: {failure.message}")
        elif pending.kind is CommandKind.SCORE_PREFIX:
            incremental_scoring.prefix_refused(self._run, worker.name, failure)
        elif pending.kind in (CommandKind.BECOME, CommandKind.LOAD, CommandKind.UNKNOWN):
            self._retry_later(worker, failure)
        else:
            # The worker may or may not have the samples of the command; a new session shows it.
            self._retry_later(worker, failure)
            self._run.sessions.end(worker.name)

    @staticmethod
    def _of_rank(pending: PendingCommand) -> bool:
        own = pending.role == Group.TRAINING or pending.kind is CommandKind.ACCUMULATE
        return own or (pending.kind is CommandKind.UNKNOWN and not pending.from_ranks)

    def _can_do_without(self, worker: Worker) -> bool:
        """Return whether scoring can do without the worker: it generates, and there are inference workers."""
        return worker.group is Group.GENERATION and bool(self._run.state.fleet.sizes.get(Group.INFERENCE))

    def _take_worker_failure(self, worker: Worker, failure: pb.Failure) -> None:
        """Process a failure outside any command that ends the worker; end the job if its exit code is final."""
        log.error("%s ends: %s", worker.name, failure.message)
        self._run.event("worker-failed", f"{worker.name}: {failure.message}", worker=worker.name)
        if failure.reason not in sample_failures.WEIGHTS_FAULTS:
            sample_failures.worker_ended(self._run, worker, failure.message)
        worker.blameless = True
        if not failure.retryable and failure.exit_code in FINAL_EXIT_CODES:
            self._run.state.failure = failure
            self._run.wake()

    def _training_failed(self, worker: Worker, failure: pb.Failure) -> None:
        worker.train_failure, worker.failed_at = failure, time.monotonic()

    def _retry_later(self, worker: Worker, failure: pb.Failure) -> None:
        worker.failures += 1
        if not failure.retryable or worker.failures > self._run.context.spec.run_policy.backoff_limit:
            self._run.state.failure = failure
        worker.not_before = time.monotonic() + min(MAX_RETRY_SECONDS, 0.5 * 2.0**worker.failures)
