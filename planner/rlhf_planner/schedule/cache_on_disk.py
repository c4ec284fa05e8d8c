"""Stores solved instances in a directory, so that a later process need not search again.

An entry is one JSON file. It is written under another name and moved, so a process that dies leaves no partial entry.
An unreadable entry, or one that the independent checker rejects, is a miss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_common.json_document import parse_json
from rlhf_planner.schedule.instance import Instance, InstanceError
from rlhf_planner.schedule.report import devices_from_json
from rlhf_planner.schedule.schedule_check import ScheduleError, check_schedule
from rlhf_planner.schedule.solve import SearchOptions

SEARCH_VERSION = 2  # increase it when the search finds better schedules, so that old entries are not used


def entry_path(directory: Path, instance: Instance, options: SearchOptions) -> Path:
    """Return the path of the entry for this instance, these options and this version of the search."""
    fields = ", ".join(f"{name}={value!r}" for name, value in dataclasses.asdict(options).items())
    asked = f"{SEARCH_VERSION}:{instance.key()}:Options({fields})"
    return directory / f"schedule-{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"


def solve_cached(
    directory: Path, instance: Instance, options: SearchOptions, search: Callable[[], dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Return the answer as `solution_json`, and whether it came from the directory; `search` computes a missing one."""
    path = entry_path(directory, instance, options)
    cached = _read(path, instance)
    if cached is not None:
        return cached, True
    answer = search()
    _write(path, answer)
    return answer, False


def _read(path: Path, instance: Instance) -> dict[str, Any] | None:
    try:
        answer = parse_json(path.read_text())
        check_schedule(instance, devices_from_json(answer))
    except (OSError, ValueError, InstanceError, ScheduleError):
        return None
    return dict(answer)


def _write(path: Path, answer: dict[str, Any]) -> None:
    partial = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(answer))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
