"""Restart accounting: every end of a pod is counted once, under the right heading, and sometimes it is the job's end.

What an end counts as: exit code 75 and 0 of a worker, and 130 of the coordinator, nothing; an eviction, a lost node, a
deletion from outside, a disruption; anything else a failure, of which runPolicy.backoffLimit are forgiven. Exit codes
of the coordinator that are verdicts about the job end it at once.
Rule: pure. Ends are told apart by their ids, never by order or number of events; the ids that the counts include stay
in the status as long as their pods exist, so an operator that died in between neither forgets nor counts twice. Between
two looks a container may have ended more than once: that counts once, in the job's favour.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from rlhf_api.conditions import FinishedReason
from rlhf_api.names import ExitCode, Group
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.plan import Event
from rlhf_operator.reconcile.pod import Pod
from rlhf_operator.reconcile.words import how_it_ended

Json = dict[str, Any]

VERDICTS: Final[Mapping[int, FinishedReason]] = {
    ExitCode.USAGE: FinishedReason.INVALID,
    ExitCode.USER_CODE: FinishedReason.USER_CODE,
    ExitCode.BAD_MODEL: FinishedReason.BAD_MODEL,
    ExitCode.BAD_DATA: FinishedReason.BAD_DATA,
    ExitCode.STORAGE: FinishedReason.STORAGE,
    ExitCode.ADDRESS_IN_USE: FinishedReason.ERROR,
}
"""Exit codes with which the coordinator ends the job: no restart changes them."""
EVENTS_A_PASS: Final = 10
"""Ends that are told as events in one pass; a lost rack is not a thousand events."""
LAST_REASON_MAX: Final = 1024


@dataclass(frozen=True)
class Account:
    """The counts after this visit."""

    failures: int
    disruptions: int
    accounted: dict[str, str]
    """Id of an end -> name of its pod."""
    last_reason: str | None = None
    last_time: str | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Group -> ends that are new in this visit, free ones included."""
    verdict: tuple[FinishedReason, str] | None = None
    """The job has failed."""
    complete: bool = False
    """The coordinator finished."""
    events: tuple[Event, ...] = ()

    def with_deleted(self, pods: Iterable[Pod]) -> dict[str, str]:
        """`accounted` and the pods about to be deleted: their ends are wanted."""
        return self.accounted | {pod.uid: pod.name for pod in pods}

    def written(self, accounted: Mapping[str, str]) -> Json:
        """`status.restarts`."""
        found: Json = {"failures": self.failures, "disruptions": self.disruptions}
        if self.last_reason:
            found |= {"lastReason": self.last_reason[:LAST_REASON_MAX], "lastTime": self.last_time}
        # Also when empty: the API server fills in its default, and what comes back must equal what was written.
        found["accounted"] = [{"pod": name, "id": each} for each, name in sorted(accounted.items())]
        return found


def account(
    before: Mapping[str, Any],
    pods: Iterable[Pod],
    limit: int,
    now: datetime,
    started: datetime | None,
    *,
    stopping: bool = False,
) -> Account:
    """The accounts with every new end of `pods` in them; `before` is `status.restarts`, `limit` the backoffLimit.

    Deletions that were asked for before `started` were the suspension's. Of a job that is `stopping` all ends are
    wanted, but for what the coordinator says about the job.
    """
    known = {str(each["id"]): str(each["pod"]) for each in before.get("accounted") or []}
    kept: dict[str, str] = {}
    counts: Counter[str] = Counter(failure=int(before.get("failures") or 0), disruption=before.get("disruptions") or 0)
    restarts: Counter[str] = Counter()
    reason, moment, verdict, complete = before.get("lastReason"), before.get("lastTime"), None, False
    events = []
    for pod in sorted(pods, key=lambda each: each.name):
        kept |= {each: pod.name for each in (pod.uid, pod.end.id if pod.end else "") if each in known}
        if _finished(pod):
            complete = True
            continue
        found = _new_end(pod, known, started)
        if found is None or (stopping and pod.group != Group.COORDINATOR):
            continue
        end_id, heading, text = found
        kept[end_id] = pod.name
        restarts[pod.group] += 1
        counts[heading] += 1
        if heading == "free":
            continue
        reason, moment = f"{pod.name}: {text}", rfc3339(now)
        if heading == "verdict" and pod.end is not None:
            verdict = (VERDICTS[pod.end.code or 0], f"the coordinator ended with {text}")
        elif heading == "failure" and counts["failure"] > limit:
            told = (
                f"{counts['failure']} failures, the limit of spec.runPolicy.backoffLimit is {limit}; the last: {reason}"
            )
            verdict = verdict or (FinishedReason.BACKOFF_LIMIT, told)
        events.append(_event(heading, reason, counts["failure"], limit))
    return Account(
        failures=counts["failure"],
        disruptions=counts["disruption"],
        accounted=kept,
        last_reason=reason,
        last_time=moment,
        restarts=restarts,
        verdict=None if complete else verdict,
        complete=complete,
        events=tuple(events[:EVENTS_A_PASS]),
    )


def _finished(pod: Pod) -> bool:
    return pod.group == Group.COORDINATOR and pod.end is not None and pod.end.code == ExitCode.OK


def _new_end(pod: Pod, known: Mapping[str, str], started: datetime | None) -> tuple[str, str, str] | None:
    """(id, heading, words) of an end that is not counted yet."""
    if pod.uid in known:
        return None
    if pod.disruption:
        return pod.uid, "disruption", f"disrupted ({pod.disruption})"
    asked = pod.deletion_asked
    if asked is not None:
        wanted = started is not None and asked < started
        return None if wanted else (pod.uid, "disruption", "deleted from outside")
    if pod.end is None or pod.end.id in known:
        return None
    return pod.end.id, _heading(pod), how_it_ended(pod.end)


def _heading(pod: Pod) -> str:
    assert pod.end is not None
    code, coordinator = pod.end.code, pod.group == Group.COORDINATOR
    if code is None and pod.end.reason.lower().startswith(("outof", "unexpectedadmission")):
        return "disruption"  # the node was taken by somebody else meanwhile
    if code == ExitCode.RESTART or (code == ExitCode.OK and not coordinator):
        return "free"
    if coordinator and code == ExitCode.INTERRUPTED:
        return "free"
    return "verdict" if coordinator and code in VERDICTS else "failure"


def _event(heading: str, reason: str, failures: int, limit: int) -> Event:
    if heading == "disruption":
        return Event("Disrupted", f"{reason}; it is replaced, and not counted as a failure", warning=True)
    if heading == "verdict":
        return Event("CoordinatorEnded", reason, warning=True)
    return Event("WorkerFailed", f"{reason} (failure {failures}, {limit} are forgiven)", warning=True)
