"""What happens when a process of a local run ends: the decision, as a pure function.

Rule: a process that ends non-zero comes back, as a kubelet would bring it back; how often is limited for the whole job
by runPolicy.backoffLimit, never reset, as Kubernetes counts. RESTART is a request and is not counted. Some exit codes
of the coordinator are verdicts about the job: no restart can change them. Owns no process, no clock.
"""

import signal
from dataclasses import dataclass
from typing import Final

from rlhf_api.names import ExitCode, Group

FIRST_DELAY_SECONDS: Final = 0.2
"""Enough for ports and devices to be released; a lost rank must not hold up its group for longer."""
LAST_DELAY_SECONDS: Final = 10.0
"""A process that keeps failing is tried often enough to see the cause go away."""
HEALTHY_SECONDS: Final = 120.0
"""A process that ran this long was well: its next failure starts again at the first delay."""
VERDICTS: Final = frozenset(
    {
        ExitCode.USAGE,
        ExitCode.USER_CODE,
        ExitCode.BAD_MODEL,
        ExitCode.BAD_DATA,
        ExitCode.STORAGE,
        ExitCode.ADDRESS_IN_USE,
        ExitCode.INTERRUPTED,
    }
)
"""Exit codes with which the coordinator ends the job."""


@dataclass(frozen=True)
class ProcessEnd:
    """A process ended."""

    group: Group
    code: int
    """Exit code; negative: the signal that ended it."""
    seconds: float
    """How long it ran."""
    streak: int
    """Ends in a row before this one without a healthy time between."""
    counted: int
    """Counted restarts of the whole job so far."""


@dataclass(frozen=True)
class RestartProcess:
    """Start it again."""

    delay: float
    streak: int
    counted: bool


@dataclass(frozen=True)
class ProcessDone:
    """The process had nothing more to do; the job goes on."""


@dataclass(frozen=True)
class EndJob:
    """The job is over."""

    code: int
    reason: str
    told: bool = False
    """The coordinator told the workers to leave."""


def decide_after_end(
    ended: ProcessEnd, backoff_limit: int, *, stopping: bool = False
) -> RestartProcess | ProcessDone | EndJob:
    """`stopping`: the user asked the job to stop, so the coordinator's end is the job's, whatever its code."""
    coordinator = ended.group is Group.COORDINATOR
    if ended.code == ExitCode.OK:
        return EndJob(ExitCode.OK, "the coordinator finished", told=True) if coordinator else ProcessDone()
    if coordinator and (stopping or ended.code in VERDICTS):
        # SIGTERM, by which it is asked to stop, ends it at once while it is still starting.
        stopped = ended.code in (ExitCode.INTERRUPTED, -signal.SIGTERM)
        code = ExitCode.INTERRUPTED if stopped else max(ended.code, ExitCode.FAILED)
        reason = f"the coordinator ended with {describe_exit(ended.code)}"
        return EndJob(int(code), reason, told=ended.code == ExitCode.INTERRUPTED)
    streak = 0 if ended.seconds >= HEALTHY_SECONDS else ended.streak
    delay = min(FIRST_DELAY_SECONDS * 2.0 ** min(streak, 30), LAST_DELAY_SECONDS)
    if ended.code == ExitCode.RESTART:
        return RestartProcess(delay, streak + 1, counted=False)
    if ended.counted >= backoff_limit:
        return EndJob(
            ExitCode.FAILED,
            f"{ended.group} ended with {describe_exit(ended.code)} and all {backoff_limit} restarts of "
            "spec.runPolicy.backoffLimit are used",
        )
    return RestartProcess(delay, streak + 1, counted=True)


def describe_exit(code: int) -> str:
    """`exit code 1`, `signal 9 (out of memory, or killed)`: how a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}" + (" (killed, or out of memory)" if code == -9 else "")
