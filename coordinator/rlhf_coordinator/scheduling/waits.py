"""The waits of the job, for the status and the time-outs, and descriptions of samples that keep failing.

Rule: pure.
"""

import math
from dataclasses import dataclass
from typing import Final

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.scheduling.decisions import Decision, ExitWorker, Finish
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.sample import Sample, SampleState
from rlhf_coordinator.state.worker import COUNTED_COMMANDS, CommandKind, Worker

FAILURES_SHOWN: Final = 8
"""Most samples that the status names."""


@dataclass(frozen=True)
class Wait:
    """One obstacle that the job waits for."""

    worker: str
    description: str
    """Worker and task: `generation-1 to load actor version 3`."""
    since: float
    """Moment from which the wait counts, in seconds of the monotonic clock."""
    stuck: bool
    """Whether the worker is connected and has the work: it restarts when the wait is overdue."""
    fatal: bool
    """Whether an overdue wait fails the job, unless `stuck`."""
    allowance: float = 0.0
    """Additional seconds beyond spec.runPolicy.startTimeoutSeconds, for tries of rewards."""
    limit: float = math.inf
    """Seconds after which it is overdue, if known to be less than spec.runPolicy.startTimeoutSeconds."""
    cause: str = ""
    """Ranks that may be the reason, in words; empty if unknown."""


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
    """Return all waits in words, such as `generation-1 to load actor version 3 (12 s)`, longest wait first, and at the
    end that for the evaluation."""
    ordered = sorted(waits(context, state), key=lambda wait: wait.since)
    shown = [f"{wait.description} ({max(0.0, now - wait.since):.0f} s)" for wait in ordered]
    since = state.evaluation.waits_since
    return shown if not since else [*shown, f"{state.evaluation.progress()} ({max(0.0, now - since):.0f} s)"]


def overdue(context: JobContext, state: JobState, now: float) -> list[Decision]:
    """Return the decisions on overdue waits: a stuck worker restarts, and a fatal wait fails the job."""
    most = context.spec.run_policy.start_timeout_seconds
    decisions: list[Decision] = []
    for wait in waits(context, state, now - _of_training(context, state)):
        limit = min(most, wait.limit)
        if now - wait.since <= limit + wait.allowance:
            continue
        message = f"waited {now - wait.since:.0f} s for {wait.description}"
        if wait.stuck:
            more = f", and the longest reward {wait.allowance:.0f} s" if wait.allowance else ""
            bound = f"spec.runPolicy.startTimeoutSeconds allows {most} s without progress{more}"
            if limit < most:
                bound = (
                    f"spec.runPolicy.hangTimeoutSeconds allows {limit:.0f} s, as ranks always progressed much faster"
                )
            because = f"; {wait.cause}" if wait.cause else ""
            decisions.append(ExitWorker(wait.worker, ExitCode.RESTART, f"{message}: {bound}{because}", stuck=True))
        elif wait.fatal:
            failure = pb.Failure(
                reason="TimedOut",
                field="spec.runPolicy.startTimeoutSeconds",
                message=message,
                exit_code=ExitCode.FAILED,
            )
            decisions.append(Finish("Failed", failure))
    return decisions


def failed_sample(state: JobState, sample: Sample) -> str:
    """Describe the number of a batch sample's decoding failures, and the last one."""
    line = f" (line {state.prompt_lines[sample.index]} of the prompts)" if state.prompt_lines else ""
    return decode_failure(f"sample {sample.index} of iteration {state.iteration}{line}", sample)


def decode_failure(name: str, sample: Sample) -> str:
    """Describe the number of the decoding failures of a sample with this name, and the last one."""
    faults = sample.faults
    if not faults.count:
        return f"{name} could not be decoded"
    times = "once" if faults.count == 1 else f"{faults.count} times"
    return f"{name} could not be decoded, {times}, the last time on {faults.worker}: {faults.why}"


def sample_failures(state: JobState) -> list[str]:
    """Describe at most FAILURES_SHOWN samples that failed, are isolated, or caused their last decoding failure.

    Those that failed first come last.
    """
    samples = [state.ledger.samples[index] for index in reversed(state.ledger.faulted)]
    shown = [sample for sample in samples if sample.failed or sample.isolated or sample.faults.proven]
    return [failed_sample(state, sample) + _what_follows(sample) for sample in shown[:FAILURES_SHOWN]]


def _what_follows(sample: Sample) -> str:
    if sample.failed:
        return "; the iteration continues without it"
    if sample.state in (SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING):
        return "; it is tried again" + (", alone" if sample.isolated else "")
    return "; another worker could"


def _leaving(worker: Worker) -> list[Wait]:
    return [Wait(worker.name, f"{worker.name} to restart", worker.since, False, True)]


def _absent(context: JobContext, state: JobState, worker: Worker) -> list[Wait]:
    others = any(other.session for other in state.fleet.in_group(worker.group) if other is not worker)
    fatal = not context.awaits_workers and (worker.rank is not None or not others)
    verb = "come back" if worker.seen else "register"
    why = f": {worker.refused}" if worker.refused else ""
    return [Wait(worker.name, f"{worker.name} to {verb}{why}", worker.since, False, fatal)]


def _last_sign(state: JobState, worker: Worker, kind: CommandKind) -> float:
    """Return when a worker in a slow command last showed progress; 0 in a command that prepares it."""
    if kind in (CommandKind.BECOME, CommandKind.LOAD):
        return 0.0
    if kind in COUNTED_COMMANDS and worker.heartbeat.training_pieces:
        # The progress of any rank counts for all of them.
        return max(rank.last_piece for rank in state.fleet.ranks())
    return max(worker.last_progress, worker.last_computing)


def _of_training(context: JobContext, state: JobState) -> float:
    """Return the seconds for which all training ranks may be without progress.

    The learned limit holds once every rank has a result of a Train.
    """
    policy = context.spec.run_policy
    if any(rank.last_train is None for rank in state.fleet.ranks()):
        return policy.start_timeout_seconds
    return state.fleet.pace.limit(policy.hang_timeout_seconds, policy.start_timeout_seconds)


def _doing(worker: Worker) -> str:
    """Describe what a worker reports as its current activity in a long command."""
    if worker.heartbeat.waits_for:
        return f", which waits for {worker.heartbeat.waits_for}"
    return f", now {worker.heartbeat.stage}" if worker.heartbeat.stage else ""


def _standing_still(state: JobState, kind: CommandKind) -> str:
    """Describe which ranks in a slow command wait for no other rank; empty unless others wait, and outside a Train
    or Accumulate."""
    if kind not in COUNTED_COMMANDS:
        return ""
    training = [rank for rank in state.fleet.ranks() if rank.slow_command is not None]
    hanging = [rank.name for rank in training if not rank.heartbeat.waits_for]
    if not hanging or len(hanging) == len(training):
        return ""  # a single rank, or no rank that reports it
    return f"of its ranks {', '.join(hanging)} {'wait' if len(hanging) > 1 else 'waits'} for none of the others"


def _working(context: JobContext, state: JobState, worker: Worker, before: float) -> list[Wait]:
    slow = worker.slow_command
    if slow is not None:
        since = max(slow.sent, _last_sign(state, worker, slow.kind))
        if since >= before:
            return []
        description = f"{worker.name} to {slow.detail}{_doing(worker)}"
        counted = slow.kind in COUNTED_COMMANDS and worker.heartbeat.training_pieces
        limit = _of_training(context, state) if counted else math.inf
        cause = _standing_still(state, slow.kind)
        return [Wait(worker.name, description, since, True, False, limit=limit, cause=cause)]
    moves = [item for item in worker.pending.values() if item.kind in (CommandKind.MIGRATE, CommandKind.WITHDRAW)]
    late = [Wait(worker.name, f"{worker.name} to {item.detail}", item.sent, True, False) for item in moves]
    if worker.last_progress >= before or late:
        return [wait for wait in late if wait.since < before]
    ledgers = [state.ledger] if state.evaluation.ledger is None else [state.ledger, state.evaluation.ledger]
    decoding = sum(ledger.decoding_on(worker.name) for ledger in ledgers)
    scoring = sum(ledger.scoring_on(worker.name) for ledger in ledgers)
    work = [f"decode {decoding} samples"] * bool(decoding) + [f"score {scoring} tasks"] * bool(scoring)
    if not work:
        return []
    allowance = max((entry.reward.longest for entry in context.spec.models.all_rewards), default=0) if scoring else 0
    return [
        Wait(worker.name, f"{worker.name} to {' and '.join(work)}", worker.last_progress, True, False, float(allowance))
    ]
