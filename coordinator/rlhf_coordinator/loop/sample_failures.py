"""Samples that fail in decoding: their counters, the reports about them, and iterations that leave them out.

A failed sample is left out if spec.rollout.maxFailedSamples allows another one. Otherwise the job fails.
"""

import logging
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import returned_response
from rlhf_coordinator.loop.sample_sets import MAX_FAILED_FIELD, Samples, sample_sets
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.state.worker import Worker
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import key_message

log = logging.getLogger(__name__)

WEIGHTS_FAULTS: Final = frozenset({"NotFinite"})
"""Failure reasons of workers whose cause is the weights, not the sample."""


def worker_ended(run: JobRun, worker: Worker, why: str) -> None:
    """Count the end of a worker as a failure of the samples that it decodes, unless it is blameless; mark it so.

    Call this before the samples return to the queue.
    """
    if worker.blameless:
        return
    worker.blameless = True
    for samples in sample_sets(run):
        ledger = samples.ledger
        decoded = list(ledger.held_by(worker.name))
        ledger.record_failure(worker.name, why, run.context.spec.rollout.sample_retries)
        alone = [index for index in decoded if ledger.samples[index].isolated]
        if len(decoded) == 1:
            run.totals.decode_failures += 1
            _report(run, samples, decoded[0])
        elif alone:
            text = f"{len(alone)} samples that {worker.name} and others ended with are decoded one at a time now"
            log.warning("%s: %s", text, ", ".join(map(str, alone)))
            run.event("samples-isolated", text, worker=worker.name)


def sample_failed(run: JobRun, samples: Samples, index: int, worker: str, message: pb.FailedSample) -> bool:
    """Process a worker's failure on one sample; return False when the message is stale.

    Raises ValueError for an invalid message.
    """
    limit = run.context.spec.rollout.max_response_tokens
    response = returned_response(message.progress, samples.ledger, index, limit)
    why = message.failure.message or message.failure.reason or "no reason given"
    retries = run.context.spec.rollout.sample_retries
    if not samples.ledger.failed_on(index, message.key.attempt, worker, response, why, retries):
        return False
    run.totals.decode_failures += 1
    _report(run, samples, index)
    settle(run, samples)
    return True


def settle(run: JobRun, samples: Samples) -> None:
    """Leave out the queued samples that have failed, or, beyond the limit, set the job's failure."""
    ledger, retries = samples.ledger, run.context.spec.rollout.sample_retries
    for index in list(ledger.faulted):
        sample = ledger.samples[index]
        if sample.state is not SampleState.QUEUED or not sample.faults.is_final(retries):
            continue
        failure = samples.failure(sample)
        if ledger.count(SampleState.FAILED) >= samples.max_failed:
            failure.message += f"; {MAX_FAILED_FIELD} is {samples.max_failed}, so the iteration cannot go on without it"
            failure.exit_code = ExitCode.SAMPLE_FAILED
            run.state.failure = failure
            return
        key = key_message(samples.key(index, sample.attempt))
        run.journal.append(Record(failed=pb.FailedSample(key=key, failure=failure)))
        ledger.give_up(index)
        samples.left_out()
        log.error("%s; the %s goes on without it", failure.message, samples.noun)
        run.event(samples.left_out_event, failure.message, worker=sample.faults.worker)


def _report(run: JobRun, samples: Samples, index: int) -> None:
    sample = samples.ledger.samples[index]
    text = samples.failure(sample).message
    log.warning("%s", text)
    run.event("sample-failed", text, worker=sample.faults.worker)
