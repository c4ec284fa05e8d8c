"""Draws a schedule as text: devices down, time across, one letter per cell.

Forward steps are capitals, backward steps small letters, weight-gradient steps an apostrophe.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.schedule_check import Step

_WEIGHT = "'"


def terminal_chart(instance: Instance, devices: Sequence[Sequence[Step]], width: int = 120) -> str:
    """Return the chart and a legend; device rows have at most `width` characters. A cell shows the step at its
    middle."""
    makespan = max((row[-1].end for row in devices if row), default=0.0)
    margin = len(str(len(devices) - 1)) + 2
    cells = max(1, min(width - margin, round(makespan)))
    lines = []
    for device, row in enumerate(devices):
        line = ["."] * cells
        at = 0
        for cell in range(cells):
            middle = (cell + 0.5) * makespan / cells
            while at < len(row) and row[at].end <= middle:
                at += 1
            if at < len(row) and row[at].start <= middle:
                line[cell] = _letter(row[at])
        lines.append(f"{device:>{margin - 2}}  {''.join(line)}")
    names = ", ".join(f"{_capital(index)} {pipe.name}" for index, pipe in enumerate(instance.pipelines))
    lines.append(f"{names}: capital forward, small backward, {_WEIGHT} weight gradient, . idle; {makespan:g} across")
    return "\n".join(lines)


def _capital(pipeline: int) -> str:
    return chr(ord("A") + pipeline % 26)


def _letter(step: Step) -> str:
    if step.kind == "W":
        return _WEIGHT
    return _capital(step.pipeline) if step.kind == "F" else _capital(step.pipeline).lower()
