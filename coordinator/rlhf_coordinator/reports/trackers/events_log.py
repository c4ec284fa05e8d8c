"""events.jsonl: events besides iterations, for example lost workers and checkpoints, one JSON object per line.

Each line is appended and flushed at once; a restart continues at the end.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "events.jsonl"


class EventsLog(Tracker):
    """The file, open for appending."""

    def __init__(self, run_dir: Path, next_iteration: int) -> None:
        """Open the file. `next_iteration` has no effect. Raises OSError."""
        self._file = (run_dir / FILE).open("a", encoding="utf-8")

    def event(self, time_ns: int, kind: str, message: str, attributes: Mapping[str, str]) -> None:
        """Append one line. Raises OSError."""
        self._file.write(json.dumps({"time_ns": time_ns, "kind": kind, "message": message, **attributes}) + "\n")
        self._file.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file. Raises OSError."""
        self._file.close()
