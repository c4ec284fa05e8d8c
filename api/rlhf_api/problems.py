"""Problems of a manifest in a form that people and programs can read. Data only, without decisions."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from rlhf_common.nesting import too_deep

SHOWN_VALUE: Final = 80
"""Most characters of a value in a message."""
_CREDENTIALS: Final = re.compile(r"(?<=://)[^/?#\s\"]*@")
"""User and password in addresses."""


class Severity(StrEnum):
    """How serious a problem is."""

    ERROR = "error"
    """The manifest is wrong."""
    SERVER = "server"
    """An error by this version's knowledge of Kubernetes; in a cluster the API server, which may be newer, decides."""
    WARNING = "warning"
    """The job can start, but a setting may be unintended."""


@dataclass(frozen=True)
class Problem:
    """One problem of a manifest."""

    field: str
    """Path in the manifest, such as `spec.rollout.batchSize`; empty for the file as a whole."""
    value: Any
    """Value as JSON; None if unset."""
    message: str
    """Problem, or description of a correct value, to follow the field's name."""
    line: int | None = None
    """Line of the field or the nearest field around it, from 1."""
    severity: Severity = Severity.ERROR

    @property
    def shown_value(self) -> str:
        """Return the value for a message, shortened and without passwords in addresses; empty if it is unset."""
        if self.value is None:
            return ""
        if too_deep(self.value):
            return "(nested deeply)"
        text = _CREDENTIALS.sub("***@", json.dumps(self.value, default=str, ensure_ascii=False))
        return text if len(text) <= SHOWN_VALUE else text[: SHOWN_VALUE - 3] + "..."

    def __str__(self) -> str:
        value = f" = {self.shown_value}" if self.shown_value else ""
        place = f" (line {self.line})" if self.line is not None else ""
        return f"{self.field or 'manifest'}{value}: {self.message}{place}"

    def as_dict(self) -> dict[str, Any]:
        """Return the problem as JSON data."""
        return asdict(self)


class ManifestError(ValueError):
    """A manifest is rejected; `problems` has the reasons, and `source` names the manifest."""

    def __init__(self, problems: Sequence[Problem], source: str = "manifest") -> None:
        self.problems: list[Problem] = list(problems)
        self.source = source
        count = f"{len(self.problems)} problem{'' if len(self.problems) == 1 else 's'}"
        super().__init__("\n".join([f"{source}: {count}", *(f"- {problem}" for problem in self.problems)]))
