"""The JobStatus message, the public state of the job for the operator, the live view and other callers.

Built on request, never stored.
"""

import time
from collections.abc import Iterable

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import waits
from rlhf_coordinator.speculation.summary import describe, shown
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.worker import CommandKind, Worker


def job_status(run: JobRun) -> pb.JobStatus:
    """Return the status of the job now."""
    state, now = run.state, time.monotonic()
    status = pb.JobStatus(
        job=run.context.job.name,
        phase=run.outcome.phase if run.outcome else run.scheduled.phase,
        iteration=state.iteration,
        iterations=run.context.spec.iterations,
        ledger=state.ledger.counts(),
        workers=[worker_status(worker, state.ledger, run.context.graph.trained, now) for worker in state.fleet],
        metrics=run.last_metrics,
        weight_version=state.version,
        last_checkpoint=state.checkpoint.folder,
        coordinator_epoch=run.coordinator_epoch,
        started_ns=run.started_ns,
        seconds_left=seconds_left(run, now),
        restarts={worker.name: worker.restarts for worker in state.fleet if worker.restarts},
        tokens=state.ledger.tokens,
        replicas={group.value: count for group, count in state.fleet.sizes.items()},
        pool=run.scheduled.consolidation.pool,
    )
    if (plan := run.context.device_plan) is not None:
        status.device_plan = plan.model_dump_json(by_alias=True, exclude_none=True)
    status.plan_drift = state.plan_drift.words
    status.sample_failures.extend(waits.sample_failures(state))
    status.lost_trackers.extend(reversed(run.trackers.lost))
    status.warnings.extend(run.warnings)
    if (lock := run.journal.lock) is not None:
        status.journal_lock_shared, status.journal_lock_doubt = not lock.doubt, lock.doubt
    if run.scheduled.consolidation.possible:
        status.fusion.CopyFrom(fusion_status(run))
    status.speculation.CopyFrom(speculation_status(run))
    if run.context.spec.rollout.long_rounds == "Auto":
        status.long_rounds = state.long_rounds.reason or "no long rounds: nothing is chosen yet"
    if run.outcome is None:
        status.waiting_for.extend(waits.descriptions(run.context, state, now))
    elif run.outcome.failure is not None:
        status.failure.CopyFrom(run.outcome.failure)
    return status


def fusion_status(run: JobRun) -> pb.FusionStatus:
    """Return the fusion of the iteration in progress."""
    state, tail = run.state.fusion, run.scheduled.consolidation
    choice = state.choice
    return pb.FusionStatus(
        choice=choice.reason or "no fusion: nothing is chosen yet",
        threshold=choice.threshold if tail.planned else 0,
        pool=choice.pool if tail.planned else 0,
        released=tail.released,
        migrated=run.state.ledger.migrated,
        migrated_bytes=state.moved.bytes,
        predicted_seconds=choice.seconds,
        predicted_off_seconds=choice.off_seconds,
    )


def speculation_status(run: JobRun) -> pb.SpeculationStatus:
    """Return the state of drafting in the previous iteration, or in this one if that has no steps."""
    state = run.state.speculation
    totals = shown(state)
    return pb.SpeculationStatus(
        summary=describe(run.context.spec, state),
        tokens_per_step=totals.tokens_per_step,
        acceptance=totals.acceptance,
        drafted_share=totals.drafted_share,
        switches=state.switches,
    )


def seconds_left(run: JobRun, now: float) -> float:
    """Return the seconds of the remaining iterations at the pace of the last one; 0 if unknown or none remain."""
    pace = run.last_metrics.get("seconds/iteration", 0.0)
    if run.outcome is not None or not pace:
        return 0.0
    remaining = run.context.spec.iterations - run.state.iteration
    return max(0.0, remaining * pace - min(pace, now - run.times.start))


def worker_status(worker: Worker, ledger: Ledger, trained: Iterable[str], now: float) -> pb.WorkerStatus:
    """Return the status of one worker; versions that it decodes and scores with replace those of its rank."""
    rank_versions = dict.fromkeys(trained, worker.trained_version) if worker.trains else {}
    decoding, scoring = ledger.decoding_on(worker.name), ledger.scoring_on(worker.name)
    tokens_per_second, busy = worker.rates
    return pb.WorkerStatus(
        worker=worker.name,
        state=_state(worker, decoding + scoring > 0),
        activity=_activity(worker, decoding, scoring),
        active_samples=worker.heartbeat.active_samples or decoding,
        tokens_per_second=tokens_per_second,
        versions=rank_versions | worker.versions,
        busy_share=busy,
        silent_seconds=max(0.0, now - worker.last_heard) if worker.lost else 0.0,
        engine=worker.heartbeat.engine,
    )


def _state(worker: Worker, has_samples: bool) -> str:
    if not worker.seen:
        return "Missing"
    if not worker.session:
        return "Lost"
    if worker.leaving or not worker.roles:
        return "Starting"
    return "Busy" if has_samples or worker.slow_command is not None else "Ready"


def _activity(worker: Worker, decoding: int, scoring: int) -> str:
    slow = worker.slow_command
    if slow is not None:
        return "train" if slow.kind is CommandKind.TRAIN else worker.heartbeat.stage or slow.detail
    parts = [f"decode {decoding}"] * bool(decoding) + [f"score {scoring}"] * bool(scoring)
    return ", ".join(parts)
