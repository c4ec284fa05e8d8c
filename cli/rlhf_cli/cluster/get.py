"""`rlhf get`: list jobs as a table or as objects, once or as they change."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import yaml
from rich.console import Group
from rich.live import Live
from rich.text import Text

from rlhf_cli.cluster.api import list_watch
from rlhf_cli.cluster.cluster_job import ClusterJob, age, moment, number
from rlhf_cli.cluster.cluster_session import ClusterSession, now
from rlhf_cli.console import Cell, columns, duration
from rlhf_common import names
from rlhf_common.conditions import ConditionType, RunningReason

Json = dict[str, Any]

PHASE_STYLES: Final = {
    RunningReason.RUNNING: "green",
    RunningReason.COMPLETE: "bold green",
    RunningReason.FAILED: "bold red",
    RunningReason.RECOVERING: "red",
    RunningReason.UNSCHEDULABLE: "red",
    RunningReason.RELEASED: "red",
    RunningReason.STARTING: "yellow",
    RunningReason.CHECKPOINTING: "yellow",
    RunningReason.STOPPING: "yellow",
    RunningReason.QUEUED: "yellow",
    RunningReason.PENDING: "yellow",
    RunningReason.SUSPENDED: "dim",
}
_HEADING: Final = ("NAME", "ALGORITHM", "PHASE", "ITERATION", "REWARD", "SAMPLES/S", "LEFT", "AGE")
_WIDE_HEADING: Final = ("WORKERS", "STAGE", "POOL", "RESTARTS", "CHECKPOINT", "MESSAGE")


@dataclass(frozen=True)
class GetOptions:
    """Arguments of `rlhf get`."""

    jobs: tuple[str, ...] = ()
    all_namespaces: bool = False
    selector: str = ""
    output_format: str = ""
    """wide, name, json, yaml, or empty for the table."""
    watch: bool = False


async def get(session: ClusterSession, options: GetOptions) -> int:
    """Print the jobs in the requested format. Return the exit code."""
    if options.watch:
        return await _watch(session, options)
    if options.jobs:
        bodies = [dict((await session.job(name)).body) for name in options.jobs]
    else:
        bodies, _ = await session.api.listing(names.PLURAL, _namespace(session, options), **_selectors(options))
    if options.output_format in ("json", "yaml"):
        single = len(options.jobs) == 1
        session.out.file.write(object_text(bodies[0] if single else _list(bodies), options.output_format))
        return 0
    jobs = [ClusterJob(body) for body in bodies]
    if options.output_format == "name":
        session.write(f"{names.SINGULAR}.{names.GROUP}/{job.name}" for job in jobs)
        return 0
    lines = _table(session, options, jobs)
    session.write(lines)
    if not lines:
        session.note(_no_jobs(session, options))
    return 0


def object_text(body: Json, output_format: str) -> str:
    """Return an object as `json` or `yaml`, without its managed fields."""
    if output_format == "json":
        return json.dumps(_without_managed_fields(body), indent=4, ensure_ascii=False) + "\n"
    return yaml.safe_dump(_without_managed_fields(body), sort_keys=False, allow_unicode=True, width=120)


def job_table(
    jobs: Iterable[ClusterJob], now: datetime, width: int | None, *, namespaces: bool = False, wide: bool = False
) -> list[Text]:
    """Return the lines of the table, heading first; an empty list when there are no jobs."""
    rows: list[list[Cell]] = [_row(job, now, namespaces, wide) for job in jobs]
    if not rows:
        return []
    heading = [*(["NAMESPACE"] if namespaces else []), *_HEADING, *(_WIDE_HEADING if wide else ())]
    return columns([heading, *rows], width)


def phase_text(job: ClusterJob) -> Text:
    """Return the phase in its colour; if Planned is False and the phase is Pending, the reason of Planned."""
    planned = job.condition(ConditionType.PLANNED)
    if planned.get("status") == "False" and job.phase == RunningReason.PENDING:
        return Text(str(planned.get("reason")), style="bold red")
    styles = {reason.value: style for reason, style in PHASE_STYLES.items()}
    return Text(job.phase, style=styles.get(job.phase, ""))


def _row(job: ClusterJob, now: datetime, namespaces: bool, wide: bool) -> list[Cell]:
    progress = job.progress
    row: list[Cell] = [
        *([job.namespace] if namespaces else []),
        Text(job.name, style="bold"),
        str(job.status.get("algorithm") or next(iter(job.spec.get("algorithm") or {}), "")),
        phase_text(job),
        str(progress.get("summary") or f"0/{job.iterations}"),
        number(progress.get("reward"), 3),
        number(progress.get("samplesPerSecond"), 1),
        duration(job.seconds_left) if job.seconds_left else "",
        age(job.created, now),
    ]
    return row + _wide_cells(job, now) if wide else row


def _wide_cells(job: ClusterJob, now: datetime) -> list[Cell]:
    groups = [group for group in job.status.get("groups") or [] if group.get("name") != "coordinator"]
    ready, desired = (sum(int(group.get(key) or 0) for group in groups) for key in ("ready", "desired"))
    restarts = job.status.get("restarts") or {}
    checkpoint = job.status.get("lastCheckpoint") or {}
    checkpoint_age = age(moment(checkpoint.get("time")), now)
    has_checkpoint = checkpoint.get("iteration") is not None and checkpoint_age
    return [
        f"{ready}/{desired}" if groups else "",
        str(job.progress.get("stage") or ""),
        str((job.status.get("migrationPool") or {}).get("summary") or ""),
        str(int(restarts.get("failures") or 0) + int(restarts.get("disruptions") or 0)) if restarts else "",
        f"{checkpoint['iteration']} ({checkpoint_age} ago)" if has_checkpoint else "",
        str(job.condition(ConditionType.RUNNING).get("message") or ""),
    ]


async def _watch(session: ClusterSession, options: GetOptions) -> int:
    """Show a table that updates itself; in a pipe or another format, print each job again when it has changed."""
    selectors = _selectors(options)
    if len(options.jobs) == 1:
        await session.job(options.jobs[0])
        selectors["fieldSelector"] = f"metadata.name={options.jobs[0]}"
    changes = list_watch(session.api, names.PLURAL, _namespace(session, options), session.note, **selectors)
    if session.live and options.output_format in ("", "wide"):
        with Live(console=session.out, auto_refresh=False, vertical_overflow="crop") as live:
            async for objects in changes:
                jobs = [ClusterJob(body) for (_, name), body in sorted(objects.items()) if _is_wanted(name, options)]
                lines = _table(session, options, jobs) or [Text(_no_jobs(session, options), style="dim")]
                live.update(Group(*lines), refresh=True)
        return 0
    printed: dict[tuple[str, str], str] = {}
    heading = True
    async for objects in changes:
        wanted = [(key, body) for key, body in sorted(objects.items()) if _is_wanted(key[1], options)]
        # The table contains all jobs, so that its columns do not move from change to change.
        lines = _table(session, options, [ClusterJob(body) for _, body in wanted])
        for index, (key, body) in enumerate(wanted):
            version = str(body["metadata"]["resourceVersion"])
            if printed.get(key) != version:
                name = f"{names.SINGULAR}.{names.GROUP}/{key[1]}"
                rows = [*(lines[:1] if heading else []), lines[index + 1]]
                session.write(_object_lines(options, body) or ([name] if options.output_format == "name" else rows))
                heading, printed[key] = False, version
    return 0


def _object_lines(options: GetOptions, body: Json) -> list[str]:
    """Return the lines of one object in a stream of objects; none for formats other than json and yaml."""
    if options.output_format not in ("json", "yaml"):
        return []
    separator = "---\n" if options.output_format == "yaml" else ""
    return [separator + object_text(body, options.output_format).rstrip("\n")]


def _table(session: ClusterSession, options: GetOptions, jobs: Sequence[ClusterJob]) -> list[Text]:
    wide = options.output_format == "wide"
    return job_table(jobs, now(), session.width, namespaces=options.all_namespaces, wide=wide)


def _is_wanted(name: str, options: GetOptions) -> bool:
    return not options.jobs or name in options.jobs


def _namespace(session: ClusterSession, options: GetOptions) -> str | None:
    return None if options.all_namespaces else session.namespace


def _selectors(options: GetOptions) -> dict[str, str]:
    return {"labelSelector": options.selector} if options.selector else {}


def _no_jobs(session: ClusterSession, options: GetOptions) -> str:
    if options.all_namespaces:
        return "no RLHFJob in any namespace"
    return f"no RLHFJob in namespace {session.namespace}; -A looks in all"


def _list(bodies: list[Json]) -> Json:
    return {"apiVersion": "v1", "kind": "List", "items": bodies}


def _without_managed_fields(body: Json) -> Json:
    if body.get("kind") == "List":
        return body | {"items": [_without_managed_fields(item) for item in body["items"]]}
    return body | {"metadata": {key: value for key, value in body["metadata"].items() if key != "managedFields"}}
