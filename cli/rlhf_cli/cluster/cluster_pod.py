"""The state of each pod of a job, from its status and the events about it. Pure.

Rule: a ready pod ignores warnings, because a warning about a start that succeeded is outdated.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_cli.cluster.cluster_job import moment
from rlhf_common import names
from rlhf_operator.reconcile.diagnostics import describe_gate
from rlhf_operator.reconcile.failures.exit_messages import how_it_ended
from rlhf_operator.reconcile.observed.observed_pod import CONFIG_REASONS, IMAGE_REASONS, INIT_RUNS, ObservedPod
from rlhf_operator.reconcile.observed.pod_parsing import pod_of
from rlhf_operator.untrusted import describe_finalizers

Json = Mapping[str, Any]

_REMEDIES: Final[Mapping[str, str]] = {
    "FailedMount": "create the volume, Secret or ConfigMap it names, or correct the group's template",
    "FailedAttachVolume": "free the volume, or correct the group's template",
    "FailedCreatePodSandBox": "look at the node's network and container runtime",
    "NetworkNotReady": "look at the node's network",
}
"""Reason of a pod's Warning -> remedy."""
SCHEDULER_PATIENCE: Final = timedelta(seconds=30)
"""Time within which a running scheduler is expected to find a node or report why there is none."""
_SYMPTOMS: Final = frozenset({"Unhealthy", "BackOff", "Failed"})
"""Warnings that add nothing to the pod's own status."""
_ROUTINE: Final = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
_ORDER: Final = {group.value: number for number, group in enumerate(names.Group)}


@dataclass(frozen=True)
class ClusterPod:
    """One pod of a job, as the verbs show it."""

    pod: ObservedPod
    name: str
    """Name of its worker, such as generation-0, or coordinator."""
    node: str
    restarts: int
    """Number of restarts of its containers, without init containers."""
    in_pool: bool
    """Whether it is in the migration pool."""
    state: str
    """State in one word, such as Ready or Unschedulable."""
    explanation: str
    """Explanation of the state; empty if nothing was found."""
    started: datetime | None
    """status.startTime; None when absent or invalid."""

    @property
    def well(self) -> bool:
        """Whether the pod is up, or ended as expected."""
        return self.state in ("Ready", "Completed")


def cluster_pods(bodies: Iterable[Json], events: Iterable[Json], now: datetime) -> list[ClusterPod]:
    """Return the readable pods of a job, the coordinator first. `events` may be those of the whole namespace."""
    warnings = _warnings(events)
    parsed = [(body, pod_of(body)) for body in bodies]
    pods = [_cluster_pod(body, pod, warnings.get(pod.uid), now) for body, pod in parsed if isinstance(pod, ObservedPod)]
    return sorted(pods, key=lambda shown: (_ORDER.get(shown.pod.group, 9), shown.pod.index))


def _cluster_pod(body: Json, pod: ObservedPod, warning: Json | None, now: datetime) -> ClusterPod:
    statuses = (body.get("status") or {}).get("containerStatuses") or []
    node = str((body.get("spec") or {}).get("nodeName") or "")
    state, explanation = _state(pod, warning, now, placed=bool(node))
    labels = body["metadata"].get("labels") or {}
    return ClusterPod(
        pod=pod,
        name=pod.group if pod.group == names.Group.COORDINATOR else names.worker_name(pod.group, pod.index),
        node=node,
        restarts=sum(count for status in statuses if type(count := status.get("restartCount")) is int),
        in_pool=labels.get(names.LABEL_POOL) == "true",
        state=state,
        explanation=explanation,
        started=moment((body.get("status") or {}).get("startTime")),
    )


def _state(pod: ObservedPod, warning: Json | None, now: datetime, *, placed: bool) -> tuple[str, str]:
    """Return (state, explanation). `placed` is True once the pod has a node."""
    ended = how_it_ended(pod.end) if pod.end is not None else ""
    if pod.deletion is not None:
        return "Leaving", _time_to_leave(pod, now)
    if pod.phase == "Succeeded":
        return "Completed", ""
    if pod.phase == "Failed":
        why = f"disrupted ({pod.disruption})" if pod.disruption else f"ended with {ended}" if ended else "it failed"
        return "Failed", why
    if pod.unschedulable or pod.gates:
        return _unplaced(pod)
    if waits := _waiting(pod, ended):
        return pod.waiting, waits
    if pod.end is not None and pod.running is None and not pod.waiting:
        return "Ended", f"its container ended with {ended}"
    if pod.ready:
        return "Ready", ""
    if warning is not None:
        return pod.waiting or _starting_state(pod), _warning_text(warning)
    if pod.phase == "Pending" and not pod.waiting and not placed and now - (pod.created or now) > SCHEDULER_PATIENCE:
        return "Pending", "no scheduler has looked at it; see that the cluster's scheduler runs"
    return pod.waiting or _starting_state(pod), f"before: {ended}" if ended else ""


def _unplaced(pod: ObservedPod) -> tuple[str, str]:
    """Return (state, explanation) of a pod that no node can take, or that is still gated from scheduling."""
    if pod.gates:
        return "SchedulingGated", "; ".join(map(describe_gate, pod.gates))
    return "Unschedulable", f"no node can take it: {pod.unschedulable}"


def _waiting(pod: ObservedPod, ended: str) -> str:
    """Return why our container does not run; empty where its reason is enough. `ended` says how it ended before."""
    if pod.waiting in IMAGE_REASONS:
        message = pod.waiting_message or pod.waiting
        return f"{message}: correct the image, or give imagePullSecrets in the group's template"
    if pod.waiting in CONFIG_REASONS:
        return pod.waiting_message or "its container cannot be created"
    if pod.waiting == INIT_RUNS:
        container, _, since = pod.waiting_message.partition(" ")
        return f"its init container {container} runs since {since}; `kubectl logs -c {container}` shows it"
    if pod.waiting == "CrashLoopBackOff":
        return f"ended with {ended}; `rlhf logs --previous` shows its last words"
    return ""


def _starting_state(pod: ObservedPod) -> str:
    return "Starting" if pod.phase == "Running" else "Pending"


def _time_to_leave(pod: ObservedPod, now: datetime) -> str:
    assert pod.deletion is not None
    left = (pod.deletion - now).total_seconds()
    if left > 0:
        return f"it may take another {left:.0f}s"
    if pod.finalizers:
        return f"it cannot be removed: {describe_finalizers(pod.finalizers)}"
    return "its grace period is over, and its node has not ended it"


def _warning_text(event: Json) -> str:
    reason = str(event.get("reason"))
    remedy = _REMEDIES.get(reason)
    return f"{reason}: {' '.join(str(event.get('note') or '').split())}" + (f"; {remedy}" if remedy else "")


def _warnings(events: Iterable[Json]) -> dict[str, Json]:
    """Return pod UID -> its newest Warning that is not in `_SYMPTOMS`."""
    newest: dict[str, Json] = {}
    for event in sorted(events, key=lambda event: str(event_time(event) or "")):
        about = event.get("regarding") or {}
        if event.get("type") == "Warning" and about.get("kind") == "Pod" and event.get("reason") not in _SYMPTOMS:
            newest[str(about.get("uid"))] = event
    return newest


def explanations(pods: Iterable[ClusterPod]) -> dict[str, str]:
    """Return worker -> explanation. A cause that stops several pods is explained once; the other pods refer to the
    first."""
    first: dict[str, str] = {}
    by_worker = {}
    for shown in pods:
        unnamed = shown.explanation.replace(shown.pod.name, "")
        cause = "image" if shown.pod.waiting in IMAGE_REASONS else unnamed
        by_worker[shown.name] = f"as {first[cause]}" if cause in first else shown.explanation
        if shown.explanation:
            first.setdefault(cause, shown.name)
    return by_worker


def notable_events(events: Iterable[Json]) -> list[Json]:
    """Return the events worth showing, oldest first: not the routine steps of a pod's start or repeated pull errors."""
    notable = [event for event in events if not _is_routine(event)]
    return sorted(notable, key=lambda event: str(event_time(event) or ""))


def _is_routine(event: Json) -> bool:
    if (event.get("regarding") or {}).get("kind") != "Pod":
        return False
    # Every failed pull repeats its reason in another event.
    repetition = event.get("reason") == "Failed" and str(event.get("note")).startswith("Error: ")
    return repetition or (event.get("type") != "Warning" and event.get("reason") in _ROUTINE)


def event_time(event: Json) -> datetime | None:
    """Return when an event was last seen. The two generations of the events API use different fields."""
    series = (event.get("series") or {}).get("lastObservedTime")
    return moment(
        series
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
    )
