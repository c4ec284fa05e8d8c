"""A job that cannot begin gives everything back, waits, and tries again: GPUs that are held for nothing help nobody.

A job cannot begin when pods that have a node are kept from starting (an image, a volume, an init container) for
spec.runPolicy.podStartTimeoutSeconds, or when workers run while the coordinator never comes to have all it needs for
spec.runPolicy.startTimeoutSeconds. Time without a node does not count: that is capacity, and a gang or a queue is what
keeps the others from holding theirs. A pod that an iteration can do without is replaced alone, in its own back-off.
The whole job ends its pods as for a suspension, the coordinator with its checkpoint first, and then its gang object and
its queue's reservation go too. It tries again after FIRST, twice as long each time, to LONGEST (Kueue's figures for
jobs whose pods do not get ready), or at once when its spec is edited. It counts towards no limit; the deadline goes on.
Rule: pure; computed from times in the pods, the reading and `status.release`.
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
"""Beyond startTimeoutSeconds: a coordinator restarts what is stuck at that time, which may be the cure."""
READ_LATELY: Final = timedelta(seconds=60)
REASON_MAX: Final = 512
_KEPT_FROM_STARTING: Final = IMAGE_REASONS | CONFIG_REASONS | {CREATING}


@dataclass(frozen=True)
class StartBackOff:
    """The last time a job gave everything back; it is kept until the job is at work again."""

    attempts: int
    """In a row."""
    since: datetime
    until: datetime
    generation: int
    """metadata.generation it was decided for; another one is tried at once."""
    reason: str

    def holds(self, generation: int, now: datetime) -> bool:
        """Return whether no pod is made now. `generation`: metadata.generation."""
        return generation == self.generation and now < self.until

    def message(self) -> str:
        """Return why, and until when."""
        return (
            f"could not begin: {self.reason}. All pods are ended and their resources given back since "
            f"{rfc3339(self.since)}; tried again at {rfc3339(self.until)} (attempt {self.attempts + 1}), or at once "
            "when the spec is changed"
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


def known(status: Mapping[str, Any]) -> StartBackOff | None:
    """Return the back-off that `status.release` has; None when it has none."""
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
    """Return the back-off that holds or was the last; a new one when the job has to give everything back now."""
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
    """Return the pods to replace that cannot start and that an iteration can do without: another node may do."""
    listed = list(pods)
    return _overdue(job, listed, now) if _enough(job, listed) else []


def requeue_after(
    job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime
) -> float | None:
    """Return the seconds until a pod has been kept from starting for too long, or the coordinator has waited for too
    long; None: neither will be."""
    listed = list(pods)
    limit = timedelta(seconds=job.spec.run_policy.pod_start_timeout_seconds)
    ends = [since + limit for pod in listed if (since := _kept_since(pod)) is not None and limit]
    began = _began(listed)
    if began is not None and reading is not None and reading.phase in NOT_AT_WORK:
        ends.append(began + _patience(job))
    left = [(end - now).total_seconds() for end in ends]
    return min((seconds for seconds in left if seconds > 0), default=None)


def _cannot_begin(job: RLHFJob, pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime) -> str:
    """Return why no iteration can begin, though nothing lacks a node; empty: one can, or it is too early to tell."""
    listed = list(pods)
    overdue = _overdue(job, listed, now)
    if overdue and not _enough(job, listed):
        first, since = overdue[0], _kept_since(overdue[0])
        assert since is not None
        words = f"{first.waiting}: {first.waiting_message}" if first.waiting_message else first.waiting
        more = f", as {len(overdue) - 1} more are" if len(overdue) > 1 else ""
        return f"{first.name} has a node since {rfc3339(since)} and is kept from starting ({words}){more}"
    began = _began(listed)
    waits = reading is not None and now - reading.at <= READ_LATELY and reading.phase in NOT_AT_WORK
    if not waits or reading is None or began is None or not _enough(job, listed):
        return ""
    if now - began < _patience(job):
        return ""
    what = reading.waiting_for[0] if reading.waiting_for else "its workers"
    return f"what an iteration needs runs since {rfc3339(began)}, and the coordinator still waits for {_lasting(what)}"


def _began(pods: Iterable[ObservedPod]) -> datetime | None:
    """Return when the last of the pods that run began to; None: none runs."""
    return max((pod.running for pod in pods if pod.running is not None and pod.active), default=None)


def _patience(job: RLHFJob) -> timedelta:
    return timedelta(seconds=job.spec.run_policy.start_timeout_seconds) + MARGIN


def _lasting(message: str) -> str:
    """Return the sentence without its seconds, which are others at the next reconcile."""
    return message.rpartition(" (")[0] or message


def _overdue(job: RLHFJob, pods: Iterable[ObservedPod], now: datetime) -> list[ObservedPod]:
    limit = timedelta(seconds=job.spec.run_policy.pod_start_timeout_seconds)
    late = [pod for pod in pods if limit and (since := _kept_since(pod)) is not None and now - since >= limit]
    return sorted(late, key=lambda pod: (pod.group, pod.index))


def _kept_since(pod: ObservedPod) -> datetime | None:
    """Return when it got its node, or its last run ended, if it is kept from starting; None: it is not."""
    if not pod.active or pod.scheduled is None or pod.waiting not in _KEPT_FROM_STARTING:
        return None
    ended = pod.end.at if pod.end is not None else None
    return max(pod.scheduled, ended) if ended is not None else pod.scheduled


def _enough(job: RLHFJob, pods: Iterable[ObservedPod]) -> bool:
    """Return whether what an iteration needs is up."""
    up = [pod.group for pod in pods if pod.active and pod.ready]
    return all(up.count(Group(group)) >= count for group, count in members.minimum(job).items())
