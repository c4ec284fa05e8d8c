"""The effects of a worker's score on the ledger, the journal and the counters.

A result is journaled when the ledger takes it, those of a group with the last one. After the retries of a failed task
the job fails, or the reward abstains where the manifest allows it.
"""

import logging
import time
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import score_problem, task_named
from rlhf_coordinator.loop.sample_sets import Samples
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.journal_pb2 import Record, ScoredGroup
from rlhf_coordinator.storage.sample_codec import group_score, unpacked

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5
"""Least seconds before the first retry of a failed score; the delay doubles with each retry."""


def scored(run: JobRun, samples: Samples, index: int, worker: str, message: pb.ScoredSample) -> bool:
    """Process a result, an abstention or a failure of a task on a sample; return False when the message is stale.

    Raises ValueError for an unknown task, or an impossible number of early tokens.
    """
    task = task_named(samples.tasks, message.task)
    rollout = run.context.spec.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if not 0 <= message.early_tokens <= longest:
        name = samples.name(index)
        raise ValueError(f"a score of {name}: early_tokens is {message.early_tokens}, must be from 0 to {longest}")
    problem = score_problem(message, task, len(samples.ledger.samples[index].response))
    if problem is not None:
        return _score_failed(run, samples, index, worker, message, problem, task)
    return _take(run, samples, index, worker, message)


def _take(run: JobRun, samples: Samples, index: int, worker: str, message: pb.ScoredSample) -> bool:
    ledger, key = samples.ledger, message.key
    values = None if message.abstained else unpacked(message.result, "float32")
    if ledger.is_of_group(message.task):
        taken = _scored_in_group(run, ledger, worker, message, values)
    else:
        taken = ledger.score(index, key.attempt, worker, message.task, values)
        if taken:
            run.journal.append(Record(scored=message))
    if not taken:
        return False
    if message.metrics:
        ledger.samples[index].reward_metrics[message.task] = dict(message.metrics)
    samples.scored(worker, message)
    return True


def _scored_in_group(run: JobRun, ledger: Ledger, worker: str, message: pb.ScoredSample, values: bytes | None) -> bool:
    """Process the result of a group task for one sample; return False when it is stale.

    The group is journaled as a whole with its last result.
    """
    key, samples = message.key, ledger.samples
    taken, results = ledger.score_in_group(key.sample, key.attempt, worker, message.task, values)
    if results:
        if message.metrics:
            samples[key.sample].reward_metrics[message.task] = dict(message.metrics)
        scores = [group_score(ledger.iteration, samples[i], message.task, each) for i, each in results.items()]
        run.journal.append(Record(scored_group=ScoredGroup(samples=scores)))
    return taken


def _score_failed(
    run: JobRun, samples: Samples, index: int, worker: str, message: pb.ScoredSample, failure: pb.Failure, task: Task
) -> bool:
    key, ledger = message.key, samples.ledger
    tried, limit = ledger.tries(index, message.task), run.context.retries(task)
    if tried >= limit and run.context.abstains(task):
        return _abstain(run, samples, index, worker, message, failure, tried + 1)
    again = time.monotonic() + RETRY_SECONDS * 2**tried
    tries = ledger.fail_score(index, key.attempt, worker, message.task, again)
    if not tries:
        return False
    run.totals.score_failures[message.task] += 1
    measurements.failed(run, run.state.fleet.workers[worker], failure)
    text = f"{message.task} of {samples.name(index)} failed on {worker} (try {tries} of {limit + 1}): "
    log.warning("%s%s", text, failure.message)
    run.event("score-failed", text + failure.message, worker=worker, reason=failure.reason)
    if tries > limit:
        run.state.failure = _final(task, samples.name(index), tries, failure)
    return True


def _abstain(
    run: JobRun, samples: Samples, index: int, worker: str, message: pb.ScoredSample, failure: pb.Failure, tries: int
) -> bool:
    """Record that a reward abstains after its last failure on a sample; return False when the message is stale."""
    abstained = pb.ScoredSample(key=message.key, task=message.task, abstained=True)
    if not _take(run, samples, index, worker, abstained):
        return False
    run.totals.score_failures[message.task] += 1
    measurements.failed(run, run.state.fleet.workers[worker], failure)
    text = f"{message.task} abstains of {samples.name(index)}, as it failed {tries} times: {failure.message}"
    log.warning("%s", text)
    run.event("score-abstained", text, worker=worker, reason=failure.reason)
    return True


def _final(task: Task, sample: str, tries: int, failure: pb.Failure) -> pb.Failure:
    """Return the failure that ends the job when a task's retries are used up."""
    final = pb.Failure()
    final.CopyFrom(failure)
    final.message = f"{task.name} of {sample} failed {tries} times: {failure.message}"
    if task.rewards:
        final.exit_code = failure.exit_code if failure.exit_code > 1 else ExitCode.USER_CODE
        final.field = failure.field or task.model.manifest_path
    else:
        final.exit_code = failure.exit_code or ExitCode.FAILED
    return final
