"""Moves of samples from worker to worker: the commands, and the ledger's changes when they are answered."""

import logging
import time
from collections.abc import Iterable
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.samples import Lease, SampleKey
from rlhf_coordinator.fusion import learning
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.sample_messages import returned_response
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.state.sample import PackedResponse
from rlhf_coordinator.state.worker import CommandKind, LeavingSample, PendingCommand
from rlhf_coordinator.storage.sample_codec import key_message

log = logging.getLogger(__name__)

MIGRATE_SECONDS: Final = 30.0
"""Time-out of one Migrate in seconds."""


def migrate(run: JobRun, decision: d.Migrate) -> None:
    """Ask a worker to move samples to another one with their KV cache."""
    ledger, leaving = run.state.ledger, []
    address = run.state.fleet.workers[decision.destination].address
    order = pb.Migrate(destination=address, timeout_seconds=MIGRATE_SECONDS)
    for index in decision.samples:
        source, arriving = ledger.migrate(index, decision.destination)
        leaving.append(LeavingSample(ledger.iteration, index, source, arriving))
        order.samples.add(key=_key(leaving[-1]), new_attempt=arriving.attempt)
    detail = f"move {len(leaving)} samples to {decision.destination}"
    now = time.monotonic()
    run.state.fusion.moved_at |= {decision.source: now, decision.destination: now}
    send(
        run,
        decision.source,
        pb.Command(migrate=order),
        PendingCommand(CommandKind.MIGRATE, 0.0, detail, leaving=tuple(leaving)),
    )


def withdraw(run: JobRun, decision: d.Withdraw) -> None:
    """Ask a worker to return samples with their tokens."""
    ledger = run.state.ledger
    leaving = tuple(
        LeavingSample(ledger.iteration, index, Lease(*ledger.withdraw(index))) for index in decision.samples
    )  # fmt: skip
    order = pb.Withdraw(keys=[_key(item) for item in leaving])
    detail = f"give back {len(leaving)} samples"
    run.state.fusion.moved_at[decision.worker] = time.monotonic()
    send(
        run,
        decision.worker,
        pb.Command(withdraw=order),
        PendingCommand(CommandKind.WITHDRAW, 0.0, detail, leaving=leaving),
    )


def reclaim_fenced(run: JobRun, worker: str, key: pb.SampleKey) -> None:
    """Let a worker drop a sample that it decodes under an old lease.

    Do nothing while a pending command of the worker lets the sample leave under this attempt.
    """
    left = (key.iteration, key.sample, key.attempt)
    pending = run.state.fleet.workers[worker].pending.values()
    if any(left == (item.iteration, item.sample, item.source.attempt) for work in pending for item in work.leaving):
        return
    order = pb.Command(withdraw=pb.Withdraw(keys=[key]))
    send(run, worker, order, PendingCommand(CommandKind.WITHDRAW, 0.0, f"forget sample {key.sample}"))


def take_answer(run: JobRun, worker: str, pending: PendingCommand, message: pb.CommandDone) -> None:
    """Process the answer to a Migrate or a Withdraw, or its failure. Raises ValueError for an invalid answer."""
    if message.HasField("failure"):
        log.warning("%s could not %s: %s", worker, pending.detail, message.failure.message)
        run.event("migration-failed", f"{worker} could not {pending.detail}: {message.failure.message}", worker=worker)
        _stay(run, _current(run, pending))
    elif pending.kind is CommandKind.MIGRATE:
        _migrated(run, pending, message.migrate)
    else:
        _withdrawn(run, pending, message.withdraw)


def _migrated(run: JobRun, pending: PendingCommand, result: pb.MigrateResult) -> None:
    ledger, counts = run.state.ledger, run.state.fusion.moved
    answered = {(item.key.iteration, item.key.sample, item.key.attempt): item for item in result.samples}
    stayed = []
    for leaving in _current(run, pending):
        item = answered.get((leaving.iteration, leaving.sample, leaving.source.attempt))
        if item is None or not item.moved:
            stayed.append(leaving)
            if item is not None:
                log.info("sample %d stays on %s: %s", leaving.sample, leaving.source.worker, item.why)
            continue
        assert leaving.destination is not None
        ledger.moved(leaving.sample, leaving.source, leaving.destination, _response(run, leaving.sample, item.progress))
        measurements.sample_moved(run, leaving.source.worker, item)
        counts.kv += 1
        counts.bytes += item.bytes
        counts.seconds += item.seconds
        counts.paused += item.paused_seconds
        counts.longest_pause = max(counts.longest_pause, item.paused_seconds)
    learning.observe_migration(run, pending, [item for item in result.samples if item.moved])
    _stay(run, stayed)


def _stay(run: JobRun, leaving: Iterable[LeavingSample]) -> None:
    ledger = run.state.ledger
    for item in leaving:
        if item.destination is not None and ledger.stayed(item.sample, item.source):
            run.state.fusion.moved.stayed += 1
            run.totals.stayed += 1
        elif item.destination is None:
            ledger.unknown(item.sample, item.source.attempt, item.source.worker)


def _withdrawn(run: JobRun, pending: PendingCommand, result: pb.WithdrawResult) -> None:
    ledger = run.state.ledger
    answered = {(item.key.iteration, item.key.sample, item.key.attempt): item for item in result.samples}
    if pending.leaving:
        learning.observe_withdrawal(run, pending)
    for leaving in _current(run, pending):
        index, source = leaving.sample, leaving.source
        item = answered.get((leaving.iteration, index, source.attempt))
        if item is None:
            ledger.unknown(index, source.attempt, source.worker)
        elif ledger.withdrawn(index, source.attempt, source.worker, _response(run, index, item)):
            run.state.fusion.moved.tokens += 1
            run.totals.moved_tokens += 1


def _current(run: JobRun, pending: PendingCommand) -> list[LeavingSample]:
    """Return the leaving samples of the iteration in progress."""
    return [item for item in pending.leaving if item.iteration == run.state.iteration]


def _response(run: JobRun, index: int, progress: pb.SampleProgress) -> PackedResponse:
    return returned_response(progress, run.state.ledger, index, run.context.spec.rollout.max_response_tokens)


def _key(leaving: LeavingSample) -> pb.SampleKey:
    return key_message(SampleKey(leaving.iteration, leaving.sample, leaving.source.attempt))
