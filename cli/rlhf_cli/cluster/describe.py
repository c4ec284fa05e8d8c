"""`rlhf describe`: a description of one job.

Rule: empty sections are left out. A long list is cut, with the number of the others below. If pods are cut, those that
need attention come first.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rich.text import Text

from rlhf_api.rank_pods import gpus_a_pod
from rlhf_cli.cluster.cluster_job import ClusterJob, age, first_line, moment, number, shortened
from rlhf_cli.cluster.cluster_pod import ClusterPod, event_time, explanations, notable_events
from rlhf_cli.cluster.cluster_session import ClusterSession
from rlhf_cli.cluster.cluster_session import now as current_time
from rlhf_cli.cluster.get import phase_text
from rlhf_cli.cluster.job_details import JobDetails, PastIteration, read_details
from rlhf_cli.cluster.job_summary import summarize
from rlhf_cli.console import Cell, columns, duration, paragraph

Json = Mapping[str, Any]

PODS_SHOWN: Final = 16
EVENTS_SHOWN: Final = 12
ITERATIONS_SHOWN: Final = 5
_STATUS_STYLES: Final = {"True": "", "False": "dim", "Unknown": "yellow"}
_PLANNED: Final = {
    "Engine": "engine",
    "Tail migration": "interStage",
    "Long rounds": "longRounds",
    "Speculation": "speculation",
    "Drafting switched": "speculationSwitched",
    "Plan for devices": "drift",
}
_GOOD: Final = frozenset({"Ready", "Completed"})


async def describe(session: ClusterSession, name: str) -> int:
    """Print the description of a job. Return the exit code."""
    details = await read_details(session, name, current_time())
    session.write(description(details, current_time(), session.width))
    return 0


def description(details: JobDetails, now: datetime, width: int | None) -> list[Text]:
    """Return the lines that `rlhf describe` prints, wrapped at `width` characters; None means no limit."""
    job = details.job
    lines = paragraph(Text(summarize(job, details.pods, details.operator_age, now), style="bold"), width)
    sections = (
        ("", columns([["", ""], *_overview(job, now)], width, wrap=True)[1:]),
        ("Conditions", _conditions(job, now, width)),
        ("", [Text(line) for line in job.last_log]),
        ("Groups", _groups(job, width)),
        ("Pods", _pods(details.pods, now, width)),
        ("Last iterations", _iterations(details.iterations, width)),
        ("Largest losses", _losses(details.losses, width)),
        ("Events", _events(details.events, job, now, width)),
    )
    for title, content in sections:
        if content:
            lines += [Text(), *([Text(title, style="bold")] if title else []), *content]
    if details.missing:
        lines += [Text(), *(Text(f"not shown: {missing}", style="yellow") for missing in details.missing)]
    return lines


def _overview(job: ClusterJob, now: datetime) -> list[list[Cell]]:
    status, progress = job.status, job.progress
    rows: list[list[Cell]] = [["Job", f"{job.namespace}/{job.name}"]]
    rows.append(["Algorithm", str(status.get("algorithm") or next(iter(job.spec.get("algorithm") or {}), ""))])
    rows.append(["Phase", phase_text(job)])
    if progress:
        rows.append(["Progress", _progress(job, now)])
    rows.append(["Created", _when(job.created, now)])
    for name, field in (("Started", "startTime"), ("Ended", "completionTime")):
        if then := moment(status.get(field)):
            rows.append([name, _when(then, now)])
    if checkpoint := status.get("lastCheckpoint"):
        at = f"after {checkpoint.get('iteration')} iterations, {age(moment(checkpoint.get('time')), now)} ago"
        rows.append(["Checkpoint", f"{at}, {checkpoint.get('path')}"])
    if restarts := _restarts(job, now):
        rows.append(["Restarts", restarts])
    for name, field in _PLANNED.items():
        if text := (status.get("plan") or {}).get(field):
            rows.append([name, str(text)])
    if (pool := status.get("migrationPool") or {}).get("replicas"):
        holders = f"{pool['replicas']} of {pool.get('generationReplicas')} generation workers keep the long tail"
        rows.append(["Pool", f"{holders} (below {pool['threshold']} samples)" if pool.get("threshold") else holders])
    return rows


def _progress(job: ClusterJob, now: datetime) -> str:
    progress = job.progress
    parts = [f"{progress.get('summary')} iterations"]
    for name, field, digits in (
        ("reward", "reward", 3),
        ("kl", "kl", 3),
        ("kl/token", "klPerToken", 4),
        ("loss", "loss", 4),
    ):
        if text := number(progress.get(field), digits):
            parts.append(f"{name} {text}")
    if text := number(progress.get("evaluationReward"), 3):
        best = number(progress.get("bestEvaluationReward"), 3)
        of = f"version {progress.get('evaluationVersion')}"
        parts.append(f"evaluation {text} ({of}; best {best}, version {progress.get('bestEvaluationVersion')})")
    if speed := number(progress.get("samplesPerSecond"), 1):
        parts.append(f"{speed} samples/s")
    if skipped := progress.get("nonFiniteSteps"):
        parts.append(f"{skipped} steps skipped (not finite)")
    if left := job.seconds_left:
        parts.append(f"{duration(left)} left")
    read = age(moment(progress.get("lastUpdateTime")), now)
    return ", ".join(parts) + (f" (as of {read} ago)" if read and not job.finished else "")


def _restarts(job: ClusterJob, now: datetime) -> str:
    restarts = job.status.get("restarts") or {}
    failures, disruptions = int(restarts.get("failures") or 0), int(restarts.get("disruptions") or 0)
    if not failures and not disruptions:
        return ""
    limit = (job.spec.get("runPolicy") or {}).get("backoffLimit")
    forgiven = f" of {limit} that are forgiven" if limit is not None else ""
    text = f"{failures} failures{forgiven}, {disruptions} disruptions"
    if reason := restarts.get("lastReason"):
        text += f"; the last, {age(moment(restarts.get('lastTime')), now)} ago: {reason}"
    return text


def _conditions(job: ClusterJob, now: datetime, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    for condition in job.status.get("conditions") or []:
        status = str(condition.get("status"))
        style = _STATUS_STYLES.get(status, "")
        since = age(moment(condition.get("lastTransitionTime")), now)
        cells = [str(condition.get("type")), status, str(condition.get("reason")), since, first_line(condition)]
        rows.append([Text(cell, style=style) for cell in cells])
    return _table(["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], rows, width)


def _groups(job: ClusterJob, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    for group in job.status.get("groups") or []:
        ready, desired = int(group.get("ready") or 0), int(group.get("desired") or 0)
        style = "green" if ready >= desired else "yellow"
        count = Text(f"{ready}/{desired}", style=style)
        gpus = gpus_a_pod(job.spec, str(group.get("name")))
        counts = [_count_text(group.get(field)) for field in ("failed", "restarts", "epoch")]
        rows.append([str(group.get("name")), count, _count_text(gpus), *counts])
    return _table(["GROUP", "READY", "GPUS", "FAILED", "RESTARTS", "EPOCH"], rows, width)


def _pods(pods: Sequence[ClusterPod], now: datetime, width: int | None) -> list[Text]:
    order = sorted(pods, key=lambda pod: pod.well) if len(pods) > PODS_SHOWN else list(pods)
    rows: list[list[Cell]] = []
    explained = explanations(order)
    for pod in order[:PODS_SHOWN]:
        style = "green" if pod.state in _GOOD else "red" if pod.explanation else "yellow"
        name = f"{pod.name} (pool)" if pod.in_pool else pod.name
        why = shortened(explained[pod.name])
        pod_age = age(pod.pod.created, now)
        rows.append([name, Text(pod.state, style=style), pod.node, _count_text(pod.restarts), pod_age, why])
    lines = _table(["POD", "STATE", "NODE", "RESTARTS", "AGE", "WHY"], rows, width)
    if (more := order[PODS_SHOWN:]) and lines:
        well = sum(pod.well for pod in more)
        lines.append(_more(len(more), f", {well} of them well"))
    return lines


def _iterations(iterations: Sequence[PastIteration], width: int | None) -> list[Text]:
    shown = list(iterations)[-ITERATIONS_SHOWN:]
    stages = list(dict.fromkeys(stage for iteration in shown for stage in iteration.stages))
    rows: list[list[Cell]] = []
    for iteration in shown:
        took = f"{iteration.seconds:.1f}s" if iteration.seconds is not None else "under way"
        spent = [f"{iteration.stages[stage]:.1f}s" if stage in iteration.stages else "" for stage in stages]
        reward, speed = number(iteration.reward, 3), number(iteration.samples_per_second, 1)
        rows.append([str(iteration.number), reward, speed, took, *spent])
    heading = ["ITERATION", "REWARD", "SAMPLES/S", "TOOK", *(stage.upper() for stage in stages)]
    lines = columns([heading, *rows], width, indent=2) if rows else []
    if more := len(iterations) - len(shown):
        lines.append(_more(more, ", all earlier"))
    return lines


def _losses(losses: Sequence[str], width: int | None) -> list[Text]:
    return [line for number, words in enumerate(losses, 1) for line in paragraph(Text(f"  {number}. {words}"), width)]


def _events(events: Iterable[Json], job: ClusterJob, now: datetime, width: int | None) -> list[Text]:
    rows: list[list[Cell]] = []
    notable = notable_events(events)
    for event in notable[-EVENTS_SHOWN:]:
        pod = str((event.get("regarding") or {}).get("name") or "").removeprefix(f"{job.name}-")
        style = "yellow" if event.get("type") == "Warning" else ""
        note = shortened(" ".join(str(event.get("note") or "").split()))
        times = int((event.get("series") or {}).get("count") or event.get("deprecatedCount") or 1)
        cells = [age(event_time(event), now), str(event.get("reason")), "" if pod == job.name else pod]
        rows.append([*(Text(cell, style=style) for cell in cells), note + (f" (x{times})" if times > 1 else "")])
    lines = _table(["AGO", "REASON", "POD", "MESSAGE"], rows, width)
    if more := len(notable) - len(rows):
        lines.append(_more(more, ", all earlier"))
    return lines


def _more(count: int, note: str) -> Text:
    """Return the line below a list that is cut."""
    return Text(f"  and {count} more{note}", style="dim")


def _table(heading: list[Cell], rows: list[list[Cell]], width: int | None) -> list[Text]:
    return columns([heading, *rows], width, wrap=True, indent=2) if rows else []


def _when(then: datetime | None, now: datetime) -> str:
    return f"{then:%Y-%m-%d %H:%M:%S} UTC, {age(then, now)} ago" if then else ""


def _count_text(count: Any) -> str:
    return str(count) if count else ""
