"""Decides what follows the end of a process of a local run. Pure: it owns no process and no clock.

Rule: a process that ends with an error is restarted within runPolicy.backoffLimit, which the processes share. Exit code
RESTART does not count. Some exit codes of the coordinator end the job.
"""

import signal
from dataclasses import dataclass
from typing import Final

from rlhf_common.names import ExitCode, Group

FIRST_DELAY_SECONDS: Final = 0.2
"""Seconds before the first restart."""
LAST_DELAY_SECONDS: Final = 10.0
"""Longest delay in seconds."""
HEALTHY_SECONDS: Final = 120.0
"""Seconds after which a process counts as healthy: the delay after its next end is the first one again."""
VERDICTS: Final = frozenset(
    {
        ExitCode.USAGE,
        ExitCode.USER_CODE,
        ExitCode.BAD_MODEL,
        ExitCode.BAD_DATA,
        ExitCode.STORAGE,
        ExitCode.ADDRESS_IN_USE,
        ExitCode.SAMPLE_FAILED,
        ExitCode.INTERRUPTED,
    }
)
"""Exit codes of the coordinator, besides 0, with which the job ends."""
LEAVE_SECONDS: Final = 10.0
"""Seconds that workers get to end by themselves after the coordinator tells them to leave."""
UNTOLD_LEAVE_SECONDS: Final = 2.0
"""The same in seconds where the coordinator may have ended before it told the workers."""
CHECKPOINT_SECONDS: Final = 60.0
"""Seconds that a running coordinator gets for a last checkpoint when the job ends."""
TERMINATE_SECONDS: Final = 10.0
"""Maximum seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process."""

    group: Group
    code: int
    """Exit code; a negative number is the signal that ended it."""
    seconds: float
    """Seconds that it ran."""
    streak: int
    """Restarts in a row before this end, without a healthy run between them."""
    counted: int
    """Counted restarts of the whole job so far."""


@dataclass(frozen=True)
class RestartProcess:
    """Decision: restart the process."""

    delay: float
    """Seconds until the restart."""
    streak: int
    """Restarts in a row, this one included."""
    counted: bool
    """Whether the restart counts towards runPolicy.backoffLimit."""


@dataclass(frozen=True)
class ProcessDone:
    """Decision: the process had nothing left to do; the job continues."""


@dataclass(frozen=True)
class EndJob:
    """Decision: end the job."""

    code: int
    """Exit code of the run."""
    reason: str
    workers_told: bool = False
    """Whether the coordinator told the workers to leave."""


def decide_after_end(
    ended: ProcessEnd, backoff_limit: int, *, stopping: bool = False
) -> RestartProcess | ProcessDone | EndJob:
    """Return what follows the end of a process. `stopping` means that the user asked the job to stop; then any end of
    the coordinator ends it.
    """
    coordinator = ended.group is Group.COORDINATOR
    if ended.code == ExitCode.OK:
        return EndJob(ExitCode.OK, "the coordinator finished", workers_told=True) if coordinator else ProcessDone()
    if coordinator and (stopping or ended.code in VERDICTS):
        # SIGTERM ends a coordinator at once that is still starting.
        stopped = ended.code in (ExitCode.INTERRUPTED, -signal.SIGTERM)
        code = ExitCode.INTERRUPTED if stopped else max(ended.code, ExitCode.FAILED)
        reason = f"the coordinator ended with {describe_exit(ended.code)}"
        return EndJob(int(code), reason, workers_told=ended.code == ExitCode.INTERRUPTED)
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


def restart_message(restart: RestartProcess, code: int, counted: int, backoff_limit: int) -> str:
    """Return the message to the user about a restart; `counted` includes this one."""
    limit = f" (restart {counted} of {backoff_limit})" if restart.counted else ""
    return f"ended with {describe_exit(code)}, starts again in {restart.delay:.1f} s{limit}"


def describe_exit(code: int) -> str:
    """Describe an exit code, such as `exit code 1` or `signal 9 (killed, or out of memory)`."""
    if code >= 0:
        return f"exit code {code}"
    return f"signal {-code}" + (" (killed, or out of memory)" if code == -9 else "")
