"""The live view of a job: turns a status and the metrics so far into a rich renderable. Pure."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlhf_cli.console import duration
from rlhf_common import control_pb2 as pb

BLOCKS: Final = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH: Final = 40
_BAR_WIDTH: Final = 36
_WAITS_SHOWN: Final = 3
_STATES: Final = {"Busy": "green", "Ready": "cyan", "Starting": "yellow", "Missing": "yellow", "Lost": "red"}
_WORKER_COLUMNS: Final = ("worker", "state", "doing", "busy", "tokens/s", "weights", "restarts")
_STAGES: Final = (
    ("generate", ("generated", "scored", "dropped", "trained"), "blue"),
    ("score", ("scored", "dropped", "trained"), "yellow"),
    ("train", ("trained",), "green"),
)
"""(stage, ledger states of samples that have passed it, colour)."""
_CURVES: Final = (
    ("reward", "reward", 3),
    ("kl", "kl", 3),
    ("kl_per_token", "kl/token", 4),
    ("loss", "loss", 4),
    ("samples_per_second", "samples/s", 1),
)
"""(metric, label, digits). `kl` is in nats per response, `kl_per_token` in nats per token."""


def render(status: pb.JobStatus, lines: Sequence[Mapping[str, Any]], notices: Sequence[str]) -> RenderableType:
    """Return the view. `lines`: metrics in the form of metrics.jsonl, in order; `notices`: the latest, newest last."""
    # Without a ledger the number of samples is unknown, not zero.
    samples: list[RenderableType] = [_stages(status), _ledger(status)] if status.ledger else []
    parts: list[RenderableType] = [
        _headline(status),
        *samples,
        *_tail(status),
        *_drafts(status),
        *_rounds(status),
        _curves(lines),
        _workers(status),
    ]
    if status.waiting_for:
        waits = list(status.waiting_for[:_WAITS_SHOWN])
        more = len(status.waiting_for) - len(waits)
        parts.append(Text(f"waiting for {', '.join(waits)}" + (f" and {more} more" if more else ""), style="yellow"))
    parts.extend(Text(f"warning: {warning}", style="yellow") for warning in status.warnings)
    if status.HasField("failure"):
        parts.append(Text(f"{status.failure.reason}: {status.failure.message}", style="red"))
    parts.extend(Text(notice, style="dim") for notice in notices)
    return Group(*parts)


def sparkline(values: Sequence[float], width: int = SPARKLINE_WIDTH) -> str:
    """Return the values as a row of blocks, higher for greater values; more than `width` values are averaged."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * count
    return "".join(BLOCKS[min(int((value - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for value in means)


def _headline(status: pb.JobStatus) -> Text:
    text = Text.assemble(
        (status.job, "bold"),
        f"  {min(status.iteration, status.iterations)} of {status.iterations} iterations  ",
        (status.phase, "red" if status.phase in ("Failed", "Recovering") else "bold cyan"),
    )
    if status.seconds_left > 0:
        text.append(f"  {duration(status.seconds_left)} left")
    if status.last_checkpoint:
        text.append(f"  checkpoint {status.last_checkpoint.rstrip('/').rpartition('/')[2]}", style="dim")
    return text


def _stages(status: pb.JobStatus) -> Table:
    total = sum(count for state, count in status.ledger.items() if state != "cut")
    table = Table.grid(padding=(0, 1))
    decoding = sum(w.tokens_per_second for w in status.workers if w.worker.startswith("generation"))
    # The view of a job in a cluster uses its metrics, which do not count tokens of the iteration.
    counted = [f"{status.tokens:,} tokens"] * bool(status.tokens) + [f"{decoding:,.0f} tokens/s"] * bool(decoding)
    speeds = {"generate": "  ".join(counted)}
    for stage, states, colour in _STAGES:
        passed = sum(status.ledger.get(state, 0) for state in states)
        bar = ProgressBar(total=max(total, 1), completed=passed, width=_BAR_WIDTH, complete_style=colour)
        table.add_row(f"{stage:>8}", bar, f"{passed}/{total} samples", speeds.get(stage, ""))
    return table


def _ledger(status: pb.JobStatus) -> Text:
    order = ("queued", "decoding", "migrating", "generated", "scored", "dropped", "trained", "cut")
    counts = [f"{state} {status.ledger[state]}" for state in order if status.ledger.get(state, 0)]
    return Text(f"{'ledger':>8} " + (" · ".join(counts) or "empty"), style="dim")


def _tail(status: pb.JobStatus) -> list[Text]:
    """Return the state of the long tail once it is consolidated, or when that will happen; empty without fusion."""
    if not status.fusion.threshold:
        return []
    workers = status.replicas.get("generation", 0)
    left = sum(status.ledger.get(state, 0) for state in ("queued", "decoding", "migrating"))
    if status.pool:
        scoring = len(status.fusion.released)
        words = f"{left} left, pool {len(status.pool)}/{workers}, {scoring} workers score"
        words += f", {status.fusion.migrated} samples moved" if status.fusion.migrated else ""
        return [Text(f"{'tail':>8} {words}", style="magenta")]
    words = f"consolidates at {status.fusion.threshold} left on {status.fusion.pool}/{workers} workers"
    if status.fusion.predicted_seconds:
        words += f", predicted {status.fusion.predicted_off_seconds / status.fusion.predicted_seconds:.2f}x"
    return [Text(f"{'tail':>8} {words}", style="dim")]


def _drafts(status: pb.JobStatus) -> list[Text]:
    """Return the state of drafting and its last switch; empty while the tokens per step are unknown."""
    speculation = status.speculation
    if not speculation.tokens_per_step:
        return []
    lines = [Text(f"{'drafts':>8} {speculation.summary}", style="dim")]
    return lines + [Text(f"{'':>8} {text}", style="dim") for text in speculation.switches[:1]]


def _rounds(status: pb.JobStatus) -> list[Text]:
    """Return why there are long rounds or none; empty unless the job chooses them."""
    return [Text(f"{'rounds':>8} {status.long_rounds}", style="dim")] if status.long_rounds else []


def _curves(lines: Sequence[Mapping[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 1))
    for name, label, digits in _CURVES:
        values = [float(line[name]) for line in lines if line.get(name) is not None]
        if values:
            table.add_row(f"{label:>9}", f"{values[-1]:.{digits}f}", Text(sparkline(values), style="cyan"))
    return table


def _workers(status: pb.JobStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    # The view of a job in a cluster uses its metrics, which lack a worker's load and samples.
    busy = any(worker.busy_share for worker in status.workers)
    has_versions = any(worker.versions for worker in status.workers)
    hidden = {"busy": not busy, "weights": not has_versions}
    headings = [column for column in _WORKER_COLUMNS if not hidden.get(column)]
    for heading in headings:
        table.add_column(heading, justify="right" if heading in ("busy", "tokens/s", "restarts") else "left")
    for worker in status.workers:
        row = _worker(worker, status)
        table.add_row(*(row[heading] for heading in headings))
    return table


def _worker(worker: pb.WorkerStatus, status: pb.JobStatus) -> dict[str, str | Text]:
    restarts = status.restarts.get(worker.worker)
    return {
        "worker": worker.worker + (" (pool)" if worker.worker in status.pool else ""),
        "state": Text(worker.state, style=_STATES.get(worker.state, "")),
        "doing": worker.activity,
        "busy": f"{worker.busy_share:.0%}",
        "tokens/s": f"{worker.tokens_per_second:,.0f}" if worker.tokens_per_second else "",
        "weights": ", ".join(f"v{version}" for version in sorted(set(worker.versions.values()))),
        "restarts": str(restarts) if restarts else "",
    }
