"""Figures of a run: a timeline of the last iterations with one row per worker, and the reward over iterations.

Uses matplotlib without its global state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from rlhf_common.names import DEVICE_TURN_SPANS
from rlhf_coordinator.reports.trackers import metrics_jsonl, timeline_json
from rlhf_coordinator.reports.trackers.timeline_json import TimelineSpan

TIMELINE_PICTURE: Final = "timeline.png"
REWARD_PICTURE: Final = "reward.png"
SHOWN_SECONDS: Final = 60.0
"""Most seconds that are drawn, unless the last iteration is longer: earlier ones are added while they fit."""
SHOWN_ITERATIONS: Final = 3
"""Most iterations in the timeline."""
DOTS_PER_INCH: Final = 140
_MERGE_SHARE: Final = 1 / 2000
"""Largest gap between joined spans of one kind, as a share of the picture."""

_LABEL_SHARE: Final = 0.06
"""Least distance between two iterations' labels, as a share of the picture."""

KINDS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("generate", "#4c78a8", ("decode", "Generating")),
    ("prefill", "#9ecae9", ("prefill",)),
    ("reward", "#f58518", ("score/reward",)),
    ("score early", "#b5a642", ("score-prefix",)),
    ("score", "#eeca3b", ("score", "Scoring")),
    ("train actor", "#54a24b", ("train/actor",)),
    ("train critic", "#a6d96a", ("train/critic",)),
    ("train, other", "#2f6b3a", ("train", "Training")),
    ("weights", "#e45756", ("load-weights", "Publishing")),
    ("checkpoint", "#b279a2", ("checkpoint", "Checkpointing")),
    ("turn of the device", "#17becf", DEVICE_TURN_SPANS),
    ("start", "#9d9189", ("become-", "Starting", "Recovering")),
    ("wait", "#e3e0de", ()),
    ("other", "#5b5b5b", ("",)),
)
"""(legend, colour, span name prefixes); the first kind with a matching prefix applies. Spans with `/wait` in their name
are waits."""
MIGRATION: Final = "migrate"
_MIGRATION_COLOUR: Final = "#d62bb8"
_ORDER: Final = ("coordinator", "generation", "inference", "training")


def draw_run(run_dir: Path) -> list[Path]:
    """Draw all figures that the run has data for; return the created files. Raises OSError."""
    drawn = []
    source = run_dir / timeline_json.FILE
    spans = [span for span in timeline_json.read_spans(source) if _drawn(span)] if source.is_file() else []
    if spans:
        drawn.append(draw_timeline(spans, run_dir / TIMELINE_PICTURE))
    lines = metrics_jsonl.read_metrics(run_dir / metrics_jsonl.FILE)
    if any(line.get("reward") is not None for line in lines):
        drawn.append(draw_reward(lines, run_dir / REWARD_PICTURE))
    return drawn


def draw_timeline(spans: Sequence[TimelineSpan], path: Path) -> Path:
    """Draw the last iterations of the spans, one row per worker, with a colour per kind of work; return the file.

    There must be a span.
    """
    spans, first = _last_iterations(spans)
    start = _begin(spans)
    end = max(span.start + span.seconds for span in spans)
    rows = sorted({span.worker for span in spans}, key=_row_order)
    figure = Figure(figsize=(13, 1.6 + 0.42 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    used = _draw_bars(axes, [span for span in spans if span.name != MIGRATION], rows, start, end)
    migrations = _draw_migrations(axes, spans, rows, start)
    _draw_iterations(axes, spans, first, start, end)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.75)
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles: list[Artist] = [Patch(color=colour, label=legend) for legend, colour, _ in KINDS if legend in used]
    if migrations:
        handles.append(Line2D([], [], color=_MIGRATION_COLOUR, marker=">", label="sample migrates"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9)
    return _save(figure, path)


def _draw_bars(axes: Axes, spans: Sequence[TimelineSpan], rows: Sequence[str], start: float, end: float) -> set[str]:
    """Draw one row of bars per worker, from `start` on; return the drawn kinds."""
    used = set()
    for legend, colour, _ in KINDS:
        for row, worker in enumerate(rows):
            shown = [s for s in spans if s.worker == worker and _kind(s.name) == legend and s.start + s.seconds > start]
            bars = [(max(s.start, start) - start, s.start + s.seconds - max(s.start, start)) for s in shown]
            if bars:
                merged = _merge(sorted(bars), (end - start) * _MERGE_SHARE)
                axes.broken_barh(merged, (row - 0.38, 0.76), facecolors=colour, linewidth=0)
                used.add(legend)
    return used


def _draw_migrations(axes: Axes, spans: Sequence[TimelineSpan], rows: Sequence[str], start: float) -> int:
    """Draw an arrow for each migration span with a shown destination, begin to end; return the number of arrows."""
    drawn = [s for s in spans if s.name == MIGRATION and s.destination in rows and s.start >= start]
    for span in drawn:
        tail = (span.start - start, rows.index(span.worker))
        head = (span.start + span.seconds - start, rows.index(span.destination))
        style = {"arrowstyle": "-|>", "color": _MIGRATION_COLOUR, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", head, tail, arrowprops=style)
    return len(drawn)


def _draw_iterations(axes: Axes, spans: Sequence[TimelineSpan], first: int, start: float, end: float) -> None:
    """Draw a line at the begin of each iteration but the first, and a label; omit a label close to the previous one."""
    labelled = -1.0
    for iteration in range(first, max(span.iteration for span in spans) + 1):
        begins = [s.start for s in spans if s.iteration == iteration and s.worker != _ORDER[0] and s.start >= start]
        if not begins:
            continue
        at = min(begins) - start
        if iteration > first:
            axes.axvline(at, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        if labelled < 0 or at - labelled > (end - start) * _LABEL_SHARE:
            axes.annotate(f" iteration {iteration}", (at, -0.62), fontsize=8, color="#333333")
            labelled = at


def draw_reward(lines: Sequence[dict[str, Any]], path: Path) -> Path:
    """Draw the reward per iteration, its running mean, and the KL on the right if present; return the file."""
    shown = [line for line in lines if line.get("reward") is not None]
    steps = [line["iteration"] for line in shown]
    rewards = [float(line["reward"]) for line in shown]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9ecae9", linewidth=1.2, marker="." if len(steps) < 50 else None)
    axes.plot(steps, _running_mean(rewards, max(1, len(rewards) // 10)), color="#4c78a8", linewidth=2.2)
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("reward", color="#4c78a8")
    axes.spines[["top"]].set_visible(False)
    kl = [(line["iteration"], float(line["kl"])) for line in shown if line.get("kl") is not None]
    if kl:
        right = axes.twinx()
        right.plot(*zip(*kl, strict=True), color="#e45756", linewidth=1.0, alpha=0.8)
        right.set_ylabel("KL to the reference, nats per response", color="#e45756")
        right.spines[["top"]].set_visible(False)
    return _save(figure, path)


def _last_iterations(spans: Sequence[TimelineSpan]) -> tuple[list[TimelineSpan], int]:
    """Return the spans of the last iterations, and the first of these iterations."""
    last = max(span.iteration for span in spans)
    first, shown = last, [span for span in spans if span.iteration == last]
    for iteration in range(last - 1, max(-1, last - SHOWN_ITERATIONS), -1):
        more = shown + [span for span in spans if span.iteration == iteration]
        if max(s.start + s.seconds for s in more) - min(s.start for s in more) > SHOWN_SECONDS:
            break
        first, shown = iteration, more
    return shown, first


def _kind(name: str) -> str:
    if "/wait" in name:
        return "wait"
    return next(legend for legend, _, prefixes in KINDS if name.startswith(prefixes))


def _drawn(span: TimelineSpan) -> bool:
    """Return whether a span is drawn: not that of a whole training step, and not a prediction."""
    return span.name != "train/step" and not span.name.startswith("predicted/")


def _begin(spans: Sequence[TimelineSpan]) -> float:
    """Return the begin of the picture: the first work of a worker that is not its start, if any."""
    work = [span.start for span in spans if _kind(span.name) != "start" and span.worker != _ORDER[0]]
    return min(work or [span.start for span in spans])


def _row_order(worker: str) -> tuple[int, int, str]:
    group, _, index = worker.rpartition("-") if "-" in worker else (worker, "", "0")
    place = _ORDER.index(group) if group in _ORDER else len(_ORDER)
    return place, int(index) if index.isdigit() else 0, worker


def _merge(bars: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Return sorted (start, length) bars, with those closer than `gap` joined."""
    merged: list[tuple[float, float]] = []
    for start, length in bars:
        if merged and start - (merged[-1][0] + merged[-1][1]) <= gap:
            before, _ = merged[-1]
            merged[-1] = (before, max(merged[-1][1], start + length - before))
        else:
            merged.append((start, length))
    return merged


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    return [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]


def _save(figure: Figure, path: Path) -> Path:
    partial = path.with_name(f".{path.name}.tmp")
    figure.savefig(partial, dpi=DOTS_PER_INCH, format=path.suffix[1:])
    partial.replace(path)
    return path
