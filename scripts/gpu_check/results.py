"""The results of one run: what every step ended as, in one JSON file and one page that are rewritten as they grow.

Rule: written after every step and while a step runs, so that a kill at any moment leaves what was measured.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpu_check.page import page_of
from gpu_check.step import write_whole

JSON_FILE, PAGE_FILE, LOG_FILE = "gpu-check.json", "gpu-check.md", "gpu-check.log"


class Status(StrEnum):
    """How a step ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_HERE = "not here"
    LEFT_OUT = "left out"
    RUNNING = "running"


@dataclass
class Results:
    """All that a run found so far, and where it is written."""

    folder: Path
    about: dict[str, Any]
    """Commit, machine, when, and how it was called."""
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)

    def put(self, name: str, status: Status, why: str, seconds: float, said: Mapping[str, Any]) -> None:
        """Sets what is known of a step, and writes the files. `said`: what its report holds so far."""
        known = {key: said[key] for key in ("shows", "figures", "tables", "checks") if said.get(key)}
        self.steps[name] = {"status": str(status), "why": why, "seconds": round(seconds, 1)} | known
        self.write()

    def write(self) -> None:
        """Writes both files."""
        write_whole(self.folder / JSON_FILE, json.dumps(self.as_json(), indent=1) + "\n")
        write_whole(self.folder / PAGE_FILE, page_of(self.as_json()))

    def as_json(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        return self.about | {"steps": self.steps}

    def failed(self) -> list[str]:
        """Return the steps that failed."""
        return [name for name, step in self.steps.items() if step["status"] == Status.FAILED]


def verdict(said: Mapping[str, Any], exit_status: int | None, limit_seconds: float) -> tuple[Status, str]:
    """Return how a step ended, from its report and the exit status of its process (None: killed at its limit)."""
    failed = [check["name"] for check in said.get("checks", []) if not check["passed"]]
    if exit_status is None:
        return Status.FAILED, f"killed at its limit of {limit_seconds:.0f} s; what it measured before is kept"
    ended = said.get("ended")
    if ended == "not here":
        return Status.NOT_HERE, said["why"]
    if ended == "raised":
        return Status.FAILED, said["why"]
    if ended != "done":
        return Status.FAILED, f"its process ended with status {exit_status} and no last word; see the log"
    if failed:
        return Status.FAILED, f"{len(failed)} of {len(said['checks'])} checks failed: {', '.join(failed)}"
    if not said.get("checks") and not said.get("figures"):
        return Status.FAILED, "it said nothing"
    return Status.PASSED, ""
