"""Counts new ends of pods as failures, disruptions or neither, and may fail the job. Rule: pure.

The ids of counted ends stay in the status while their pods are observed, so that an end is not counted twice. A
container that ended several times between two reconciles counts once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from rlhf_api.job.failure import FailureRule
from rlhf_api.job.policy import RunPolicy
from rlhf_common.conditions import FinishedReason
from rlhf_common.names import ExitCode, Group
from rlhf_operator.reconcile.failures import failure_policy
from rlhf_operator.reconcile.failures.exit_messages import OUT_OF_MEMORY, how_it_ended, log_lines
from rlhf_operator.reconcile.failures.failure_policy import PolicyMatch
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import JobEvent
from rlhf_operator.reconcile.timestamps import rfc3339

Json = dict[str, Any]

MAX_EVENTS_PER_RECONCILE: Final = 10
"""Most ends that become events in one reconcile."""
LAST_REASON_MAX: Final = 1024
REQUESTED: Final = PolicyMatch("")
"""Match of an end that was requested by or from the process; it is neither a failure nor a disruption."""


class JobFailure(NamedTuple):
    """The reason why a job has failed."""

    reason: FinishedReason
    message: str
    log: str
    """Last log lines of the pod that caused the failure."""


class GroupRestart(NamedTuple):
    """The reason why the failure policy restarts all pods of a group."""

    why: str
    whole_job: bool
    """Whether all other groups restart too."""


@dataclass(frozen=True)
class UncountedEnd:
    """An end that is not counted yet."""

    id: str
    pod: ObservedPod
    match: PolicyMatch
    message: str
    """Description of the end."""
    whole: bool = False
    """Whether the pod's uid is recorded beside the id of the end."""

    @property
    def described(self) -> str:
        """Return `job-training-1: exit code 1: ...`."""
        return f"{self.pod.name}: {self.message}"

    @property
    def ids(self) -> set[str]:
        """Return the ids under which the end is recorded."""
        return {self.id, self.pod.uid} if self.whole else {self.id}

    @property
    def out_of_memory(self) -> bool:
        """Return whether this is the end of a container that was killed for exceeding its memory limit."""
        return self.pod.end is not None and self.id == self.pod.end.id and self.pod.end.reason == OUT_OF_MEMORY

    @property
    def well(self) -> bool:
        """Return whether the container ended with exit code 0."""
        return self.pod.end is not None and self.id == self.pod.end.id and self.pod.end.code == ExitCode.OK


@dataclass(frozen=True)
class FailureCounts:
    """The counts with all observed ends."""

    failures: int
    disruptions: int
    accounted: dict[str, str]
    """Id of an end -> name of its pod."""
    last_reason: str | None = None
    last_time: str | None = None
    ends: Mapping[str, int] = field(default_factory=dict)
    """Group -> new ends, requested ones included, without those with exit code 0; empty if `complete`."""
    out_of_memory: Mapping[str, int] = field(default_factory=dict)
    """Group -> new ends of containers that were killed for their memory."""
    failed: JobFailure | None = None
    """Failure of the job; None if it has not failed."""
    complete: bool = False
    """Whether the coordinator finished."""
    restarts: Mapping[str, GroupRestart] = field(default_factory=dict)
    """Group -> restart of all its pods; empty for a job that stops."""
    messages: Mapping[str, str] = field(default_factory=dict)
    """Uid of a pod -> how it or its container ended, for new ends."""
    events: tuple[JobEvent, ...] = ()

    def with_deleted(self, pods: Iterable[ObservedPod]) -> dict[str, str]:
        """Return `accounted` with the pods about to be deleted, whose ends are intended."""
        return self.accounted | {pod.uid: pod.name for pod in pods}

    def status(self, accounted: Mapping[str, str], back_offs: Sequence[Json]) -> Json:
        """Return `status.restarts`; `back_offs` is its field `backOff`."""
        status: Json = {"failures": self.failures, "disruptions": self.disruptions}
        if self.last_reason:
            status |= {"lastReason": self.last_reason[:LAST_REASON_MAX], "lastTime": self.last_time}
        # Written even if empty: the API server fills in its default, and the stored status must equal the written one.
        status["accounted"] = [{"pod": name, "id": end} for end, name in sorted(accounted.items())]
        status["backOff"] = list(back_offs)
        return status


def count_failures(
    before: Mapping[str, Any],
    pods: Iterable[ObservedPod],
    policy: RunPolicy,
    now: datetime,
    started: datetime | None,
    *,
    stopping: bool = False,
    lost: Mapping[str, str] = MappingProxyType({}),
) -> FailureCounts:
    """Return the counts with every new end of `pods`; `before` is `status.restarts`.

    `lost`: uid -> reason for pods that are deleted now because the coordinator has lost them. If the job is `stopping`,
    only ends of the coordinator count.
    """
    counted = {str(entry["id"]): str(entry["pod"]) for entry in before.get("accounted") or []}
    listed = sorted(pods, key=lambda pod: pod.name)
    retained = {end: pod.name for pod in listed for end in (pod.uid, pod.end.id if pod.end else "") if end in counted}
    complete = any(_finished(pod) for pod in listed)
    rules = policy.failure_policy.rules
    candidates = [pod for pod in listed if not _finished(pod) and (not stopping or pod.group == Group.COORDINATOR)]
    ends = [end for pod in candidates if (end := _new_end(pod, counted, started, rules)) is not None]
    gone = [pod for pod in candidates if pod.uid in lost and pod.uid not in counted]
    # Several workers lost at once have one cause.
    matches = [failure_policy.of_lost(rules, pod, alone=pod is gone[0]) for pod in gone]
    ends += [UncountedEnd(pod.uid, pod, match, lost[pod.uid]) for pod, match in zip(gone, matches, strict=True)]
    counter = FailureCounter(
        policy.backoff_limit, int(before.get("failures") or 0), int(before.get("disruptions") or 0)
    )
    for end in ends:
        counter.count(end)
    reasons = [end.described for end in ends if end.match is not REQUESTED] or [
        f"{pod.name}: {how_it_ended(pod.end)}" for pod in candidates if pod.end and _explained(pod, counted)
    ]
    return FailureCounts(
        failures=counter.failures,
        disruptions=counter.disruptions,
        accounted=retained | {end_id: end.pod.name for end in ends for end_id in end.ids},
        last_reason=reasons[-1] if reasons else before.get("lastReason"),
        last_time=rfc3339(now) if reasons else before.get("lastTime"),
        # Workers may end with exit code 0 after the last iteration.
        ends=Counter() if complete else Counter(end.pod.group for end in ends if not end.well),
        out_of_memory=Counter(end.pod.group for end in ends if end.out_of_memory),
        failed=None if complete else counter.failed,
        complete=complete,
        restarts={} if stopping else counter.restarts,
        messages={end.pod.uid: end.message for end in ends},
        events=tuple(counter.events[:MAX_EVENTS_PER_RECONCILE]),
    )


class FailureCounter:
    """The counts while ends are added; exists for one call of `count_failures`."""

    def __init__(self, limit: int, failures: int, disruptions: int) -> None:
        self.limit, self.failures, self.disruptions = limit, failures, disruptions
        self.failed: JobFailure | None = None
        self.restarts: dict[str, GroupRestart] = {}
        self.events: list[JobEvent] = []

    def count(self, end: UncountedEnd) -> None:
        """Count one end according to its match of the failure policy."""
        match = end.match
        if match is REQUESTED:
            return
        if match.action == "FailJob":
            self._fail_job(end)
            return
        if match.action == "Ignore":
            self.disruptions += 1
            reason = "FailureIgnored" if match.rule else "Disrupted"
            text = f"{end.described}; it is replaced, and not counted as a failure{match.by}"
        else:
            self.failures += 1
            forgiven = f"(failure {self.failures}, {self.limit} are forgiven)"
            reason, text = "WorkerFailed", f"{end.described} {forgiven}{match.by}"
            if self.failures > self.limit and self.failed is None:
                limit = f"the limit of spec.runPolicy.backoffLimit is {self.limit}"
                message = f"{self.failures} failures, {limit}; the last: {end.described}"
                self.failed = JobFailure(FinishedReason.BACKOFF_LIMIT, message, log_lines(end.pod))
        self.events.append(JobEvent(reason, text, warning=True))
        self._restart(end)

    def _fail_job(self, end: UncountedEnd) -> None:
        match, coordinator = end.match, end.pod.group == Group.COORDINATOR
        message = f"the coordinator ended with {end.message}" if coordinator else end.described
        remedy = f". To go on, {match.remedy}" if match.remedy else ""
        # The coordinator's reason takes precedence.
        if self.failed is None or coordinator:
            self.failed = JobFailure(match.reason, f"{message.rstrip('.')}{match.by}{remedy}", log_lines(end.pod))
        self.events.append(JobEvent("CoordinatorEnded" if coordinator else "WorkerFailed", end.described, warning=True))

    def _restart(self, end: UncountedEnd) -> None:
        why = f"{end.described}{end.match.by}"
        if end.match.scope == "Group":
            self.restarts.setdefault(end.pod.group, GroupRestart(why, whole_job=False))
        elif end.match.scope == "Job":
            whole_job_groups = {group for group, restart in self.restarts.items() if restart.whole_job}
            self.restarts |= {
                group: GroupRestart(why, whole_job=True) for group in Group if group not in whole_job_groups
            }


def _finished(pod: ObservedPod) -> bool:
    return pod.group == Group.COORDINATOR and pod.end is not None and pod.end.code == ExitCode.OK


def _new_end(
    pod: ObservedPod, counted: Mapping[str, str], started: datetime | None, rules: Sequence[FailureRule]
) -> UncountedEnd | None:
    if pod.uid in counted:
        return None
    whole = pod.end is not None and pod.phase == "Failed" and pod.end.code is None
    if whole and pod.end and pod.end.id in counted:
        return None  # the end of its container was already counted
    if pod.disruption:
        end_id = pod.end.id if whole and pod.end else pod.uid
        why = f"{pod.disruption}: {pod.disruption_message}" if pod.disruption_message else pod.disruption
        return UncountedEnd(end_id, pod, failure_policy.of_disruption(rules, pod), f"disrupted ({why})", whole=True)
    asked = pod.deletion_asked
    if asked is not None:
        if started is not None and asked < started:
            return None
        return UncountedEnd(pod.uid, pod, failure_policy.of_disruption(rules, pod), "deleted from outside", whole=True)
    if pod.end is None or pod.end.id in counted:
        return None
    match = REQUESTED if _requested(pod) else failure_policy.of_end(rules, pod)
    return UncountedEnd(pod.end.id, pod, match, how_it_ended(pod.end), whole=whole)


def _explained(pod: ObservedPod, counted: Mapping[str, str]) -> bool:
    """Return whether the container's end was counted and the kubelet now says why it ended the pod."""
    assert pod.end is not None
    return pod.end.code is None and pod.end.id in counted and pod.uid not in counted


def _requested(pod: ObservedPod) -> bool:
    assert pod.end is not None
    code, coordinator = pod.end.code, pod.group == Group.COORDINATOR
    return code == ExitCode.RESTART or code == (ExitCode.INTERRUPTED if coordinator else ExitCode.OK)
