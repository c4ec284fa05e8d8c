"""sample-histories.jsonl: the sample histories of iterations, one JSON object per iteration (`rlhf view`).

Past MAX_BYTES the file is renamed to sample-histories-previous.jsonl.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_coordinator.reports.sample_histories import SampleHistories
from rlhf_coordinator.reports.trackers.tracker import Tracker

FILE: Final = "sample-histories.jsonl"
PREVIOUS: Final = "sample-histories-previous.jsonl"
MAX_BYTES: Final = 32 * 1024 * 1024
"""Size of the file in bytes above which it is renamed."""


class HistoriesJsonl(Tracker):
    """The file, open for appending."""

    def __init__(self, run_dir: Path, next_iteration: int, max_bytes: int = MAX_BYTES) -> None:
        """Open the file. `next_iteration` has no effect. Raises OSError."""
        self._path, self._max_bytes = run_dir / FILE, max_bytes
        self._file = self._path.open("ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def histories(self, histories: SampleHistories) -> None:
        """Append an iteration. Raises OSError."""
        self._file.write(histories.model_dump_json().encode() + b"\n")
        self._file.flush()
        if self._file.tell() > self._max_bytes:
            self._file.close()
            self._path.replace(self._path.with_name(PREVIOUS))
            self._file = self._path.open("ab+")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file. Raises OSError."""
        self._file.close()
