"""Draws time against the threshold as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_planner.inter_stage.choose import FusionChoice

_BAR, _CHOSEN = "─", "◀ chosen"


def threshold_chart(choice: FusionChoice, batch: int, width: int = 100) -> str:
    """Return the chart as text: a heading, then one line per threshold.

    A line has R_t, its share of `batch`, the best pool, seconds, and a bar.
    """
    rows = [
        (f"{point.threshold}", f"{point.threshold / batch:.0%}", f"{point.pool}", f"{point.seconds:.3g} s")
        for point in choice.curve
    ]
    heads = ("R_t", "share", "pool", "time")
    columns = [max(len(head), *(len(row[at]) for row in rows)) for at, head in enumerate(heads)]
    margin = sum(columns) + 2 * len(columns) + len(_CHOSEN) + 1
    cells = max(10, width - margin)
    longest = max(point.seconds for point in choice.curve)
    lines = [_joined(heads, columns)]
    for point, row in zip(choice.curve, rows, strict=True):
        bar = _BAR * max(1, round(cells * point.seconds / longest)) if longest > 0 else ""
        chosen = (point.threshold, point.pool) == (choice.threshold, choice.pool) or (
            point.threshold == choice.threshold == 0
        )
        lines.append(f"{_joined(row, columns)}{bar}{f' {_CHOSEN}' if chosen else ''}")
    return "\n".join(lines)


def _joined(values: Sequence[str], columns: Sequence[int]) -> str:
    return "".join(f"{value:>{column}}  " for value, column in zip(values, columns, strict=True))
