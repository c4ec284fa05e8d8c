"""A stored RLHFJob as the verbs read it: conditions, phase, progress, ages. Pure.

Rule: reads what may be missing, as an operator of another version may have written it, and never the clock. What has
another form than the status' own model is left out, as the operator does: whoever lists the jobs of all namespaces
reads what others wrote.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from rlhf_api import names
from rlhf_api.conditions import ConditionType, FinishedReason, RunningReason
from rlhf_api.names import ExitCode
from rlhf_cli.console import duration
from rlhf_operator.reconcile.termination_log import ITERATION_MAX
from rlhf_operator.stored_job import status_of

Json = Mapping[str, Any]

NEAR_NAMES: Final = 3
_SCALARS: Final = frozenset(
    {"iterations", "seed", "deterministic", "placement", "suspend", "managedBy", "operatorClass"}
)
"""Fields of a spec that are no objects."""
_FAILURE_CODES: Final = {
    FinishedReason.USER_CODE: ExitCode.USER_CODE,
    FinishedReason.BAD_MODEL: ExitCode.BAD_MODEL,
    FinishedReason.BAD_DATA: ExitCode.BAD_DATA,
    FinishedReason.STORAGE: ExitCode.STORAGE,
    FinishedReason.INVALID: ExitCode.USAGE,
}


@dataclass(frozen=True)
class Stored:
    """One job."""

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
        """spec, or nothing; of its groups and policies those that are objects."""
        given = self.body.get("spec")
        found = given.items() if isinstance(given, dict) else ()
        return {name: each for name, each in found if isinstance(each, dict) or name in _SCALARS}

    @cached_property
    def status(self) -> Json:
        """status, or nothing."""
        return status_of(self.body.get("status"))[0] or {}

    @property
    def progress(self) -> Json:
        """status.progress, or nothing."""
        return dict(self.status.get("progress") or {})

    @property
    def created(self) -> datetime | None:
        """metadata.creationTimestamp."""
        return moment(self.body["metadata"].get("creationTimestamp"))

    @property
    def operator_class(self) -> str:
        """spec.operatorClass, or nothing."""
        return str(self.spec.get("operatorClass") or "")

    @property
    def iterations(self) -> int:
        """spec.iterations."""
        wanted = self.spec.get("iterations")
        return wanted if isinstance(wanted, int) and 0 <= wanted <= ITERATION_MAX else 0

    @property
    def iteration(self) -> int:
        """Iterations trained, as of the last look."""
        return int(self.progress.get("iteration") or 0)

    def condition(self, kind: ConditionType) -> Json:
        """A condition, or nothing."""
        return next((each for each in self.status.get("conditions") or [] if each.get("type") == kind), {})

    def told(self, kind: ConditionType) -> str:
        """The sentence of a condition, without the lines of a log that may be below it."""
        return first_line(self.condition(kind))

    @property
    def last_log(self) -> list[str]:
        """What the operator kept of a log when the job failed: a heading and lines, or nothing."""
        return str(self.condition(ConditionType.FAILED).get("message") or "").splitlines()[1:]

    def holds(self, kind: ConditionType) -> bool:
        """A condition is True."""
        return self.condition(kind).get("status") == "True"

    @property
    def phase(self) -> str:
        """The word that `kubectl get` shows: the reason of Running."""
        return str(self.condition(ConditionType.RUNNING).get("reason") or RunningReason.PENDING)

    @property
    def state(self) -> str:
        """The phase and, where the operator said one, why."""
        message = self.condition(ConditionType.RUNNING).get("message")
        return f"{self.phase}: {message}" if message else self.phase

    @property
    def seconds_left(self) -> float:
        """Estimate while it runs; 0 when there is none."""
        return float(self.progress.get("remainingSeconds") or 0) if self.holds(ConditionType.RUNNING) else 0.0

    @property
    def finished(self) -> bool:
        """Complete or Failed, for good."""
        return self.holds(ConditionType.COMPLETE) or self.holds(ConditionType.FAILED)

    @property
    def selector(self) -> str:
        """Labels of its pods."""
        return f"{names.LABEL_JOB_NAME}={self.name}"

    @property
    def failure_code(self) -> int:
        """The exit code that stands for its failure: the coordinator's own where it gave the verdict."""
        reason = self.condition(ConditionType.FAILED).get("reason")
        known: Mapping[str, ExitCode] = {each.value: code for each, code in _FAILURE_CODES.items()}
        return int(known.get(str(reason), ExitCode.FAILED))


def first_line(condition: Json) -> str:
    """What a condition says, without the lines of a log that may be below it."""
    return str(condition.get("message") or "").partition("\n")[0]


def moment(text: Any) -> datetime | None:
    """A time of the API server; None for none, and for what is no time."""
    try:
        return datetime.fromisoformat(str(text)) if text else None
    except ValueError:
        return None


def age(then: datetime | None, now: datetime) -> str:
    """`42s`, `3m 07s`; empty when unknown."""
    return "" if then is None else duration(max(0.0, (now - then).total_seconds()))


def near(name: str, known: Iterable[str]) -> list[str]:
    """Names that may have been meant."""
    every = sorted(set(known))
    beginning = [each for each in every if each.startswith(name) or name.startswith(each)]
    return list(dict.fromkeys([*difflib.get_close_matches(name, every, NEAR_NAMES, 0.5), *beginning]))[:NEAR_NAMES]


def shortened(text: str, most: int = 200) -> str:
    """The beginning and the end of a long text: what it is about, and the cause and the remedy."""
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half].rpartition(' ')[0] or text[:half]} … {text[-half:].partition(' ')[2] or text[-half:]}"


def number(value: Any, digits: int) -> str:
    """A number of the status with `digits` decimals; empty for none."""
    return f"{float(value):.{digits}f}" if isinstance(value, int | float) else ""
