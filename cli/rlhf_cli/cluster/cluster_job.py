"""An RLHFJob as the API server returned it, for the verbs. Pure.

Rule: any field of spec and status may be missing or of another form, because an operator of another version may have
written the object.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from rlhf_cli.console import duration
from rlhf_common import names
from rlhf_common.conditions import ConditionType, FinishedReason, RunningReason
from rlhf_common.names import ExitCode
from rlhf_operator.reconcile.observed.termination_log import ITERATION_MAX
from rlhf_operator.stored_job import status_of

Json = Mapping[str, Any]

MAX_SUGGESTIONS: Final = 3
"""Maximum number of names that "did you mean" offers."""
_SCALARS: Final = frozenset(
    {"iterations", "seed", "deterministic", "placement", "suspend", "managedBy", "operatorClass"}
)
"""Fields with a single value that `ClusterJob.spec` contains."""
_FAILURE_CODES: Final = {
    FinishedReason.USER_CODE: ExitCode.USER_CODE,
    FinishedReason.BAD_MODEL: ExitCode.BAD_MODEL,
    FinishedReason.BAD_DATA: ExitCode.BAD_DATA,
    FinishedReason.STORAGE: ExitCode.STORAGE,
    FinishedReason.ADDRESS_IN_USE: ExitCode.ADDRESS_IN_USE,
    FinishedReason.SAMPLE: ExitCode.SAMPLE_FAILED,
    FinishedReason.INVALID: ExitCode.USAGE,
}


@dataclass(frozen=True)
class ClusterJob:
    """One job; properties return fields of its object, or an empty value where a field is absent."""

    body: Json

    @property
    def name(self) -> str:
        """metadata.name."""
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """metadata.namespace."""
        return str(self.body["metadata"].get("namespace") or "")

    @cached_property
    def spec(self) -> Json:
        """spec; empty when absent. Only objects and the fields in _SCALARS are kept."""
        stored = self.body.get("spec")
        fields = stored.items() if isinstance(stored, dict) else ()
        return {name: value for name, value in fields if isinstance(value, dict) or name in _SCALARS}

    @cached_property
    def status(self) -> Json:
        """status; empty when absent or of another form."""
        return status_of(self.body.get("status"))[0] or {}

    @property
    def progress(self) -> Json:
        """status.progress; empty when absent."""
        return dict(self.status.get("progress") or {})

    @property
    def created(self) -> datetime | None:
        """metadata.creationTimestamp; None when absent or invalid."""
        return moment(self.body["metadata"].get("creationTimestamp"))

    @property
    def operator_class(self) -> str:
        """spec.operatorClass; empty when absent."""
        return str(self.spec.get("operatorClass") or "")

    @property
    def iterations(self) -> int:
        """spec.iterations; 0 when absent or invalid."""
        value = self.spec.get("iterations")
        return value if isinstance(value, int) and 0 <= value <= ITERATION_MAX else 0

    @property
    def iteration(self) -> int:
        """Iterations trained at the last update of the status."""
        return int(self.progress.get("iteration") or 0)

    def condition(self, kind: ConditionType) -> Json:
        """Return a condition; empty when absent."""
        return next(
            (condition for condition in self.status.get("conditions") or [] if condition.get("type") == kind), {}
        )

    def message(self, kind: ConditionType) -> str:
        """Return the message of a condition, without the lines of a log that may follow it."""
        return first_line(self.condition(kind))

    @property
    def last_log(self) -> list[str]:
        """Log lines that the operator stored when the job failed, with a heading first; often empty."""
        return str(self.condition(ConditionType.FAILED).get("message") or "").splitlines()[1:]

    def holds(self, kind: ConditionType) -> bool:
        """Return whether a condition is True."""
        return self.condition(kind).get("status") == "True"

    @property
    def phase(self) -> str:
        """The phase: the reason of Running, or Pending without one."""
        return str(self.condition(ConditionType.RUNNING).get("reason") or RunningReason.PENDING)

    @property
    def state(self) -> str:
        """The phase, and the message of Running where there is one."""
        message = self.condition(ConditionType.RUNNING).get("message")
        return f"{self.phase}: {message}" if message else self.phase

    @property
    def seconds_left(self) -> float:
        """Estimated seconds left while the job runs; 0 without an estimate."""
        return float(self.progress.get("remainingSeconds") or 0) if self.holds(ConditionType.RUNNING) else 0.0

    @property
    def finished(self) -> bool:
        """Whether the job is Complete or Failed; both are final."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @property
    def selector(self) -> str:
        """Label selector of the job's pods."""
        return f"{names.LABEL_JOB_NAME}={self.name}"

    @property
    def failure_code(self) -> int:
        """Exit code for the reason of the failure; FAILED for a reason without its own code."""
        reason = self.condition(ConditionType.FAILED).get("reason")
        codes: Mapping[str, ExitCode] = {finished.value: code for finished, code in _FAILURE_CODES.items()}
        return int(codes.get(str(reason), ExitCode.FAILED))


def first_line(condition: Json) -> str:
    """Return the message of a condition, without the lines of a log that may follow it."""
    return str(condition.get("message") or "").partition("\n")[0]


def moment(text: Any) -> datetime | None:
    """Parse a time of the API server; None when it is absent or invalid."""
    try:
        return datetime.fromisoformat(str(text)) if text else None
    except ValueError:
        return None


def age(then: datetime | None, now: datetime) -> str:
    """Return the time since `then` as `42s` or `3m 07s`; empty when `then` is unknown."""
    return "" if then is None else duration(max(0.0, (now - then).total_seconds()))


def similar_names(name: str, names: Iterable[str]) -> list[str]:
    """Return at most MAX_SUGGESTIONS known names similar to `name`, then those with the same beginning."""
    candidates = sorted(set(names))
    beginning = [candidate for candidate in candidates if candidate.startswith(name) or name.startswith(candidate)]
    close = difflib.get_close_matches(name, candidates, MAX_SUGGESTIONS, 0.5)
    return list(dict.fromkeys([*close, *beginning]))[:MAX_SUGGESTIONS]


def shortened(text: str, max_length: int = 200) -> str:
    """Return the beginning and the end of a text of more than `max_length` characters; a shorter one unchanged."""
    if len(text) <= max_length:
        return text
    half = (max_length - 3) // 2
    return f"{text[:half].rpartition(' ')[0] or text[:half]} … {text[-half:].partition(' ')[2] or text[-half:]}"


def number(value: Any, digits: int) -> str:
    """Return a number of the status with `digits` decimals; empty when it is absent."""
    return f"{float(value):.{digits}f}" if isinstance(value, int | float) else ""
