"""Samples that decoding fails on: what is held against them, who hears of it, when an iteration goes on without one.

Rule: the ledger counts (`state.decode_faults`), this says it: in the log, as an event, in the status. A sample that has
failed is left out where spec.rollout.maxFailedSamples still allows it, which is journaled before anything is decided on
it; else the job fails and names the sample. Must never make a result of a failure: what is left out has no response and
is masked out of training. When the process dies, what was counted and not journaled is counted anew.
"""

import logging
import time
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode
from rlhf_api.samples import SampleKey
from rlhf_coordinator.evaluation import messages as evaluated
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.loop import refill_events
from rlhf_coordinator.scheduling.waits import failed_sample
from rlhf_coordinator.state.sample import PackedResponse, Sample, SampleState
from rlhf_coordinator.state.worker import Worker
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.sample_codec import key_message, response_of

log = logging.getLogger(__name__)

FIELD: Final = "spec.rollout.maxFailedSamples"
WEIGHTS_FAULTS: Final = frozenset({"NotFinite"})
"""Reasons of workers that end over what they decode by, whatever they decode."""


def worker_ended(run: JobRun, worker: Worker, why: str) -> None:
    """Hold the end of a worker against the samples that it decodes; once for each of its processes, and not when it was
    asked to end. To be called before they are taken back."""
    if worker.blameless:
        return
    worker.blameless = True
    evaluated.worker_ended(run, worker.name, why)
    ledger, retries = run.state.ledger, run.context.spec.rollout.sample_retries
    held = list(ledger.held_by(worker.name))
    ledger.blame(worker.name, why, retries)
    alone = [index for index in held if ledger.samples[index].isolated]
    if len(held) == 1:
        run.totals.decode_failures += 1
        _say(run, ledger.samples[held[0]])
    elif alone:
        text = f"{len(alone)} samples that {worker.name} and others ended with are decoded one at a time now"
        log.warning("%s: %s", text, ", ".join(map(str, alone)))
        run.event("samples-isolated", text, worker=worker.name)


def sample_failed(run: JobRun, worker: Worker, message: pb.FailedSample) -> None:
    """Take in that a worker cannot go on with one sample. Raises ValueError when the message makes no sense."""
    key, ledger = message.key, run.state.ledger
    if key.iteration != run.state.iteration:
        run.totals.stale += 1
        return
    response = _response(run, key.sample, message.progress)
    why = message.failure.message or message.failure.reason or "no reason given"
    retries = run.context.spec.rollout.sample_retries
    if not ledger.failed_on(key.sample, key.attempt, worker.name, response, why, retries):
        run.totals.stale += 1
        return
    run.totals.decode_failures += 1
    worker.last_progress = time.monotonic()
    _say(run, ledger.samples[key.sample])
    settle(run)
    run.wake()


def settle(run: JobRun) -> None:
    """Go on without the samples that have failed, or fail the job."""
    rollout, ledger = run.context.spec.rollout, run.state.ledger
    for index in list(ledger.faulted):
        sample = ledger.samples[index]
        if sample.state is not SampleState.QUEUED or not sample.faults.is_final(rollout.sample_retries):
            continue
        text = failed_sample(run.state, sample)
        if ledger.count(SampleState.FAILED) >= rollout.max_failed_samples:
            message = f"{text}; {FIELD} is {rollout.max_failed_samples}, so the iteration cannot go on without it"
            run.state.failure = pb.Failure(
                reason="SampleFailed", field=FIELD, message=message, exit_code=ExitCode.SAMPLE_FAILED
            )
            return
        key = SampleKey(ledger.iteration, index, sample.attempt)
        failure = pb.Failure(reason="SampleFailed", field=FIELD, message=text)
        run.journal.append(Record(failed=pb.FailedSample(key=key_message(key), failure=failure)))
        ledger.give_up(index)
        refill_events.follow(run)
        run.totals.failed += 1
        log.error("%s; the iteration goes on without it", text)
        run.event("sample-left-out", text, worker=sample.faults.worker)


def _say(run: JobRun, sample: Sample) -> None:
    text = failed_sample(run.state, sample)
    log.warning("%s", text)
    run.event("sample-failed", text, worker=sample.faults.worker)


def _response(run: JobRun, index: int, progress: pb.SampleProgress) -> PackedResponse:
    response = response_of(progress.tokens, progress.log_probabilities, progress.versions)
    limit = run.context.spec.rollout.max_response_tokens
    counted = sum(span.tokens for span in response.versions)
    if progress.offset or counted != len(response) or len(response) > limit:
        raise ValueError(f"sample {progress.key.sample} failed with {len(response)} tokens at {progress.offset}")
    if not run.state.ledger.continued_by(index, response):
        raise ValueError(f"sample {progress.key.sample} failed with weight versions {response.versions}")
    return response
