"""samples/: one JSONL file of sample rows for every iteration that has a table.

A file is written under a temporary name and renamed. Past MAX_BYTES in total, the tables of the oldest iterations are
removed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlhf_coordinator.reports.sample_table import FILE, FOLDER, SampleRow, line_of, table_files
from rlhf_coordinator.reports.trackers.tracker import Tracker

MAX_BYTES: Final = 256 * 1024 * 1024
"""Size of all tables of a run, in bytes, above which old ones are removed."""


class SampleTables(Tracker):
    """The folder of tables."""

    def __init__(self, run_dir: Path, next_iteration: int, max_bytes: int = MAX_BYTES) -> None:
        """Remove tables of iterations from `next_iteration` on. Raises OSError."""
        self._run_dir, self._max_bytes = run_dir, max_bytes
        for iteration, path in table_files(run_dir).items():
            if iteration >= next_iteration:
                path.unlink(missing_ok=True)

    def samples(self, iteration: int, rows: Sequence[SampleRow]) -> None:
        """Write a table, and remove old ones above the limit. Raises OSError."""
        folder = self._run_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE.format(iteration)
        partial = folder / f".{path.name}.tmp"
        with partial.open("w", encoding="ascii") as file:
            file.writelines(line_of(row) + "\n" for row in rows)
        partial.replace(path)
        self._make_room()

    def _make_room(self) -> None:
        files = list(table_files(self._run_dir).values())
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files[:-1], sizes, strict=False):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size
