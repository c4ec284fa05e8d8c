"""Draws simulated iterations: workers down and time across. Decoding is blue, scoring orange, idle time light grey.

matplotlib is imported on the first call.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_planner.inter_stage.forecast import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_IDLE = "#f0f0f0"
_COLOURS = {"prefill": "#6a51a3", "wake": "#969696", "score": "#f16913"}
_DECODE = ("#c6dbef", "#9ecae1", "#6baed6", "#3182bd", "#08519c")
_MOVES_DRAWN = 60  # more arrows would hide the bars


def draw_forecasts(forecasts: Sequence[tuple[str, Forecast]], workers: Sequence[str], form: str = "svg") -> bytes:
    """Return one picture of several forecasts, made with `spans=True`, with a common time axis.

    `workers` has one name per worker. `form` is svg or png.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    longest = max(forecast.seconds for _, forecast in forecasts)
    most = max((span.samples for _, f in forecasts for span in f.spans if span.kind == "decode"), default=1)
    height = 0.35 * len(workers) + 0.9
    with mpl.rc_context({"svg.hashsalt": "inter-stage", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(12, height * len(forecasts) + 0.6), layout="constrained")
        axes = figure.subplots(len(forecasts), 1, squeeze=False)[:, 0]
        for chart, (title, forecast) in zip(axes, forecasts, strict=True):
            _workers(chart, forecast, workers, most)
            chart.set_xlim(0, longest * 1.01)
            chart.set_title(title, loc="left", fontsize=10, fontweight="bold")
        axes[-1].set_xlabel("seconds of generation and inference")
        _legend(figure)
        return _bytes(figure, form)


def _workers(chart: Axes, forecast: Forecast, workers: Sequence[str], most: int) -> None:
    for row in range(len(workers)):
        chart.broken_barh([(0, forecast.seconds)], (row - 0.4, 0.8), facecolors=_IDLE)
    for span in forecast.spans:
        shade = min(len(_DECODE) - 1, len(_DECODE) * span.samples // (most + 1))
        colour = _COLOURS.get(span.kind, _DECODE[shade])
        chart.broken_barh([(span.start, span.end - span.start)], (span.worker - 0.4, 0.8), facecolors=colour)
    for move in forecast.transits[:_MOVES_DRAWN]:
        chart.annotate(
            "", (max(move.end, move.start), move.destination), (move.start, move.source),
            arrowprops={"arrowstyle": "->", "color": "#cb181d", "linewidth": 0.9},
        )  # fmt: skip
    if forecast.threshold_seconds is not None:
        chart.axvline(forecast.threshold_seconds, color="black", linewidth=0.8, linestyle=":")
    chart.axvline(forecast.seconds, color="black", linewidth=1)
    chart.text(forecast.seconds, -0.55, f"{forecast.seconds:.3g} s ", ha="right", va="bottom", fontweight="bold")
    chart.set_ylim(len(workers) - 0.4, -0.6)
    chart.set_yticks(range(len(workers)), list(workers))
    for side in ("top", "right", "left"):
        chart.spines[side].set_visible(False)
    chart.tick_params(length=0, labelsize=8)


def _legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    names = {
        "prefill": _COLOURS["prefill"], "decode, full": _DECODE[-1], "decode, nearly empty": _DECODE[0],
        "wake": _COLOURS["wake"], "score": _COLOURS["score"], "idle": _IDLE,
    }  # fmt: skip
    patches = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8)


def _bytes(figure: Any, form: str) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=110, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()
