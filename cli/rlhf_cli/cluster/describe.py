"""`rlhf describe`: everything that can be said of one job, the most important first. Pure.

Rule: sections without content are left out; long lists are cut and say by how much, those in trouble first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rich.text import Text

from rlhf_cli.cluster.columns import Cell, columns, paragraph
from rlhf_cli.cluster.listing import phase
from rlhf_cli.cluster.sentence import sentence
from rlhf_cli.cluster.stored import Stored, age, first_line, moment, number, shortened
from rlhf_cli.cluster.timeline import Iteration
from rlhf_cli.cluster.workers import Worker, event_time, reasons, telling
from rlhf_cli.console import duration

Json = Mapping[str, Any]

PODS_SHOWN: Final = 16
EVENTS_SHOWN: Final = 12
ITERATIONS_SHOWN: Final = 5
_STATUS_STYLES: Final = {"True": "", "False": "dim", "Unknown": "yellow"}
_GOOD: Final = frozenset({"Ready", "Completed"})


@dataclass(frozen=True)
class Facts:
    """All that was read."""

    job: Stored
    pods: Sequence[Worker]
    events: Sequence[Json]
    """Of the job and of its pods."""
    past: Sequence[Iteration]
    operator_age: timedelta | None
    """Since the operator last renewed its Lease; None when that could not be read."""
    missing: Sequence[str] = ()
    """What could not be read, and why."""


def describe(facts: Facts, now: datetime, width: int | None) -> list[Text]:
    """The whole text."""
    job = facts.job
    lines = paragraph(Text(sentence(job, facts.pods, facts.operator_age, now), style="bold"), width)
    sections = (
        ("", columns([["", ""], *_summary(job, now)], width, wrap=True)[1:]),
        ("Conditions", _conditions(job, now, width)),
        ("", [Text(each) for each in job.last_log]),
        ("Groups", _groups(job, width)),
        ("Pods", _pods(facts.pods, now, width)),
        ("Last iterations", _iterations(facts.past, width)),
        ("Events", _events(facts.events, job, now, width)),
    )
    for title, found in sections:
        if found:
            lines += [Text(), *([Text(title, style="bold")] if title else []), *found]
    lines += [Text(), *(Text(f"not shown: {each}", style="yellow") for each in facts.missing)] if facts.missing else []
    return lines


def _summary(job: Stored, now: datetime) -> list[list[Cell]]:
    status, progress = job.status, job.progress
    rows: list[list[Cell]] = [["Job", f"{job.namespace}/{job.name}"]]
    rows.append(["Algorithm", str(status.get("algorithm") or next(iter(job.spec.get("algorithm") or {}), ""))])
    rows.append(["Phase", phase(job)])
    if progress:
        rows.append(["Progress", _progress(job, now)])
    rows.append(["Created", _when(job.created, now)])
    for name, field in (("Started", "startTime"), ("Ended", "completionTime")):
        if then := moment(status.get(field)):
            rows.append([name, _when(then, now)])
    if checkpoint := status.get("lastCheckpoint"):
        at = f"iteration {checkpoint.get('iteration')}, {age(moment(checkpoint.get('time')), now)} ago"
        rows.append(["Checkpoint", f"{at}, {checkpoint.get('path')}"])
    if restarts := _restarts(job, now):
        rows.append(["Restarts", restarts])
    for name, field in (("Tail migration", "interStage"), ("Training", "intraStage"), ("Speculation", "speculation")):
        if text := (status.get("plan") or {}).get(field):
            rows.append([name, str(text)])
    if (pool := status.get("migrationPool") or {}).get("replicas"):
        held = f"{pool['replicas']} of {pool.get('generationReplicas')} generation workers keep the long tail"
        rows.append(["Pool", f"{held} (below {pool['threshold']} samples)" if pool.get("threshold") else held])
    return rows


def _progress(job: Stored, now: datetime) -> str:
    progress = job.progress
    parts = [f"{progress.get('summary')} iterations"]
    for name, field, digits in (("reward", "reward", 3), ("kl", "kl", 3), ("kl/token", "klPerToken", 4)):
        if text := number(progress.get(field), digits):
            parts.append(f"{name} {text}")
    if speed := number(progress.get("samplesPerSecond"), 1):
        parts.append(f"{speed} samples/s")
    if skipped := progress.get("nonFiniteSteps"):
        parts.append(f"{skipped} steps skipped (not finite)")
    if left := job.seconds_left:
        parts.append(f"{duration(left)} left")
    read = age(moment(progress.get("lastUpdateTime")), now)
    return ", ".join(parts) + (f" (as of {read} ago)" if read and not job.finished else "")


def _restarts(job: Stored, now: datetime) -> str:
    restarts = job.status.get("restarts") or {}
    failures, disruptions = int(restarts.get("failures") or 0), int(restarts.get("disruptions") or 0)
    if not failures and not disruptions:
        return ""
    limit = (job.spec.get("runPolicy") or {}).get("backoffLimit")
    forgiven = f" of {limit} that are forgiven" if limit is not None else ""
    told = f"{failures} failures{forgiven}, {disruptions} disruptions"
    if reason := restarts.get("lastReason"):
        told += f"; the last, {age(moment(restarts.get('lastTime')), now)} ago: {reason}"
    return told


def _conditions(job: Stored, now: datetime, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    for each in job.status.get("conditions") or []:
        status = str(each.get("status"))
        style = _STATUS_STYLES.get(status, "")
        since = age(moment(each.get("lastTransitionTime")), now)
        cells = [str(each.get("type")), status, str(each.get("reason")), since, first_line(each)]
        rows.append([Text(cell, style=style) for cell in cells])
    return _table(["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], rows, width)


def _groups(job: Stored, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    for each in job.status.get("groups") or []:
        ready, desired = int(each.get("ready") or 0), int(each.get("desired") or 0)
        style = "green" if ready >= desired else "yellow"
        count = Text(f"{ready}/{desired}", style=style)
        gpus = (job.spec.get(str(each.get("name"))) or {}).get("gpusPerReplica")
        counts = [_some(each.get(field)) for field in ("failed", "restarts", "epoch")]
        rows.append([str(each.get("name")), count, _some(gpus), *counts])
    return _table(["GROUP", "READY", "GPUS", "FAILED", "RESTARTS", "EPOCH"], rows, width)


def _pods(pods: Sequence[Worker], now: datetime, width: int | None) -> list[Text]:
    order = sorted(pods, key=lambda each: each.well) if len(pods) > PODS_SHOWN else list(pods)
    rows: list[list[Cell]] = []
    why = reasons(order)
    for each in order[:PODS_SHOWN]:
        state = Text(each.state, style="green" if each.state in _GOOD else "red" if each.told else "yellow")
        name = f"{each.name} (pool)" if each.in_pool else each.name
        rows.append(
            [name, state, each.node, _some(each.restarts), age(each.pod.created, now), shortened(why[each.name])]
        )
    lines = _table(["POD", "STATE", "NODE", "RESTARTS", "AGE", "WHY"], rows, width)
    if (more := order[PODS_SHOWN:]) and lines:
        well = sum(each.well for each in more)
        lines.append(Text(f"  and {len(more)} more, {well} of them well", style="dim"))
    return lines


def _iterations(past: Sequence[Iteration], width: int | None) -> list[Text]:
    shown = list(past)[-ITERATIONS_SHOWN:]
    stages = list(dict.fromkeys(stage for each in shown for stage in each.stages))
    rows: list[list[Cell]] = []
    for each in shown:
        taken = f"{each.seconds:.1f}s" if each.seconds is not None else "under way"
        spent = [f"{each.stages[stage]:.1f}s" if stage in each.stages else "" for stage in stages]
        row = [str(each.number), number(each.reward, 3), number(each.samples_per_second, 1), taken, *spent]
        rows.append(list(row))
    heading = ["ITERATION", "REWARD", "SAMPLES/S", "TOOK", *(stage.upper() for stage in stages)]
    return columns([heading, *rows], width, indent=2) if rows else []


def _events(events: Iterable[Json], job: Stored, now: datetime, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    for each in telling(events)[-EVENTS_SHOWN:]:
        about = str((each.get("regarding") or {}).get("name") or "").removeprefix(f"{job.name}-")
        style = "yellow" if each.get("type") == "Warning" else ""
        note = shortened(" ".join(str(each.get("note") or "").split()))
        times = int((each.get("series") or {}).get("count") or each.get("deprecatedCount") or 1)
        row = [age(event_time(each), now), str(each.get("reason")), "" if about == job.name else about]
        rows.append([*(Text(cell, style=style) for cell in row), note + (f" (x{times})" if times > 1 else "")])
    return _table(["AGO", "REASON", "POD", "MESSAGE"], rows, width)


def _table(heading: list[Cell], rows: list[list[Cell]], width: int | None) -> list[Text]:
    return columns([heading, *rows], width, wrap=True, indent=2) if rows else []


def _when(then: datetime | None, now: datetime) -> str:
    return f"{then:%Y-%m-%d %H:%M:%S} UTC, {age(then, now)} ago" if then else ""


def _some(count: Any) -> str:
    return str(count) if count else ""
