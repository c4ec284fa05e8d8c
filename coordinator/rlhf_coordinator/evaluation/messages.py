"""What workers say of samples of an evaluation: tokens, finished responses, scores, failures; and that one was lost.

Rule: messages are checked as for the batch, by `job.sample_messages`. A result is journaled in the step in which the
ledger takes it; one of an old lease, or of an evaluation that is over, is dropped. A response
that no worker can decode is left out of the figures and counted: it ends no job. A reward that fails for good ends the
job, as it would for the batch.
"""

import logging
import time
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Task
from rlhf_api.names import ExitCode
from rlhf_api.samples import SampleKey
from rlhf_coordinator.fusion import sample_moves
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import finished_response, progress_of, score_problem, task_named
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE, evaluation_tasks
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import PackedResponse, SampleState
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import episode_of, key_message, unpacked

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5
"""Before the first retry of a failed score; doubles with each."""


def take(run: JobRun, worker: str, message: pb.WorkerMessage) -> bool:
    """Take in a message about a sample of an evaluation; return False for every other one. Raises ValueError when it
    makes no sense."""
    match message.WhichOneof("message"):
        case "progress":
            key = message.progress.key
        case "finished":
            key = message.finished.key
        case "failed":
            key = message.failed.key
        case "scored":
            key = message.scored.key
        case _:
            return False
    if key.sample < FIRST_SAMPLE:
        return False
    ledger, index = run.state.evaluation.ledger, key.sample - FIRST_SAMPLE
    if ledger is None or key.iteration != ledger.iteration or index >= len(ledger.samples):
        run.totals.stale += 1
        if message.HasField("progress"):
            sample_moves.reclaim_fenced(run, worker, key)
        return True
    if message.HasField("progress"):
        _progress(run, ledger, worker, message.progress)
    elif message.HasField("finished"):
        _finished(run, ledger, worker, message.finished)
    elif message.HasField("failed"):
        _failed(run, ledger, worker, message.failed)
    else:
        _scored(run, ledger, worker, message.scored)
    return True


def worker_ended(run: JobRun, worker: str, why: str) -> None:
    """Hold the end of a worker against what it decodes; to be called before that is taken back."""
    ledger = run.state.evaluation.ledger
    if ledger is not None:
        ledger.blame(worker, why, run.context.spec.rollout.sample_retries)


def worker_lost(run: JobRun, worker: str) -> None:
    """Take back what a lost or reconnecting worker had; its tokens are drawn again, and are the same."""
    ledger = run.state.evaluation.ledger
    if ledger is not None:
        ledger.reclaim(worker)
        _settle(run, ledger)


def _progress(run: JobRun, ledger: Ledger, worker: str, message: pb.SampleProgress) -> None:
    index, limit = message.key.sample - FIRST_SAMPLE, run.context.spec.rollout.max_response_tokens
    more = progress_of(message, limit)
    _check_versions(ledger, more, message.key)
    ledger.progress(index, message.key.attempt, worker, message.offset, more)
    if ledger.decodes(index, message.key.attempt, worker):
        _moved(run, worker)
    else:
        run.totals.stale += 1
        sample_moves.reclaim_fenced(run, worker, message.key)


def _finished(run: JobRun, ledger: Ledger, worker: str, message: pb.FinishedSample) -> None:
    index, limit = message.key.sample - FIRST_SAMPLE, run.context.spec.rollout.max_response_tokens
    response = finished_response(message, limit)
    _check_versions(ledger, response, message.key)
    episode = episode_of(message, wanted=run.context.spec.rollout.environment is not None)
    if not ledger.finish(index, message.key.attempt, worker, response, message.finish_reason, message.text):
        run.totals.stale += 1
        return
    ledger.samples[index].episode = episode
    run.journal.append(Record(finished=message, decoded_by=ledger.samples[index].decoded_by))
    run.totals.evaluated += 1
    _moved(run, worker)


def _failed(run: JobRun, ledger: Ledger, worker: str, message: pb.FailedSample) -> None:
    index, retries = message.key.sample - FIRST_SAMPLE, run.context.spec.rollout.sample_retries
    why = message.failure.message or message.failure.reason or "no reason given"
    if not ledger.failed_on(index, message.key.attempt, worker, PackedResponse(), why, retries):
        run.totals.stale += 1
        return
    run.totals.decode_failures += 1
    _settle(run, ledger)
    _moved(run, worker)


def _scored(run: JobRun, ledger: Ledger, worker: str, message: pb.ScoredSample) -> None:
    index, key = message.key.sample - FIRST_SAMPLE, message.key
    task = task_named(evaluation_tasks(run.context.graph), message.task)
    failure = score_problem(message, task, len(ledger.samples[index].response))
    if failure is not None:
        _score_failed(run, ledger, worker, message, failure, task)
        return
    values = None if message.abstained else unpacked(message.result, "float32")
    if not ledger.score(index, key.attempt, worker, message.task, values):
        run.totals.stale += 1
        return
    run.journal.append(Record(scored=message))
    _moved(run, worker)


def _score_failed(
    run: JobRun, ledger: Ledger, worker: str, message: pb.ScoredSample, failure: pb.Failure, task: Task
) -> None:
    index, limit = message.key.sample - FIRST_SAMPLE, run.context.retries(task)
    again = time.monotonic() + RETRY_SECONDS * 2 ** ledger.samples[index].failures[message.task]
    tries = ledger.fail_score(index, message.key.attempt, worker, message.task, again)
    if not tries:
        run.totals.stale += 1
        return
    text = f"{message.task} of response {index} of an evaluation failed on {worker} (try {tries} of {limit + 1}): "
    log.warning("%s%s", text, failure.message)
    run.event("score-failed", text + failure.message, worker=worker, reason=failure.reason)
    if tries > limit:
        final = pb.Failure(
            reason=failure.reason, field=failure.field or "spec.models.reward", message=text + failure.message
        )
        final.exit_code = failure.exit_code if failure.exit_code > 1 else ExitCode.USER_CODE
        run.state.failure = final
    _moved(run, worker)


def _settle(run: JobRun, ledger: Ledger) -> None:
    """Leave out the samples that have failed for good."""
    for index in list(ledger.faulted):
        sample = ledger.samples[index]
        if sample.state is not SampleState.QUEUED or not sample.faults.is_final(
            run.context.spec.rollout.sample_retries
        ):
            continue
        key = key_message(SampleKey(ledger.iteration, FIRST_SAMPLE + index, sample.attempt))
        text = f"response {index} of the evaluation of weight version {ledger.iteration} could not be decoded"
        run.journal.append(Record(failed=pb.FailedSample(key=key, failure=pb.Failure(message=text))))
        ledger.give_up(index)
        log.error("%s, the last time on %s: %s; it is left out", text, sample.faults.worker, sample.faults.why)
        run.event("evaluation-sample-left-out", f"{text}: {sample.faults.why}", worker=sample.faults.worker)


def _check_versions(ledger: Ledger, response: PackedResponse, key: pb.SampleKey) -> None:
    whole = sum(count for _, count in response.versions) == len(response)
    if not whole or any(version != ledger.iteration for version, _ in response.versions):
        wanted = ledger.iteration
        raise ValueError(f"sample {key.sample} has weight versions {response.versions[:8]}, wanted is {wanted}")


def _moved(run: JobRun, worker: str) -> None:
    run.state.fleet.workers[worker].last_progress = time.monotonic()
    run.totals.progressed()
    run.wake()
