"""The JSON form of a search result, which `rlhf schedule solve --json` prints and `check` reads.

Numbers are rounded to nine decimals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rlhf_common.json_numbers import finite_number
from rlhf_planner.schedule.instance import InstanceError
from rlhf_planner.schedule.schedule_check import Step, StepKind
from rlhf_planner.schedule.simulate import Timeline
from rlhf_planner.schedule.solve import Solution
from rlhf_planner.schedule.tables import steps_by_device


def solution_json(solution: Solution) -> dict[str, Any]:
    """Return the solution as one JSON object; docs/schedules.md describes its fields."""
    timeline = solution.timeline
    return {
        "makespan": _tidy(timeline.makespan),
        "lowerBound": _tidy(solution.lower_bound),
        "atBound": solution.at_bound,
        "peakActivation": _tidy(timeline.peak),
        "peakLowerBound": _tidy(solution.peak_bound),
        "peakAtBound": solution.peak_at_bound,
        "bubble": _tidy(timeline.bubble),
        "seconds": round(solution.seconds, 3),
        "makespanSeconds": round(solution.makespan_seconds, 3),
        "cutShort": solution.cut_short,
        "endedByClock": solution.by_clock,
        "method": solution.method,
        "baselines": {
            name: {"makespan": _tidy(base.makespan), "peakActivation": _tidy(base.peak)}
            for name, base in solution.baselines.items()
        },
        "devices": devices_json(timeline),
    }


def devices_json(timeline: Timeline) -> list[list[dict[str, Any]]]:
    """Return the steps as JSON objects, one list per device, in order of execution."""
    return [
        [
            {
                "pipeline": step.pipeline,
                "kind": step.kind,
                "microbatch": step.microbatch,
                "stage": step.stage,
                "start": _tidy(step.start),
                "end": _tidy(step.end),
            }
            for step in row
        ]
        for row in steps_by_device(timeline)
    ]


def devices_from_json(data: object) -> list[list[Step]]:
    """Return the steps of a schedule in the form of `solution_json`, one list per device.

    Reads only its "devices" field.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("devices"), list):
        raise InstanceError("devices", None, "a schedule is an object with a list `devices` of lists of steps")
    rows = []
    for device, row in enumerate(data["devices"]):
        if not isinstance(row, list):
            raise InstanceError(f"devices[{device}]", row, "give a list of steps")
        rows.append([_step(f"devices[{device}][{place}]", entry) for place, entry in enumerate(row)])
    return rows


def _step(at: str, entry: object) -> Step:
    if not isinstance(entry, Mapping):
        raise InstanceError(at, entry, "give an object with pipeline, kind, microbatch, stage, start, end")
    for name in ("pipeline", "microbatch", "stage"):
        if isinstance(entry.get(name), bool) or not isinstance(entry.get(name), int):
            raise InstanceError(f"{at}.{name}", entry.get(name), "give a whole number")
    for name in ("start", "end"):
        if finite_number(entry.get(name)) is None:
            raise InstanceError(f"{at}.{name}", entry.get(name), "give a finite number")
    if entry.get("kind") not in ("F", "B", "I", "W"):
        raise InstanceError(f"{at}.kind", entry.get("kind"), "give F, B, I or W")
    return Step(
        entry["pipeline"],
        cast(StepKind, entry["kind"]),
        entry["microbatch"],
        entry["stage"],
        float(entry["start"]),
        float(entry["end"]),
    )


def _tidy(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded
