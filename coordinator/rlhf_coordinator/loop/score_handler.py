"""What a worker's score changes: the ledger, the journal, what is counted.

Rule: a result is journaled in the same step in which the ledger takes it. A task that failed stays open, to be retried
elsewhere; when its retries are used up it ends the job, or its reward abstains where the manifest says so. Must never
take a result whose shape or numbers are not what was asked for, and never turn a failure into a number.
"""

import logging
import time
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Task
from rlhf_api.names import ExitCode
from rlhf_coordinator.fusion import incremental_scoring
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import score_problem, task_named
from rlhf_coordinator.loop import refill_events
from rlhf_coordinator.storage.journal_pb2 import Record, ScoredGroup
from rlhf_coordinator.storage.sample_codec import group_score, unpacked

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5
"""Before the first retry of a failed score; doubles with each, so that a short outage passes."""


class ScoreHandler:
    """Applies the scores of workers to one job."""

    def __init__(self, run: JobRun) -> None:
        self._run = run

    def taken_in(self, worker: str, message: pb.ScoredSample) -> None:
        """Take in a result, that a reward abstains, or that a task failed on a sample."""
        run, key = self._run, message.key
        samples = run.state.ledger.samples
        if key.iteration != run.state.iteration or not 0 <= key.sample < len(samples):
            run.totals.stale += 1
            return
        problem = score_problem(message, self.task(message.task), len(samples[key.sample].response))
        if problem is not None:
            self._score_failed(worker, message, problem)
        else:
            self._take(worker, message)

    def _take(self, worker: str, message: pb.ScoredSample) -> None:
        run, key = self._run, message.key
        values = None if message.abstained else unpacked(message.result, "float32")
        if run.state.ledger.is_of_group(message.task):
            taken = self._scored_in_group(worker, message, values)
        else:
            taken = run.state.ledger.score(key.sample, key.attempt, worker, message.task, values)
            if taken:
                run.journal.append(Record(scored=message))
        if not taken:
            run.totals.stale += 1
            return
        if message.metrics:
            run.state.ledger.samples[key.sample].reward_metrics[message.task] = dict(message.metrics)
        incremental_scoring.score_taken(run, message)
        measurements.score_taken(run, worker, message)
        refill_events.follow(run)
        self._moved(worker)
        run.wake()

    def _scored_in_group(self, worker: str, message: pb.ScoredSample, values: bytes | None) -> bool:
        """Take in what a group task says of one sample; return False when it is stale. The group is journaled with its
        last one, as a whole."""
        run, key = self._run, message.key
        taken, results = run.state.ledger.score_in_group(key.sample, key.attempt, worker, message.task, values)
        if results:
            samples = run.state.ledger.samples
            if message.metrics:
                samples[key.sample].reward_metrics[message.task] = dict(message.metrics)
            scores = [group_score(run.state.iteration, samples[i], message.task, each) for i, each in results.items()]
            run.journal.append(Record(scored_group=ScoredGroup(samples=scores)))
        return taken

    def _score_failed(self, worker: str, message: pb.ScoredSample, failure: pb.Failure) -> None:
        run, key, task = self._run, message.key, self.task(message.task)
        tried, limit = run.state.ledger.tries(key.sample, message.task), run.context.retries(task)
        if tried >= limit and run.context.abstains(task):
            self._abstain(worker, message, failure, tried + 1)
            return
        again = time.monotonic() + RETRY_SECONDS * 2**tried
        tries = run.state.ledger.fail_score(key.sample, key.attempt, worker, message.task, again)
        if not tries:
            run.totals.stale += 1
            return
        run.totals.score_failures[message.task] += 1
        measurements.failed(run, run.state.fleet.workers[worker], failure)
        text = f"{message.task} of sample {key.sample} failed on {worker} (try {tries} of {limit + 1}): "
        log.warning("%s%s", text, failure.message)
        run.event("score-failed", text + failure.message, worker=worker, reason=failure.reason)
        if tries > limit:
            run.state.failure = _final(task, key.sample, tries, failure)
        self._moved(worker)
        run.wake()

    def _abstain(self, worker: str, message: pb.ScoredSample, failure: pb.Failure, tries: int) -> None:
        """A reward failed for the last time on a sample of a job that goes on without it."""
        run, key = self._run, message.key
        run.totals.score_failures[message.task] += 1
        text = f"{message.task} abstains of sample {key.sample}, as it failed {tries} times: {failure.message}"
        log.warning("%s", text)
        run.event("score-abstained", text, worker=worker, reason=failure.reason)
        self._take(worker, pb.ScoredSample(key=key, task=message.task, abstained=True))

    def task(self, name: str) -> Task:
        """Return the scoring task of a message; ValueError when the job has none of this name."""
        return task_named(self._run.context.tasks, name)

    def _moved(self, worker: str) -> None:
        self._run.state.fleet.workers[worker].last_progress = time.monotonic()
        self._run.totals.progressed()


def _final(task: Task, sample: int, tries: int, failure: pb.Failure) -> pb.Failure:
    """Return the failure that ends the job when a task's retries are used up."""
    final = pb.Failure()
    final.CopyFrom(failure)
    final.message = f"{task.name} of sample {sample} failed {tries} times: {failure.message}"
    if task.rewards:
        final.exit_code = failure.exit_code if failure.exit_code > 1 else ExitCode.USER_CODE
        final.field = failure.field or task.model.manifest_path
    else:
        final.exit_code = failure.exit_code or ExitCode.FAILED
    return final
