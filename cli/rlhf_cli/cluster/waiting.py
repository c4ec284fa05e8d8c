"""`rlhf wait`: what is waited for, and whether it holds, can still come, or never will. Pure but for `wait`.

Rule: a wait ends as soon as its end is decided: a job that failed or finished otherwise is told at once, with the exit
code of its failure, instead of at the time-out.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlhf_api import names
from rlhf_api.conditions import ConditionType, RunningReason
from rlhf_api.names import ExitCode
from rlhf_cli.cluster.errors import TIMED_OUT, VerbError
from rlhf_cli.cluster.follow import follow
from rlhf_cli.cluster.session import Session
from rlhf_cli.cluster.stored import Stored
from rlhf_cli.console import duration

_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_FINAL: Final = (ConditionType.COMPLETE, ConditionType.FAILED)


@dataclass(frozen=True)
class Goal:
    """What a wait is for."""

    text: str
    """As it was given."""
    kind: str
    """condition, phase, iteration, delete."""
    name: str = ""
    """Of the condition or phase."""
    status: str = "True"
    iteration: int = 0


@dataclass(frozen=True)
class Verdict:
    """A wait is over."""

    code: int
    message: str


def parse_goal(text: str) -> Goal:
    """Raises VerbError with what would be right."""
    kind, _, value = text.partition("=")
    if text == "delete":
        return Goal(text, "delete")
    if kind == "condition":
        name, _, status = value.partition("=")
        known = {each.lower(): each for each in ConditionType}
        statuses = {each.lower(): each for each in ("True", "False", "Unknown")}
        if name.lower() in known and (status or "true").lower() in statuses:
            return Goal(text, kind, known[name.lower()], statuses[(status or "true").lower()])
        raise _invalid(text, f"condition={'|'.join(ConditionType)}, with =False where meant")
    if kind == "phase":
        phases = {each.lower(): each for each in RunningReason}
        if value.lower() in phases:
            return Goal(text, kind, phases[value.lower()])
        raise _invalid(text, f"phase={'|'.join(RunningReason)}")
    if kind == "iteration" and value.isdigit():
        return Goal(text, kind, iteration=int(value))
    raise _invalid(text, "condition=Complete, phase=Running, iteration=10 or delete")


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h30m`. Raises VerbError."""
    match = _DURATION.fullmatch(text.strip())
    if not match or not any(match.groups()):
        raise VerbError(f"--timeout {text!r}: give a time such as 90s, 5m or 1h30m", ExitCode.USAGE)
    hours, minutes, seconds = (int(each or 0) for each in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def judge(goal: Goal, job: Stored | None) -> Verdict | None:
    """The end of the wait, or None while it goes on."""
    if job is None:
        if goal.kind == "delete":
            return Verdict(ExitCode.OK, "deleted")
        return Verdict(ExitCode.FAILED, f"was deleted while {goal.text} was waited for")
    if _holds(goal, job):
        return Verdict(ExitCode.OK, _met(goal, job))
    if goal.kind == "delete" or not job.finished:
        return None
    if job.holds(ConditionType.FAILED):
        reason = job.condition(ConditionType.FAILED).get("reason")
        return Verdict(job.failure_code, f"failed ({reason}): {job.told(ConditionType.FAILED)}")
    return Verdict(ExitCode.FAILED, f"is Complete, so {goal.text} will never hold")


def unattainable(goal: Goal, job: Stored) -> str:
    """Why a goal makes no sense for this job; empty when it does."""
    if goal.kind == "iteration" and goal.iteration > job.iterations:
        return f"--for {goal.text}: {job.name} has {job.iterations} iterations"
    return ""


def _holds(goal: Goal, job: Stored) -> bool:
    if goal.kind == "condition":
        return job.condition(ConditionType(goal.name)).get("status") == goal.status
    if goal.kind == "phase":
        return bool(job.condition(ConditionType.RUNNING)) and job.phase == goal.name
    return goal.kind == "iteration" and job.iteration >= goal.iteration


def _met(goal: Goal, job: Stored) -> str:
    if goal.kind == "condition" and goal.status == "True":
        condition = job.condition(ConditionType(goal.name))
        return f"{goal.name}: {condition.get('message') or condition.get('reason')}"
    return f"{goal.text} ({job.progress.get('summary') or job.phase})"


def _invalid(text: str, right: str) -> VerbError:
    return VerbError(f"--for {text!r}: give {right}", ExitCode.USAGE)


async def wait(session: Session, name: str, goal: Goal, seconds: float) -> int:
    """Waits; says transitions on standard error, the end on standard output."""
    if goal.kind != "delete" and (why := unattainable(goal, await session.job(name))):
        raise VerbError(why, ExitCode.USAGE)
    last: list[str] = [""]

    def noted(text: str) -> None:
        if text != last[0]:
            last[0] = text
            session.note(f"{name}: {text}")

    try:
        async with asyncio.timeout(seconds):
            verdict = await _end(session, name, goal, noted)
    except TimeoutError:
        told = f"{name}: {goal.text} did not come in {duration(seconds)}" + (f"; last: {last[0]}" if last[0] else "")
        raise VerbError(told, TIMED_OUT) from None
    if verdict.code != ExitCode.OK:
        raise VerbError(f"{name} {verdict.message}", verdict.code)
    session.write([f"{name}: {verdict.message}"])
    return 0


async def _end(session: Session, name: str, goal: Goal, noted: Callable[[str], None]) -> Verdict:
    uid = ""
    place = (session.namespace, name)
    selector = {"fieldSelector": f"metadata.name={name}"}
    async for objects in follow(session.api, names.PLURAL, session.namespace, session.note, **selector):
        body = objects.get(place)
        # One of the same name that was made meanwhile is another job.
        replaced = body is not None and bool(uid) and body["metadata"]["uid"] != uid
        job = None if body is None or replaced else Stored(body)
        verdict = judge(goal, job)
        if verdict is not None:
            return verdict
        if job is not None:
            uid = str(job.body["metadata"]["uid"])
            noted(job.state)
    raise AssertionError("a watch is endless")
