"""Dispatches each message of a worker to the module that processes it.

This module itself processes a worker that registers, is lost or leaves.
"""

import logging
import time
from collections.abc import Sequence

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.fusion import incremental_scoring, learning
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import task_named
from rlhf_coordinator.job.timeline_spans import record_worker_span
from rlhf_coordinator.loop import sample_failures, sample_handler
from rlhf_coordinator.loop.command_results import CommandResults
from rlhf_coordinator.loop.device_memory_check import DeviceMemory
from rlhf_coordinator.loop.message_checks import check_message, check_registration
from rlhf_coordinator.loop.sample_sets import sample_sets
from rlhf_coordinator.speculation import drafting_ahead, learned, sharing
from rlhf_coordinator.state.fleet import Joined, Refused
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.sample_codec import response_of
from rlhf_coordinator.training import measured_costs
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

log = logging.getLogger(__name__)


class EventHandlers:
    """Applies the messages of workers to one job."""

    def __init__(self, run: JobRun, checkpoints: CheckpointSaver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._command_results = CommandResults(run, checkpoints)
        self._memory = DeviceMemory(run.context)

    # ---------------------------------------------------------------- sessions

    def register(self, message: pb.Register, session: int) -> Joined | Refused:
        """Register a worker's session, and revoke its former leases.

        Return the worker, or the reason for refusing it. Raises ValueError for an invalid message.
        """
        run = self._run
        check_registration(run.state.fleet.workers.get(message.worker), message, run.context.spec.iterations)
        brought = [(item.key, response_of(item.tokens, item.log_probabilities, item.versions)) for item in message.held]
        before = run.state.fleet.workers.get(message.worker)
        blameless = before is not None and before.blameless
        result = run.state.fleet.register(message, session, time.monotonic())
        if isinstance(result, Refused):
            run.event("worker-refused", result.reason, worker=message.worker)
            return result
        if result.restarted and not blameless:
            sample_failures.worker_ended(run, result.worker, "its process ended without a report")
            result.worker.blameless = False  # a new process
        self._reclaim(message.worker, brought)
        run.state.group_epoch = max(run.state.group_epoch, result.worker.group_epoch)
        self._checkpoints.lost(message.worker)
        run.state.failure = run.state.failure or self._memory.problem(message, result.worker.rank)
        kind = "worker-restarted" if result.restarted else "worker-registered"
        run.event(kind, f"{message.worker} registered from process {message.pid}", worker=message.worker)
        run.wake()
        return result

    def closed(self, worker: str, session: int) -> None:
        """Record that a session ended."""
        if self._run.state.fleet.closed(worker, session, time.monotonic()):
            self._run.wake()

    def expire(self, now: float) -> None:
        """Mark workers as lost that are away or silent for too long, or that left, and revoke their leases.

        `now`: seconds of the monotonic clock.
        """
        run = self._run
        for worker in run.state.fleet.expire(now):
            sample_failures.worker_ended(run, worker, "it was lost without a report")
            queued, scores = self._reclaim(worker.name)
            self._checkpoints.lost(worker.name)
            run.sessions.end(worker.name)
            wanted = worker.index < run.state.fleet.sizes[worker.group]
            run.totals.lost[worker.group] += wanted
            kind, how = ("worker-lost", "is lost") if wanted else ("worker-left", "has left, because its group shrank")
            text = f"{worker.name} {how}; {queued} samples and {scores} scores go back"
            log.log(logging.WARNING if wanted else logging.INFO, text)
            run.event(kind, text, worker=worker.name)

    def _reclaim(self, worker: str, brought: Sequence[tuple[pb.SampleKey, PackedResponse]] = ()) -> tuple[int, int]:
        """Revoke the leases of a lost or reconnecting worker; return the numbers of samples and of scoring tasks.

        `brought`: the responses that arrive with its new session; the ledgers may keep their tokens.
        """
        run, queued, tasks = self._run, 0, 0
        for samples in sample_sets(run):
            own = [(samples.index(key), key.attempt, response) for key, response in brought]
            keep = {
                index: (attempt, response)
                for index, attempt, response in own
                if index is not None and samples.ledger.continued_by(index, response)
            }
            released = samples.ledger.reclaim(worker, keep)
            queued, tasks = queued + len(released.queued), tasks + len(released.tasks)
            sample_failures.settle(run, samples)
        run.totals.returned += queued
        incremental_scoring.worker_lost(run, worker)
        sharing.worker_lost(run, worker)
        drafting_ahead.worker_lost(run, worker)
        return queued, tasks

    # ---------------------------------------------------------------- messages

    def message(self, worker: str, message: pb.WorkerMessage) -> None:
        """Process one message. Raises ValueError for an invalid one."""
        if message.WhichOneof("message") != "batch":
            self._handle(worker, message)
            return
        for item in message.batch.messages:
            self._handle(worker, item)

    def _handle(self, worker: str, message: pb.WorkerMessage) -> None:
        run = self._run
        run.totals.messages += 1
        check_message(worker, message)
        match message.WhichOneof("message"):
            case "progress":
                sample_handler.progressed(run, worker, message.progress)
            case "finished":
                sample_handler.finished(run, worker, message.finished)
            case "failed":
                sample_handler.failed(run, worker, message.failed)
            case "scored":
                sample_handler.scored(run, worker, message.scored)
            case "prefix":
                incremental_scoring.prefix_scored(run, worker, message.prefix)
            case "done":
                self._command_results.done(worker, message.done)
            case "heartbeat":
                now = time.monotonic()
                measurements.heartbeat(run, run.state.fleet.workers[worker], message.heartbeat, now)
                run.state.fleet.beat(worker, message.heartbeat, now)
            case "span":
                record_worker_span(run, message.span)
            case "observation":
                self._observe(worker, message.observation)
            case None:
                return  # a kind that only newer workers know; see rlhf_api.protocol
            case other:
                raise ValueError(f"a {other} message in the middle of a session")

    def _observe(self, worker: str, observation: pb.Observation) -> None:
        """Give an observation to the modules that learn from it. Raises ValueError for an invalid one."""
        if observation.WhichOneof("work") == "scoring":
            task_named(self._run.context.tasks, observation.scoring.task)
        learning.observe(self._run, worker, observation)
        incremental_scoring.observe(self._run, observation)
        learned.observe(self._run, observation)
        self._run.times.observe(worker, observation)
        measurements.observed(self._run, worker, observation)
        measured_costs.observe(self._run, observation)
