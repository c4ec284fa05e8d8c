"""`rlhf get`: the table of jobs. Pure."""

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from rich.text import Text

from rlhf_api.conditions import ConditionType, RunningReason
from rlhf_cli.cluster.columns import Cell, columns
from rlhf_cli.cluster.stored import Stored, age, moment, number
from rlhf_cli.console import duration

PHASE_STYLES: Final = {
    RunningReason.RUNNING: "green",
    RunningReason.COMPLETE: "bold green",
    RunningReason.FAILED: "bold red",
    RunningReason.RECOVERING: "red",
    RunningReason.UNSCHEDULABLE: "red",
    RunningReason.RELEASED: "red",
    RunningReason.STARTING: "yellow",
    RunningReason.CHECKPOINTING: "yellow",
    RunningReason.QUEUED: "yellow",
    RunningReason.PENDING: "yellow",
    RunningReason.SUSPENDED: "dim",
}
_HEADING: Final = ("NAME", "ALGORITHM", "PHASE", "ITERATION", "REWARD", "SAMPLES/S", "LEFT", "AGE")
_WIDE_HEADING: Final = ("WORKERS", "STAGE", "POOL", "RESTARTS", "CHECKPOINT", "MESSAGE")


def table(
    jobs: Iterable[Stored], now: datetime, width: int | None, *, namespaces: bool = False, wide: bool = False
) -> list[Text]:
    """Lines; nothing for no jobs."""
    rows: list[list[Cell]] = [_row(job, now, namespaces, wide) for job in jobs]
    if not rows:
        return []
    heading = [*(["NAMESPACE"] if namespaces else []), *_HEADING, *(_WIDE_HEADING if wide else ())]
    return columns([heading, *rows], width)


def phase(job: Stored) -> Text:
    """The phase in its colour; Invalid manifests are named, because their phase is a mere Pending."""
    planned = job.condition(ConditionType.PLANNED)
    if planned.get("status") == "False" and job.phase == RunningReason.PENDING:
        return Text(str(planned.get("reason")), style="bold red")
    known = {each.value: style for each, style in PHASE_STYLES.items()}
    return Text(job.phase, style=known.get(job.phase, ""))


def _row(job: Stored, now: datetime, namespaces: bool, wide: bool) -> list[Cell]:
    progress = job.progress
    row: list[Cell] = [
        *([job.namespace] if namespaces else []),
        Text(job.name, style="bold"),
        str(job.status.get("algorithm") or next(iter(job.spec.get("algorithm") or {}), "")),
        phase(job),
        str(progress.get("summary") or f"0/{job.iterations}"),
        number(progress.get("reward"), 3),
        number(progress.get("samplesPerSecond"), 1),
        duration(job.seconds_left) if job.seconds_left else "",
        age(job.created, now),
    ]
    return row + _wide(job, now) if wide else row


def _wide(job: Stored, now: datetime) -> list[Cell]:
    groups = [each for each in job.status.get("groups") or [] if each.get("name") != "coordinator"]
    ready, desired = (sum(int(each.get(key) or 0) for each in groups) for key in ("ready", "desired"))
    restarts = job.status.get("restarts") or {}
    checkpoint = job.status.get("lastCheckpoint") or {}
    made = age(moment(checkpoint.get("time")), now)
    return [
        f"{ready}/{desired}" if groups else "",
        str(job.progress.get("stage") or ""),
        str((job.status.get("migrationPool") or {}).get("summary") or ""),
        str(int(restarts.get("failures") or 0) + int(restarts.get("disruptions") or 0)) if restarts else "",
        f"{checkpoint['iteration']} ({made} ago)" if checkpoint.get("iteration") is not None and made else "",
        str(job.condition(ConditionType.RUNNING).get("message") or ""),
    ]
