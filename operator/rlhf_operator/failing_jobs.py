"""Counts the failed reconciles of each job since the last complete one, and decides when to inform its user.

The counts are lost with the process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rlhf_common import names
from rlhf_operator.api_client.errors import ApiError, InvalidError
from rlhf_operator.definition import INSTALL
from rlhf_operator.reconcile.api_failure import NOT_DECLARED, describe_failure
from rlhf_operator.reconcile.reconcile_plan import JobEvent

ATTEMPTS: Final = 3
"""Failures before a user is informed, unless the cluster's definition of RLHFJobs is too old."""
EVENT_SECONDS: Final = 1800.0
"""Seconds until the same event is posted again while a job fails; by default the API server stores an event for an
hour.
"""


_OLD: Final = (
    f"the cluster's definition of RLHFJobs rejects what the operator writes, as an older definition does; the operator "
    f"does nothing for the job until `{INSTALL}` of the operator's version updates the definition (`helm upgrade` "
    "does, unless crds.enabled is false)"
)


@dataclass
class _Failures:
    count: int = 0
    words: str = ""
    event: str = ""
    """Reason of the latest event."""
    posted: float = 0.0


class FailingJobs:
    """Failures since the last complete reconcile, for each job key."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns the seconds of a monotonic clock."""
        self._clock = clock
        self._failures: dict[str, _Failures] = {}

    def fail(self, key: str, error: ApiError) -> None:
        """Count one more failure."""
        failures = self._failures.setdefault(key, _Failures())
        failures.count += 1
        failures.words = str(error)

    def succeed(self, key: str) -> bool:
        """Reset the failures of a job; return whether there were enough to inform its user."""
        failures = self._failures.pop(key, None)
        return failures is not None and failures.count >= ATTEMPTS

    def message(self, key: str) -> str:
        """Return the message about a job's failures; empty if there are none or too few."""
        failures = self._failures.get(key)
        if failures is None or failures.count < ATTEMPTS:
            return ""
        return describe_failure(failures.words, key.partition("/")[0])

    def event(self, key: str, error: ApiError) -> JobEvent | None:
        """Return the event about a status that cannot be written; None if it is too early or was posted recently."""
        failures = self._failures.setdefault(key, _Failures())
        old = isinstance(error, InvalidError) or NOT_DECLARED in str(error)
        if not old and failures.count < ATTEMPTS:
            return None
        reason, now = "DefinitionTooOld" if old else "StatusNotWritten", self._clock()
        if failures.event == reason and now - failures.posted < EVENT_SECONDS:
            return None
        failures.event, failures.posted = reason, now
        text = f"the job's status cannot be written: {describe_failure(str(error), key.partition('/')[0])}"
        return JobEvent(reason, f"{_OLD}. {text}" if old else text, warning=True)


def is_status_write(error: ApiError) -> bool:
    """Return whether a request was about the status of an RLHFJob."""
    return f" {names.PLURAL} " in error.request and error.request.endswith("/status")
