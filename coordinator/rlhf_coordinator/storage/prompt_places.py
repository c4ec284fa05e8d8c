"""The place of a prompt, for errors: a file, and a line or a row of it.

Rule: `Place.bad` creates an error about prompts (exit code 22), which names the place.
"""

from dataclasses import dataclass
from pathlib import Path

from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a JSONL file, a row of a table, or, with number 0, the file or folder itself."""

    path: Path
    number: int = 0
    """Number from 1; 0 for the whole."""
    unit: str = "line"
    """Unit of the number: line or row."""
    field: str = "spec.prompts.path"
    """Field of the manifest that names the file."""

    def __str__(self) -> str:
        return f"{self.path} {self.unit} {self.number}" if self.number else f"{self.path}"

    def bad(self, problem: str) -> JobError:
        """Return the error of this place; `problem` continues the sentence after its name."""
        return JobError("BadData", f"{self} {problem}", field=self.field, exit_code=ExitCode.BAD_DATA)
