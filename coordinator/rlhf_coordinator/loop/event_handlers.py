"""What each message of a worker changes: the ledger, the fleet, the journal, what is learned.

Rule: a result is journaled in the same step in which the ledger takes it, before anything is decided on it. A result
of an old lease is counted and dropped. A message that makes no sense ends the session; the worker then opens another
one and gives back what it holds. Must never take a result whose shape, numbers or weight version are not what was asked
for.
"""

import logging
import time

from rlhf_api import control_pb2 as pb
from rlhf_coordinator.evaluation import messages as evaluated
from rlhf_coordinator.fusion import incremental_scoring, learning, sample_moves
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import finished_response, progress_of
from rlhf_coordinator.job.timeline_spans import record_worker_span
from rlhf_coordinator.loop import sample_failures
from rlhf_coordinator.loop.command_results import CommandResults
from rlhf_coordinator.loop.device_memory_check import DeviceMemory
from rlhf_coordinator.loop.message_checks import check_message, check_registration
from rlhf_coordinator.loop.score_handler import ScoreHandler
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.speculation import learned, sharing
from rlhf_coordinator.state.fleet import Joined, Refused
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import episode_of, response_of
from rlhf_coordinator.training.checkpoint_saver import CheckpointSaver

log = logging.getLogger(__name__)


class EventHandlers:
    """Applies the messages of workers to one job."""

    def __init__(self, run: JobRun, checkpoints: CheckpointSaver) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self._command_results = CommandResults(run, checkpoints)
        self._memory = DeviceMemory(run.context)
        self._scores = ScoreHandler(run)

    # ---------------------------------------------------------------- sessions

    def register(self, message: pb.Register, session: int) -> Joined | Refused:
        """Take in that a worker opens a session: what it held goes back to the queue, with the tokens it brings.
        Return the worker, or why it is refused. Raises ValueError when the message makes no sense."""
        run = self._run
        check_registration(run.state.fleet.workers.get(message.worker), message, run.context.spec.iterations)
        held = {
            item.key.sample: (item.key.attempt, response_of(item.tokens, item.log_probabilities, item.versions))
            for item in message.held
            if item.key.iteration == run.state.iteration
        }
        held = {index: item for index, item in held.items() if run.state.ledger.continued_by(index, item[1])}
        before = run.state.fleet.workers.get(message.worker)
        blameless = before is not None and before.blameless
        result = run.state.fleet.register(message, session, time.monotonic())
        if isinstance(result, Refused):
            run.event("worker-refused", result.reason, worker=message.worker)
            return result
        if result.restarted and not blameless:
            sample_failures.worker_ended(run, result.worker, "its process ended without a word")
            result.worker.blameless = False  # this is its next one
        run.totals.returned += len(run.state.ledger.reclaim(message.worker, held).queued)
        sample_failures.settle(run)
        evaluated.worker_lost(run, message.worker)
        incremental_scoring.worker_lost(run, message.worker)
        sharing.worker_lost(run, message.worker)
        run.state.group_epoch = max(run.state.group_epoch, result.worker.group_epoch)
        self._checkpoints.lost(message.worker)
        run.state.failure = run.state.failure or self._memory.problem(message, result.worker.rank)
        kind = "worker-restarted" if result.restarted else "worker-registered"
        run.event(kind, f"{message.worker} registered from process {message.pid}", worker=message.worker)
        run.wake()
        return result

    def closed(self, worker: str, session: int) -> None:
        """Take in that a session ended."""
        if self._run.state.fleet.closed(worker, session, time.monotonic()):
            self._run.wake()

    def expire(self, now: float) -> None:
        """Take back what lost workers held."""
        run = self._run
        for worker in run.state.fleet.expire(now):
            sample_failures.worker_ended(run, worker, "it was lost, without a word")
            released = run.state.ledger.reclaim(worker.name)
            run.totals.returned += len(released.queued)
            sample_failures.settle(run)
            evaluated.worker_lost(run, worker.name)
            incremental_scoring.worker_lost(run, worker.name)
            sharing.worker_lost(run, worker.name)
            self._checkpoints.lost(worker.name)
            run.sessions.end(worker.name)
            wanted = worker.index < run.state.fleet.sizes[worker.group]
            run.totals.lost[worker.group] += wanted
            kind, how = ("worker-lost", "is lost") if wanted else ("worker-left", "has left, as its group shrank")
            text = f"{worker.name} {how}; {len(released.queued)} samples and {len(released.tasks)} scores go back"
            log.log(logging.WARNING if wanted else logging.INFO, text)
            run.event(kind, text, worker=worker.name)

    # ---------------------------------------------------------------- messages

    def message(self, worker: str, message: pb.WorkerMessage) -> None:
        """Take in one message. Raises ValueError when it makes no sense."""
        if message.WhichOneof("message") != "batch":
            self._one(worker, message)
            return
        for item in message.batch.messages:
            self._one(worker, item)

    def _one(self, worker: str, message: pb.WorkerMessage) -> None:
        run = self._run
        run.totals.messages += 1
        check_message(worker, message)
        if evaluated.take(run, worker, message):
            return
        match message.WhichOneof("message"):
            case "progress":
                self._progress(worker, message.progress)
            case "finished":
                self._finished(worker, message.finished)
            case "failed":
                measurements.failed(run, run.state.fleet.workers[worker], message.failed.failure)
                sample_failures.sample_failed(run, run.state.fleet.workers[worker], message.failed)
            case "scored":
                self._scores.taken_in(worker, message.scored)
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
                return  # of a kind that only newer workers know; see rlhf_api.protocol
            case other:
                raise ValueError(f"a {other} message in the middle of a session")

    def _observe(self, worker: str, observation: pb.Observation) -> None:
        """Hand what work took to all that learn from it."""
        if observation.WhichOneof("work") == "scoring":
            self._scores.task(observation.scoring.task)
        learning.observe(self._run, worker, observation)
        incremental_scoring.observe(self._run, observation)
        learned.observe(self._run, observation)
        self._run.times.observe(worker, observation)
        measurements.observed(self._run, worker, observation)

    def _progress(self, worker: str, message: pb.SampleProgress) -> None:
        run, key = self._run, message.key
        ledger, limit = run.state.ledger, run.context.spec.rollout.max_response_tokens
        more = progress_of(message, limit)
        current = key.iteration == run.state.iteration and self._is_new(more)
        if current:
            migrated = ledger.migrated
            new = ledger.progress(key.sample, key.attempt, worker, message.offset, more)
            run.totals.tokens += new
            self._moved(worker)
            if ledger.migrated > migrated or (new and self._begins(key.sample, new)):
                run.wake()
        own = key.iteration == run.state.iteration and ledger.decodes(key.sample, key.attempt, worker)
        run.totals.stale += not (current and own)
        if not own:
            sample_moves.reclaim_fenced(run, worker, key)

    def _finished(self, worker: str, message: pb.FinishedSample) -> None:
        run, key = self._run, message.key
        if key.iteration != run.state.iteration:
            run.totals.stale += 1
            return
        response = finished_response(message, run.context.spec.rollout.max_response_tokens)
        if not run.state.ledger.continued_by(key.sample, response):
            wanted = run.state.ledger.version
            raise ValueError(f"sample {key.sample} has weight versions {response.versions}, wanted is {wanted}")
        episode = episode_of(message, wanted=run.context.spec.rollout.environment is not None)
        before = run.state.ledger.tokens
        if not run.state.ledger.finish(key.sample, key.attempt, worker, response, message.finish_reason, message.text):
            run.totals.stale += 1
            return
        sample = run.state.ledger.samples[key.sample]
        sample.drafted_tokens, sample.accepted_tokens = message.drafted_tokens, message.accepted_tokens
        sample.episode = episode
        run.journal.append(Record(finished=message, decoded_by=sample.decoded_by))
        incremental_scoring.response_finished(run, key.sample)
        sharing.response_finished(run, key.sample, worker)
        run.totals.tokens += max(0, run.state.ledger.tokens - before)
        measurements.response_finished(run, worker, message, len(response))
        self._moved(worker)
        run.wake()

    def _begins(self, index: int, new: int) -> bool:
        """Return whether the new tokens complete a block that can be scored early."""
        state = self._run.state
        known = len(state.ledger.samples[index].response)
        return incremental_dispatch.is_enabled(self._run.context, state) and incremental_dispatch.gained_block(
            state, index, known - new
        )

    def _is_new(self, more: PackedResponse) -> bool:
        """Return whether tokens were sampled by the iteration's weights alone."""
        tokens = sum(count for _, count in more.versions)
        return tokens == len(more) and all(v == self._run.state.ledger.version for v, _ in more.versions)

    def _moved(self, worker: str) -> None:
        self._run.state.fleet.workers[worker].last_progress = time.monotonic()
        self._run.totals.progressed()
