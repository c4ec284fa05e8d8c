"""A job that cannot start releases its resources, waits, and tries again. Rule: pure.

It waits FIRST, then twice as long each time, up to LONGEST; an edit of its spec ends the wait.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.names import Group
from rlhf_operator.gang import members
from rlhf_operator.reconcile.observed.observed_job import NOT_AT_WORK, CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import CONFIG_REASONS, CREATING, IMAGE_REASONS, ObservedPod
from rlhf_operator.reconcile.timestamps import rfc3339, time_of

Json = dict[str, Any]

FIRST: Final = timedelta(seconds=60)
LONGEST: Final = timedelta(hours=1)
MARGIN: Final = timedelta(seconds=60)
"""Time beyond startTimeoutSeconds for which a waiting coordinator is given time."""
READ_LATELY: Final = timedelta(seconds=60)
REASON_MAX: Final = 512
_KEPT_FROM_STARTING: Final = IMAGE_REASONS | CONFIG_REASONS | {CREATING}


@dataclass(frozen=True)
class StartBackOff:
    """The latest release of all resources."""

    attempts: int
    """Consecutive attempts that failed."""
    since: datetime
    until: datetime
    generation: int
    """metadata.generation at the decision; a new generation is tried at once."""
    reason: str

    def holds(self, generation: int, now: datetime) -> bool:
        """Return whether no pod is created now. `generation`: metadata.generation."""
        return generation == self.generation and now < self.until

    def message(self) -> str:
        """Return the reason and the time of the next attempt."""
        return (
            f"could not begin: {self.reason}. All pods ended and released their resources at {rfc3339(self.since)}; "
            f"the next attempt ({self.attempts + 1}) is at {rfc3339(self.until)}, or at once when the spec is changed"
        )

    def written(self) -> Json:
        """Return `status.release`."""
        return {
            "attempts": self.attempts,
            "since": rfc3339(self.since),
            "until": rfc3339(self.until),
            "generation": self.generation,
            "reason": self.reason,
        }


def stored_back_off(status: Mapping[str, Any]) -> StartBackOff | None:
    """Return the back-off in `status.release`; None if there is none."""
    stored = status.get("release") or {}
    since, until = time_of(stored.get("since")), time_of(stored.get("until"))
    if since is None or until is None:
        return None
    return StartBackOff(int(stored["attempts"]), since, until, int(stored["generation"]), str(stored["reason"]))


def decided(
    job: RLHFJob,
    pods: Mapping[str, ObservedPod],
    reading: CoordinatorReading | None,
    before: StartBackOff | None,
    generation: int,
    now: datetime,
) -> StartBackOff | None:
    """Return the current or latest back-off; a new one if the job must release its resources now.

    None: there was none, or the job has run since its last attempt began.
    """
    if before is not None and before.holds(generation, now):
        return before
    why = _cannot_begin(job, pods.values(), reading, now)
    if why:
        attempts = before.attempts + 1 if before else 1
        until = now + min(LONGEST, FIRST * 2 ** min(attempts - 1, 16))
        return StartBackOff(attempts, now, until, generation, why[:REASON_MAX])
    at_work = reading is not None and now - reading.at <= READ_LATELY and reading.phase not in NOT_AT_WORK
    return None if at_work and before and reading and reading.at > before.until else before


def unable_to_start(job: RLHFJob, pods: Iterable[ObservedPod], now: datetime) -> list[ObservedPod]:
    """Return pods that cannot start while all pods that an iteration needs are ready; empty while some are not."""
    listed = list(pods)
    return _overdue(job, listed, now) if _enough(job, listed) else []


def requeue_after(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> float | None:
    """Return the seconds until a pod or the coordinator has waited for too long; None if that will not happen."""
    listed = list(pods)
    limit = timedelta(seconds=job.spec.run_policy.pod_start_timeout_seconds)
    ends = [since + limit for pod in listed if (since := _kept_since(pod)) is not None and limit]
    began = _began(listed)
    if began is not None and reading is not None and reading.phase in NOT_AT_WORK:
        ends.append(began + _patience(job))
    left = [(end - now).total_seconds() for end in ends]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _cannot_begin(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime) -> str:
    """Return why no iteration can start; empty if no lasting reason is known."""
    listed = list(pods)
    overdue = _overdue(job, listed, now)
    if overdue and not _enough(job, listed):
        first, since = overdue[0], _kept_since(overdue[0])
        assert since is not None
        words = f"{first.waiting}: {first.waiting_message}" if first.waiting_message else first.waiting
        more = f", as {len(overdue) - 1} more are" if len(overdue) > 1 else ""
        return f"{first.name} has a node since {rfc3339(since)} and cannot start ({words}){more}"
    began = _began(listed)
    waits = reading is not None and now - reading.at <= READ_LATELY and reading.phase in NOT_AT_WORK
    if not waits or reading is None or began is None or not _enough(job, listed):
        return ""
    if now - began < _patience(job):
        return ""
    awaited = reading.waiting_for[0] if reading.waiting_for else "its workers"
    return (
        f"the pods of an iteration run since {rfc3339(began)}, and the coordinator still waits for {_lasting(awaited)}"
    )


def _began(pods: Iterable[ObservedPod]) -> datetime | None:
    """Return when the container that started last of the active pods started; None if none runs."""
    return max((pod.running for pod in pods if pod.running is not None and pod.active), default=None)


def _patience(job: RLHFJob) -> timedelta:
    return timedelta(seconds=job.spec.run_policy.start_timeout_seconds) + MARGIN


def _lasting(message: str) -> str:
    """Return the sentence without its seconds, which change with every reconcile."""
    return message.rpartition(" (")[0] or message


def _overdue(job: RLHFJob, pods: Iterable[ObservedPod], now: datetime) -> list[ObservedPod]:
    limit = timedelta(seconds=job.spec.run_policy.pod_start_timeout_seconds)
    late = [pod for pod in pods if limit and (since := _kept_since(pod)) is not None and now - since >= limit]
    return sorted(late, key=lambda pod: (pod.group, pod.index))


def _kept_since(pod: ObservedPod) -> datetime | None:
    """Return when the pod got its node, or its last run ended, if it does not start; None otherwise."""
    if not pod.active or pod.scheduled is None or pod.waiting not in _KEPT_FROM_STARTING:
        return None
    ended = pod.end.at if pod.end is not None else None
    return max(pod.scheduled, ended) if ended is not None else pod.scheduled


def _enough(job: RLHFJob, pods: Iterable[ObservedPod]) -> bool:
    """Return whether all pods that an iteration needs are ready."""
    up = [pod.group for pod in pods if pod.active and pod.ready]
    return all(up.count(Group(group)) >= count for group, count in members.minimum(job).items())
