"""The effects of messages about samples: on the ledger of the batch or of the evaluation, and on the journal.

A response is journaled when the ledger takes it.
"""

import time

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import is_ahead
from rlhf_coordinator.fusion import sample_moves
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import finished_response, progress_of
from rlhf_coordinator.loop import sample_failures, score_handler
from rlhf_coordinator.loop.sample_sets import Samples, find
from rlhf_coordinator.speculation import drafting_ahead
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import episode_of


def progressed(run: JobRun, worker: str, message: pb.SampleProgress) -> None:
    """Add new tokens of an unfinished response; withdraw a sample that the worker does not have leased.

    Raises ValueError for an invalid message.
    """
    key = message.key
    more = progress_of(message, run.context.spec.rollout.max_response_tokens)
    if is_ahead(key.sample):
        drafting_ahead.progressed(run, message, more)
        return
    place = find(run, key)
    current = place is not None and _is_new(more, place[0].ledger.version)
    if place is not None and current:
        samples, index = place
        migrated = samples.ledger.migrated
        new = samples.ledger.progress(index, key.attempt, worker, message.offset, more)
        _moved(run, worker)
        if samples.decoded(index, new) or samples.ledger.migrated > migrated:
            run.wake()
    own = place is not None and place[0].ledger.decodes(place[1], key.attempt, worker)
    run.totals.stale += not (current and own)
    if not own:
        sample_moves.reclaim_fenced(run, worker, key)


def finished(run: JobRun, worker: str, message: pb.FinishedSample) -> None:
    """Process a whole response. Raises ValueError for an invalid message."""
    if is_ahead(message.key.sample):
        drafting_ahead.finished(run, message)
        return
    place = find(run, message.key)
    _count(run, worker, place is not None and _finished(run, *place, worker, message))


def failed(run: JobRun, worker: str, message: pb.FailedSample) -> None:
    """Process a worker's failure on a sample. Raises ValueError for an invalid message."""
    measurements.failed(run, run.state.fleet.workers[worker], message.failure)
    if is_ahead(message.key.sample):
        drafting_ahead.failed(run, message)
        return
    place = find(run, message.key)
    if place is None or not sample_failures.sample_failed(run, *place, worker, message):
        run.totals.stale += 1
        return
    run.state.fleet.workers[worker].last_progress = time.monotonic()
    run.wake()


def scored(run: JobRun, worker: str, message: pb.ScoredSample) -> None:
    """Process a result or a failure of a scoring task. Raises ValueError for an invalid message."""
    place = find(run, message.key)
    _count(run, worker, place is not None and score_handler.scored(run, *place, worker, message))


def _moved(run: JobRun, worker: str) -> None:
    """Record that a worker, and the job, made progress."""
    run.state.fleet.workers[worker].last_progress = time.monotonic()
    run.totals.progressed()


def _finished(run: JobRun, samples: Samples, index: int, worker: str, message: pb.FinishedSample) -> bool:
    ledger, key = samples.ledger, message.key
    response = finished_response(message, run.context.spec.rollout.max_response_tokens)
    if not ledger.continued_by(index, response):
        raise ValueError(f"sample {key.sample} has weight versions {response.versions}, wanted is {ledger.version}")
    episode = episode_of(message, wanted=run.context.spec.rollout.environment is not None)
    before = ledger.tokens
    if not ledger.finish(index, key.attempt, worker, response, message.finish_reason, message.text):
        return False
    sample = ledger.samples[index]
    sample.drafted_tokens, sample.accepted_tokens = message.drafted_tokens, message.accepted_tokens
    sample.episode = episode
    run.journal.append(Record(finished=message, decoded_by=sample.decoded_by))
    samples.finished(index, worker, message, ledger.tokens - before)
    return True


def _count(run: JobRun, worker: str, taken: bool) -> None:
    """Count as stale a message that was not taken. For a taken one, record progress and wake the loop."""
    if not taken:
        run.totals.stale += 1
        return
    _moved(run, worker)
    run.wake()


def _is_new(more: PackedResponse, version: int) -> bool:
    """Return whether the spans cover all of the tokens, and are of this weight version."""
    tokens = sum(count for _, count in more.versions)
    return tokens == len(more) and all(v == version for v, _ in more.versions)
