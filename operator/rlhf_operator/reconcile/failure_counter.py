"""Restart accounting: every end of a pod is counted once, under the right heading, and sometimes it is the job's end.

What an end counts as: exit code 75 and 0 of a worker, and 130 of the coordinator, nothing; what the failure policy
ignores (by itself: preemptions, drains, lost nodes, refusals of a node, deletions from outside), a disruption; what it
restarts, a failure, of which runPolicy.backoffLimit are forgiven; what it says is final ends the job at once.
Rule: pure. Ends are told apart by their ids, never by order or number of events; the ids that the counts include stay
in the status as long as their pods exist, so an operator that died in between neither forgets nor counts twice. Between
two looks a container may have ended more than once: that counts once, in the job's favour.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

from rlhf_api.conditions import FinishedReason
from rlhf_api.job.failure import FailureRule
from rlhf_api.job.policy import RunPolicy
from rlhf_api.names import ExitCode, Group
from rlhf_operator.reconcile import failure_policy, pod_back_off
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.exit_messages import how_it_ended, log_lines
from rlhf_operator.reconcile.failure_policy import PolicyMatch
from rlhf_operator.reconcile.observed_pod import ObservedPod
from rlhf_operator.reconcile.pod_back_off import PodBackOff
from rlhf_operator.reconcile.reconcile_plan import JobEvent

Json = dict[str, Any]

MAX_EVENTS_PER_RECONCILE: Final = 10
"""Ends that are told as events in one pass; a lost rack is not a thousand events."""
LAST_REASON_MAX: Final = 1024
FREE: Final = PolicyMatch("")
"""Of a request: it counts as nothing."""


@dataclass(frozen=True)
class UncountedEnd:
    """An end that is not counted yet."""

    id: str
    pod: ObservedPod
    ruling: PolicyMatch
    words: str

    whole: bool = False
    """Of the pod, and not of its container alone."""

    @property
    def told(self) -> str:
        """`job-training-1: exit code 1: ...`"""
        return f"{self.pod.name}: {self.words}"

    @property
    def ids(self) -> set[str]:
        """By which it is known from now on."""
        return {self.id, self.pod.uid} if self.whole else {self.id}

    @property
    def well(self) -> bool:
        """A process that had nothing left to do."""
        return self.pod.end is not None and self.id == self.pod.end.id and self.pod.end.code == ExitCode.OK


@dataclass(frozen=True)
class FailureCounts:
    """The counts after this visit."""

    failures: int
    disruptions: int
    accounted: dict[str, str]
    """Id of an end -> name of its pod."""
    last_reason: str | None = None
    last_time: str | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Group -> ends that are new in this visit, free ones included."""
    verdict: tuple[FinishedReason, str, str] | None = None
    """The job has failed: why, in words, and the last lines of the log of whoever ended it."""
    complete: bool = False
    """The coordinator finished."""
    scopes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Group -> (Group or Job, why): groups that the failure policy restarts together, the coordinator's with Job."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Uid of a pod -> how it or its container ended, of the ends that are new in this visit."""
    events: tuple[JobEvent, ...] = ()

    def with_deleted(self, pods: Iterable[ObservedPod]) -> dict[str, str]:
        """`accounted` and the pods about to be deleted: their ends are wanted."""
        return self.accounted | {pod.uid: pod.name for pod in pods}

    def written(self, accounted: Mapping[str, str], places: Mapping[str, PodBackOff]) -> Json:
        """`status.restarts`."""
        found: Json = {"failures": self.failures, "disruptions": self.disruptions}
        if self.last_reason:
            found |= {"lastReason": self.last_reason[:LAST_REASON_MAX], "lastTime": self.last_time}
        # Also when empty: the API server fills in its default, and what comes back must equal what was written.
        found["accounted"] = [{"pod": name, "id": each} for each, name in sorted(accounted.items())]
        found["backOff"] = pod_back_off.written(places)
        return found


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
    """The accounts with every new end of `pods` in them; `before` is `status.restarts`.

    `lost`: uids of pods that are deleted now because the coordinator has lost them, and why in words.
    Deletions that were asked for before `started` were the suspension's. Of a job that is `stopping` all ends are
    wanted, but for what the coordinator says about the job.
    """
    known = {str(each["id"]): str(each["pod"]) for each in before.get("accounted") or []}
    listed = sorted(pods, key=lambda each: each.name)
    kept = {each: pod.name for pod in listed for each in (pod.uid, pod.end.id if pod.end else "") if each in known}
    complete = any(_finished(pod) for pod in listed)
    rules = policy.failure_policy.rules
    candidates = [pod for pod in listed if not _finished(pod) and (not stopping or pod.group == Group.COORDINATOR)]
    ends = [end for pod in candidates if (end := _new_end(pod, known, started, rules)) is not None]
    gone = [pod for pod in candidates if pod.uid in lost and pod.uid not in known]
    # What takes several at once is one trouble.
    rulings = [failure_policy.of_lost(rules, pod, alone=pod is gone[0]) for pod in gone]
    ends += [UncountedEnd(pod.uid, pod, ruling, lost[pod.uid]) for pod, ruling in zip(gone, rulings, strict=True)]
    books = _Books(policy.backoff_limit, int(before.get("failures") or 0), int(before.get("disruptions") or 0))
    for end in ends:
        books.enter(end)
    told = [end.told for end in ends if end.ruling is not FREE] or [
        f"{pod.name}: {how_it_ended(pod.end)}" for pod in candidates if pod.end and _explained(pod, known)
    ]
    return FailureCounts(
        failures=books.failures,
        disruptions=books.disruptions,
        accounted=kept | {each: end.pod.name for end in ends for each in end.ids},
        last_reason=told[-1] if told else before.get("lastReason"),
        last_time=rfc3339(now) if told else before.get("lastTime"),
        # Workers end well when the last iteration is trained, and are often seen to before the coordinator is.
        restarts=Counter() if complete else Counter(end.pod.group for end in ends if not end.well),
        verdict=None if complete else books.verdict,
        complete=complete,
        scopes={} if stopping else books.scopes,
        words={end.pod.uid: end.words for end in ends},
        events=tuple(books.events[:MAX_EVENTS_PER_RECONCILE]),
    )


class _Books:
    """The counts, as one end after the other is entered."""

    def __init__(self, limit: int, failures: int, disruptions: int) -> None:
        self.limit, self.failures, self.disruptions = limit, failures, disruptions
        self.verdict: tuple[FinishedReason, str, str] | None = None
        self.scopes: dict[str, tuple[str, str]] = {}
        self.events: list[JobEvent] = []

    def enter(self, end: UncountedEnd) -> None:
        """Counts it."""
        ruling = end.ruling
        if ruling is FREE:
            return
        if ruling.action == "FailJob":
            self._final(end)
            return
        if ruling.action == "Ignore":
            self.disruptions += 1
            reason = "FailureIgnored" if ruling.rule else "Disrupted"
            text = f"{end.told}; it is replaced, and not counted as a failure{ruling.by}"
        else:
            self.failures += 1
            reason, text = "WorkerFailed", f"{end.told} (failure {self.failures}, {self.limit} are forgiven){ruling.by}"
            if self.failures > self.limit and self.verdict is None:
                limit = f"the limit of spec.runPolicy.backoffLimit is {self.limit}"
                words = f"{self.failures} failures, {limit}; the last: {end.told}"
                self.verdict = (FinishedReason.BACKOFF_LIMIT, words, log_lines(end.pod))
        self.events.append(JobEvent(reason, text, warning=True))
        self._restart(end)

    def _final(self, end: UncountedEnd) -> None:
        ruling, coordinator = end.ruling, end.pod.group == Group.COORDINATOR
        words = f"the coordinator ended with {end.words}" if coordinator else end.told
        remedy = f". To go on, {ruling.remedy}" if ruling.remedy else ""
        # The coordinator knows why the others ended, so its word goes before theirs.
        if self.verdict is None or coordinator:
            self.verdict = (ruling.reason, f"{words.rstrip('.')}{ruling.by}{remedy}", log_lines(end.pod))
        self.events.append(JobEvent("CoordinatorEnded" if coordinator else "WorkerFailed", end.told, warning=True))

    def _restart(self, end: UncountedEnd) -> None:
        why = f"{end.told}{end.ruling.by}"
        if end.ruling.scope == "Group":
            self.scopes.setdefault(end.pod.group, ("Group", why))
        elif end.ruling.scope == "Job":
            self.scopes |= {group: ("Job", why) for group in Group if self.scopes.get(group, ("", ""))[0] != "Job"}


def _finished(pod: ObservedPod) -> bool:
    return pod.group == Group.COORDINATOR and pod.end is not None and pod.end.code == ExitCode.OK


def _new_end(
    pod: ObservedPod, known: Mapping[str, str], started: datetime | None, rules: Sequence[FailureRule]
) -> UncountedEnd | None:
    if pod.uid in known:
        return None
    whole = pod.end is not None and pod.phase == "Failed" and pod.end.code is None
    if whole and pod.end and pod.end.id in known:
        return None  # its container's end was counted a moment before
    if pod.disruption:
        name = pod.end.id if whole and pod.end else pod.uid
        why = f"{pod.disruption}: {pod.words}" if pod.words else pod.disruption
        return UncountedEnd(name, pod, failure_policy.of_disruption(rules, pod), f"disrupted ({why})", whole=True)
    asked = pod.deletion_asked
    if asked is not None:
        if started is not None and asked < started:
            return None
        return UncountedEnd(pod.uid, pod, failure_policy.of_disruption(rules, pod), "deleted from outside", whole=True)
    if pod.end is None or pod.end.id in known:
        return None
    ruling = FREE if _requested(pod) else failure_policy.of_end(rules, pod)
    return UncountedEnd(pod.end.id, pod, ruling, how_it_ended(pod.end), whole=whole)


def _explained(pod: ObservedPod, known: Mapping[str, str]) -> bool:
    """The end of its container was counted, and now the kubelet says why it ended the pod."""
    assert pod.end is not None
    return pod.end.code is None and pod.end.id in known and pod.uid not in known


def _requested(pod: ObservedPod) -> bool:
    assert pod.end is not None
    code, coordinator = pod.end.code, pod.group == Group.COORDINATOR
    return code == ExitCode.RESTART or code == (ExitCode.INTERRUPTED if coordinator else ExitCode.OK)
