"""What the job waits for: one list that the status shows in words and the time-outs are checked against.

Rule: pure. Every wait names the worker and what it is to do, and since when.
"""

import math
from dataclasses import dataclass

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode
from rlhf_coordinator.scheduling.decisions import Decision, ExitWorker, Finish
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import CommandKind, Worker


@dataclass(frozen=True)
class Wait:
    """One thing that the job waits for."""

    worker: str
    description: str
    """Whom it waits for, to do what: `generation-1 to load actor version 3`."""
    since: float
    """When there was a last sign of life, in seconds of the monotonic clock."""
    stuck: bool
    """Whether the worker is connected and has the work: if nothing moves for too long, it is stuck."""
    fatal: bool
    """Whether nobody can stand in for an absent worker, and nobody else sees to it that it comes."""
    allowance: float = 0.0
    """Seconds that it may take beyond spec.runPolicy.startTimeoutSeconds: slow rewards have a time-out of their own."""


def waits(context: JobContext, state: JobState, before: float = math.inf) -> list[Wait]:
    """Return all waits that began `before` a moment, by worker."""
    result: list[Wait] = []
    for worker in state.fleet:
        if worker.leaving:
            result += _leaving(worker) if worker.since < before else []
        elif not worker.session:
            result += _absent(context, state, worker) if worker.since < before else []
        else:
            result += _working(context, state, worker, before)
    return result


def descriptions(context: JobContext, state: JobState, now: float) -> list[str]:
    """Return all waits in words, such as `generation-1 to load actor version 3 (12 s)`, longest wait first."""
    ordered = sorted(waits(context, state), key=lambda wait: wait.since)
    return [f"{wait.description} ({max(0.0, now - wait.since):.0f} s)" for wait in ordered]


def overdue(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """Return what follows from waits that took too long: a stuck worker restarts, an absent one that is needed fails a
    job whose workers nobody else brings back."""
    limit = context.spec.run_policy.start_timeout_seconds
    decisions: list[Decision] = []
    for wait in waits(context, state, now - limit):
        if now - wait.since <= limit + wait.allowance:
            continue
        message = f"waited {now - wait.since:.0f} s for {wait.description}"
        if wait.stuck:
            decisions.append(ExitWorker(wait.worker, ExitCode.RESTART, message))
        elif wait.fatal:
            failure = pb.Failure(
                reason="TimedOut",
                field="spec.runPolicy.startTimeoutSeconds",
                message=message,
                exit_code=ExitCode.FAILED,
            )
            decisions.append(Finish("Failed", failure))
    return decisions


def _leaving(worker: Worker) -> list[Wait]:
    return [Wait(worker.name, f"{worker.name} to restart", worker.since, False, True)]


def _absent(context: JobContext, state: JobState, worker: Worker) -> list[Wait]:
    others = any(other.session for other in state.fleet.of(worker.group) if other is not worker)
    fatal = not context.awaits_workers and (worker.rank is not None or not others)
    verb = "come back" if worker.seen else "register"
    why = f": {worker.refused}" if worker.refused else ""
    return [Wait(worker.name, f"{worker.name} to {verb}{why}", worker.since, False, fatal)]


def _working(context: JobContext, state: JobState, worker: Worker, before: float) -> list[Wait]:
    slow = worker.slow_command
    if slow is not None:
        # Loading has no sign of life of its own; training and saving may be one long computation, which breathes.
        since = (
            slow.sent
            if slow.kind in (CommandKind.BECOME, CommandKind.LOAD)
            else max(slow.sent, worker.last_progress, worker.last_computing)
        )
        return [Wait(worker.name, f"{worker.name} to {slow.detail}", since, True, False)] if since < before else []
    moves = [item for item in worker.pending.values() if item.kind in (CommandKind.MIGRATE, CommandKind.WITHDRAW)]
    late = [Wait(worker.name, f"{worker.name} to {item.detail}", item.sent, True, False) for item in moves]
    if worker.last_progress >= before or late:
        return [wait for wait in late if wait.since < before]
    decoding, scoring = state.ledger.decoding_on(worker.name), state.ledger.scoring_on(worker.name)
    work = [f"decode {decoding} samples"] * bool(decoding) + [f"score {scoring} tasks"] * bool(scoring)
    if not work:
        return []
    reward = context.spec.models.reward
    allowance = float(reward.timeout_seconds * (reward.retries + 1)) if scoring else 0.0
    return [Wait(worker.name, f"{worker.name} to {' and '.join(work)}", worker.last_progress, True, False, allowance)]
