"""What each pod of a job does, or waits for, in a sentence: its status, and the events on it. Pure.

Rule: words on how a container ended are the operator's own (`reconcile.words`). An event is believed only while the pod
is not up: warnings of a start that succeeded are history.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api import names
from rlhf_cli.cluster.stored import moment
from rlhf_operator.reconcile.diagnostics import CONFIG_REASONS, IMAGE_REASONS
from rlhf_operator.reconcile.exit_messages import how_it_ended
from rlhf_operator.reconcile.observed_pod import ObservedPod, pod_of

Json = Mapping[str, Any]

_REMEDIES: Final[Mapping[str, str]] = {
    "FailedMount": "create the volume, Secret or ConfigMap it names, or correct the group's template",
    "FailedAttachVolume": "free the volume, or correct the group's template",
    "FailedCreatePodSandBox": "look at the node's network and container runtime",
    "NetworkNotReady": "look at the node's network",
}
"""Reason of a Warning on a pod -> what would help."""
SCHEDULER_PATIENCE: Final = timedelta(seconds=30)
"""A scheduler that runs has found a node, or said why not, long before."""
_SYMPTOMS: Final = frozenset({"Unhealthy", "BackOff", "Failed"})
"""Warnings that say no more than the pod's own status."""
_ROUTINE: Final = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
_ORDER: Final = {group.value: number for number, group in enumerate(names.Group)}


@dataclass(frozen=True)
class Worker:
    """One pod."""

    pod: ObservedPod
    name: str
    """generation-0, coordinator."""
    node: str
    restarts: int
    """Of its container."""
    in_pool: bool
    state: str
    """One word."""
    told: str
    """What it waits for, or why it ended; empty when it simply runs."""
    started: datetime | None

    @property
    def well(self) -> bool:
        """Up, or ended as it should."""
        return self.state in ("Ready", "Completed")


def workers(bodies: Iterable[Json], events: Iterable[Json], now: datetime) -> list[Worker]:
    """Pods of a job, the coordinator first. `events` may be those of the whole namespace."""
    said = _warnings(events)
    read = [(body, pod_of(body)) for body in bodies]
    found = [_worker(body, pod, said.get(pod.uid), now) for body, pod in read if isinstance(pod, ObservedPod)]
    return sorted(found, key=lambda each: (_ORDER.get(each.pod.group, 9), each.pod.index))


def _worker(body: Json, pod: ObservedPod, warning: Json | None, now: datetime) -> Worker:
    statuses = (body.get("status") or {}).get("containerStatuses") or []
    over = any("terminated" in (each.get("state") or {}) for each in statuses)
    node = str((body.get("spec") or {}).get("nodeName") or "")
    state, told = _state(pod, warning, now, over=over, placed=bool(node))
    labels = body["metadata"].get("labels") or {}
    return Worker(
        pod=pod,
        name=pod.group if pod.group == names.Group.COORDINATOR else names.worker_name(pod.group, pod.index),
        node=node,
        restarts=sum(count for each in statuses if type(count := each.get("restartCount")) is int),
        in_pool=labels.get(names.LABEL_POOL) == "true",
        state=state,
        told=told,
        started=moment((body.get("status") or {}).get("startTime")),
    )


def _state(pod: ObservedPod, warning: Json | None, now: datetime, *, over: bool, placed: bool) -> tuple[str, str]:
    """(one word, sentence); `over`: its container ended and may be started again, `placed`: it has a node."""
    ended = how_it_ended(pod.end) if pod.end is not None else ""
    if pod.deletion is not None:
        return "Leaving", _grace(pod, now)
    if pod.phase == "Succeeded":
        return "Completed", ""
    if pod.phase == "Failed":
        why = f"disrupted ({pod.disruption})" if pod.disruption else f"ended with {ended}" if ended else "it failed"
        return "Failed", why
    if pod.unschedulable:
        return "Unschedulable", f"no node can take it: {pod.unschedulable}"
    if pod.waiting in IMAGE_REASONS:
        words = pod.waiting_message or pod.waiting
        return pod.waiting, f"{words}: correct the image, or give imagePullSecrets in the group's template"
    if pod.waiting in CONFIG_REASONS:
        return pod.waiting, pod.waiting_message or "its container cannot be made"
    if pod.waiting == "CrashLoopBackOff":
        return pod.waiting, f"ended with {ended}; `rlhf logs --previous` shows its last words"
    if over:
        return "Ended", f"its container ended with {ended}"
    if pod.ready:
        return "Ready", ""
    if warning is not None:
        return pod.waiting or _waits(pod), _warned(warning)
    if pod.phase == "Pending" and not pod.waiting and not placed and now - (pod.created or now) > SCHEDULER_PATIENCE:
        return "Pending", "no scheduler has looked at it; see that the cluster's scheduler runs"
    return pod.waiting or _waits(pod), f"before: {ended}" if ended else ""


def _waits(pod: ObservedPod) -> str:
    return "Starting" if pod.phase == "Running" else "Pending"


def _grace(pod: ObservedPod, now: datetime) -> str:
    assert pod.deletion is not None
    left = (pod.deletion - now).total_seconds()
    return f"it may take another {left:.0f}s" if left > 0 else "its time is over, and its node has not ended it"


def _warned(event: Json) -> str:
    reason = str(event.get("reason"))
    remedy = _REMEDIES.get(reason)
    return f"{reason}: {' '.join(str(event.get('note') or '').split())}" + (f"; {remedy}" if remedy else "")


def _warnings(events: Iterable[Json]) -> dict[str, Json]:
    """Pod UID -> its newest Warning."""
    found: dict[str, Json] = {}
    for event in sorted(events, key=lambda each: str(event_time(each) or "")):
        about = event.get("regarding") or {}
        if event.get("type") == "Warning" and about.get("kind") == "Pod" and event.get("reason") not in _SYMPTOMS:
            found[str(about.get("uid"))] = event
    return found


def reasons(pods: Iterable[Worker]) -> dict[str, str]:
    """Worker -> what it waits for; a cause that stops many is told once, and then by the name of the first."""
    first: dict[str, str] = {}
    found = {}
    for each in pods:
        cause = "image" if each.pod.waiting in IMAGE_REASONS else each.told.replace(each.pod.name, "")
        found[each.name] = f"as {first[cause]}" if cause in first else each.told
        if each.told:
            first.setdefault(cause, each.name)
    return found


def telling(events: Iterable[Json]) -> list[Json]:
    """All but the steps of a pod's start that went well and mere echoes, the oldest first."""
    kept = [each for each in events if not _silent(each)]
    return sorted(kept, key=lambda each: str(event_time(each) or ""))


def _silent(event: Json) -> bool:
    if (event.get("regarding") or {}).get("kind") != "Pod":
        return False
    # Every failed pull says its reason once more, alone.
    echo = event.get("reason") == "Failed" and str(event.get("note")).startswith("Error: ")
    return echo or (event.get("type") != "Warning" and event.get("reason") in _ROUTINE)


def event_time(event: Json) -> datetime | None:
    """When it was seen last; events come in two generations of the API."""
    series = (event.get("series") or {}).get("lastObservedTime")
    return moment(
        series
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )
