"""Draws a schedule: devices down, time across, activation memory below; SVG or PNG as bytes.

Hues distinguish the models, shades the kinds of steps. matplotlib is imported on the first call.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.schedule_check import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Per pipeline: forward, backward (input gradient), weight gradient. Blue for the first; the others take turns.
_SHADES = (
    ("#9ecae1", "#3182bd", "#08519c"),
    ("#fdd0a2", "#f16913", "#a63603"),
    ("#fee391", "#ec9014", "#b35806"),
    ("#c7e9c0", "#41ab5d", "#006d2c"),
)
_IDLE = "#f2f2f2"


def draw(instance: Instance, devices: Sequence[Sequence[Step]], title: str, form: str = "svg") -> bytes:
    """Return the picture of one schedule as bytes. `form`: svg or png."""
    return draw_many(instance, [(title, devices)], form)


def draw_many(
    instance: Instance, schedules: Sequence[tuple[str, Sequence[Sequence[Step]]]], form: str = "svg"
) -> bytes:
    """Return one picture of several schedules of an instance with a common time axis.

    `form` is svg or png.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    longest = max(row[-1].end for _, devices in schedules for row in devices if row)
    rows = instance.devices
    gantt = max(1.6, 0.26 * rows)
    heights = [part for _ in schedules for part in (gantt, 0.9)]
    with mpl.rc_context({"svg.hashsalt": "schedule", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(16, sum(heights) + 0.75 * len(schedules) + 0.6), layout="constrained")
        axes = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
        top = max(_peak(instance, row) for _, devices in schedules for row in devices)
        for index, (title, devices) in enumerate(schedules):
            chart, memory = axes[2 * index], axes[2 * index + 1]
            _gantt(chart, instance, devices, longest)
            chart.set_title(title, loc="left", fontsize=10, fontweight="bold")
            _memory(memory, instance, devices, longest, top)
        axes[-1].set_xlabel("time")
        _legend(figure, instance, any(s.kind == "W" for _, d in schedules for row in d for s in row))
        out = io.BytesIO()
        figure.savefig(out, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _gantt(axes: Axes, instance: Instance, devices: Sequence[Sequence[Step]], longest: float) -> None:
    end = max(row[-1].end for row in devices if row)
    for device, row in enumerate(devices):
        axes.broken_barh([(0, end)], (device - 0.45, 0.9), facecolors=_IDLE)
        spans: dict[str, list[tuple[float, float]]] = {}
        for step in row:
            shade = _shades(step.pipeline)[{"F": 0, "B": 1, "I": 1, "W": 2}[step.kind]]
            width = step.end - step.start
            spans.setdefault(shade, []).append((step.start, width))
            if width / longest > 0.0055 * len(str(step.microbatch)):
                colour = "black" if step.kind == "F" else "white"
                middle = step.start + width / 2
                axes.text(middle, device, str(step.microbatch), ha="center", va="center", fontsize=6, color=colour)
        for shade, ranges in spans.items():
            axes.broken_barh(ranges, (device - 0.45, 0.9), facecolors=shade, edgecolor="white", linewidth=0.3)
    axes.axvline(end, color="black", linewidth=1)
    axes.text(end, -0.75, f"{end:g} ", ha="right", va="bottom", fontsize=9, fontweight="bold")
    axes.set_xlim(0, longest * 1.005)
    axes.set_ylim(instance.devices - 0.4, -0.6)
    axes.set_yticks(range(instance.devices))
    axes.set_ylabel("device")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=8)


def _memory(axes: Axes, instance: Instance, devices: Sequence[Sequence[Step]], longest: float, top: float) -> None:
    """Draw the memory of every device in grey, and of the device with the peak in black."""
    peaks = [_peak(instance, row) for row in devices]
    worst = peaks.index(max(peaks))
    for device, row in enumerate(devices):
        moments, memory = _memory_over_time(instance, row)
        bold = device == worst
        colour, width = ("black", 1.2) if bold else ("#bbbbbb", 0.6)
        axes.step(moments, memory, where="post", color=colour, linewidth=width, zorder=2 if bold else 1)
    axes.axhline(max(peaks), color="#cb181d", linewidth=0.8, linestyle="--")
    note = f"peak {max(peaks):g} (device {worst}) "
    axes.text(longest, max(peaks), note, ha="right", va="bottom", fontsize=8, color="#cb181d")
    axes.set_xlim(0, longest * 1.005)
    axes.set_ylim(0, top * 1.25)
    axes.set_ylabel("activation")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8)


def _shades(pipeline: int) -> tuple[str, str, str]:
    return _SHADES[pipeline] if pipeline < len(_SHADES) else _SHADES[1 + (pipeline - 1) % (len(_SHADES) - 1)]


def _memory_over_time(instance: Instance, row: Sequence[Step]) -> tuple[list[float], list[float]]:
    moments, memory = [0.0], [0.0]
    for step in row:
        amount = instance.pipelines[step.pipeline].activation[step.stage]
        if step.kind == "F":
            moments.append(step.start)
            memory.append(memory[-1] + amount)
        elif step.kind in ("B", "W"):
            moments.append(step.end)
            memory.append(memory[-1] - amount)
    return moments, memory


def _peak(instance: Instance, row: Sequence[Step]) -> float:
    return round(max(_memory_over_time(instance, row)[1]), 9)


def _legend(figure: Any, instance: Instance, split: bool) -> None:
    from matplotlib.patches import Patch

    patches = []
    for index, pipe in enumerate(instance.pipelines):
        shades = _shades(index)
        patches.append(Patch(facecolor=shades[0], label=f"{pipe.name} forward"))
        patches.append(
            Patch(facecolor=shades[1], label=f"{pipe.name} backward" + (" (input gradient)" if split else ""))
        )
        if split:
            patches.append(Patch(facecolor=shades[2], label=f"{pipe.name} weight gradient"))
    patches.append(Patch(facecolor=_IDLE, label="idle"))
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(instance.pipelines) + 1, frameon=False, fontsize=8
    )
