"""`rlhf wait`: wait until a goal holds or can no longer hold.

Rule: a wait also ends when the job finishes without the goal, except a wait for the deletion.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlhf_cli.cluster.api import list_watch
from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_cli.cluster.cluster_session import ClusterSession
from rlhf_cli.cluster.errors import TIMED_OUT, VerbError
from rlhf_cli.console import duration
from rlhf_common import names
from rlhf_common.conditions import ConditionType, RunningReason
from rlhf_common.names import ExitCode

_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


@dataclass(frozen=True)
class WaitGoal:
    """The goal of a wait."""

    text: str
    """Argument of --for, unchanged."""
    kind: str
    """One of condition, phase, iteration and delete."""
    name: str = ""
    """Name of the condition or phase; empty for other kinds."""
    status: str = "True"
    """Status that the condition must have."""
    iteration: int = 0
    """Number of iterations that must be trained."""


@dataclass(frozen=True)
class WaitResult:
    """The result of a wait."""

    code: int
    """Exit code of the command."""
    message: str


def parse_goal(text: str) -> WaitGoal:
    """Parse the goal that an argument of --for names. Raises VerbError, which names the valid forms."""
    kind, _, value = text.partition("=")
    if text == "delete":
        return WaitGoal(text, "delete")
    if kind == "condition":
        name, _, status = value.partition("=")
        conditions = {condition.lower(): condition for condition in ConditionType}
        statuses = {status.lower(): status for status in ("True", "False", "Unknown")}
        if name.lower() in conditions and (status or "true").lower() in statuses:
            return WaitGoal(text, kind, conditions[name.lower()], statuses[(status or "true").lower()])
        raise _invalid(text, f"condition={'|'.join(ConditionType)}, with =False where meant")
    if kind == "phase":
        phases = {phase.lower(): phase for phase in RunningReason}
        if value.lower() in phases:
            return WaitGoal(text, kind, phases[value.lower()])
        raise _invalid(text, f"phase={'|'.join(RunningReason)}")
    if kind == "iteration" and value.isdigit():
        return WaitGoal(text, kind, iteration=int(value))
    raise _invalid(text, "condition=Complete, phase=Running, iteration=10 or delete")


def parse_duration(text: str) -> float:
    """Parse a time such as `90`, `90s`, `5m` or `1h30m` into seconds. Raises VerbError."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not any(match.groups()):
        raise VerbError(f"--timeout {text!r}: give a time such as 90s, 5m or 1h30m", ExitCode.USAGE)
    hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def wait_result(goal: WaitGoal, job: ClusterJob | None) -> WaitResult | None:
    """Return the result of the wait for this job (None: deleted), or None while the wait goes on."""
    if job is None:
        if goal.kind == "delete":
            return WaitResult(ExitCode.OK, "deleted")
        return WaitResult(ExitCode.FAILED, f"was deleted while {goal.text} was waited for")
    if _holds(goal, job):
        return WaitResult(ExitCode.OK, _met(goal, job))
    if goal.kind == "delete" or not job.finished:
        return None
    if job.holds(ConditionType.FAILED):
        reason = job.condition(ConditionType.FAILED).get("reason")
        return WaitResult(job.failure_code, f"failed ({reason}): {job.message(ConditionType.FAILED)}")
    return WaitResult(ExitCode.FAILED, f"is Complete, so {goal.text} will never hold")


def unattainable(goal: WaitGoal, job: ClusterJob) -> str:
    """Return why the job has too few iterations for the goal; empty otherwise."""
    if goal.kind == "iteration" and goal.iteration > job.iterations:
        return f"--for {goal.text}: {job.name} has {job.iterations} iterations"
    return ""


def _holds(goal: WaitGoal, job: ClusterJob) -> bool:
    if goal.kind == "condition":
        return job.condition(ConditionType(goal.name)).get("status") == goal.status
    if goal.kind == "phase":
        return bool(job.condition(ConditionType.RUNNING)) and job.phase == goal.name
    return goal.kind == "iteration" and job.iteration >= goal.iteration


def _met(goal: WaitGoal, job: ClusterJob) -> str:
    if goal.kind == "condition" and goal.status == "True":
        condition = job.condition(ConditionType(goal.name))
        return f"{goal.name}: {condition.get('message') or condition.get('reason')}"
    return f"{goal.text} ({job.progress.get('summary') or job.phase})"


def _invalid(text: str, right: str) -> VerbError:
    return VerbError(f"--for {text!r}: give {right}", ExitCode.USAGE)


async def wait(session: ClusterSession, name: str, goal: WaitGoal, seconds: float) -> int:
    """Wait at most `seconds` until `goal` holds. Return the exit code.

    Raises VerbError when the wait ends without the goal, and ApiError.
    """
    if goal.kind != "delete" and (why := unattainable(goal, await session.job(name))):
        raise VerbError(why, ExitCode.USAGE)
    last: list[str] = [""]

    def note_change(text: str) -> None:
        if text != last[0]:
            last[0] = text
            session.note(f"{name}: {text}")

    try:
        async with asyncio.timeout(seconds):
            result = await _watch(session, name, goal, note_change)
    except TimeoutError:
        message = f"{name}: {goal.text} did not come in {duration(seconds)}" + (f"; last: {last[0]}" if last[0] else "")
        raise VerbError(message, TIMED_OUT) from None
    if result.code != ExitCode.OK:
        raise VerbError(f"{name} {result.message}", result.code)
    session.write([f"{name}: {result.message}"])
    return 0


async def _watch(session: ClusterSession, name: str, goal: WaitGoal, note_change: Callable[[str], None]) -> WaitResult:
    uid = ""
    place = (session.namespace, name)
    selector = {"fieldSelector": f"metadata.name={name}"}
    async for objects in list_watch(session.api, names.PLURAL, session.namespace, session.note, **selector):
        body = objects.get(place)
        # A job of the same name that was created meanwhile is another job.
        replaced = body is not None and bool(uid) and body["metadata"]["uid"] != uid
        job = None if body is None or replaced else ClusterJob(body)
        result = wait_result(goal, job)
        if result is not None:
            return result
        if job is not None:
            uid = str(job.body["metadata"]["uid"])
            note_change(job.state)
    raise AssertionError("a watch is endless")
