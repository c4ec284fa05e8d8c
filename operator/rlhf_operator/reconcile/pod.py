"""A pod as reconcile sees it: a small record of what decisions read, not the body.

Rule: pure; whatever the API server sends becomes a record, fields that are absent included. A thousand pods a job are
kept in memory as these.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from rlhf_api import names
from rlhf_api.job.failure import START_UP
from rlhf_operator.manifests.pods import CONTAINER
from rlhf_operator.reconcile.last_log import Report, last_report, readable

Json = Mapping[str, Any]

CONTAINER_ID_SHOWN: Final = 16
"""Characters of a container's id that are kept; enough to tell the containers of one pod apart."""
PATIENCE: Final = timedelta(seconds=10)
"""Time a new pod may be without a node: claims are bound, and nodes appear, within seconds."""
INIT_FAILED: Final = "Init:Error"
"""Reason of a pod whose init container fails, as kubectl shows it; the kubelet runs it again."""
MESSAGE_KEPT: Final = 600
"""Characters of a message that are kept, such as the words of a scheduler."""


@dataclass(frozen=True, slots=True)
class End:
    """Our container ended, or the pod failed as a whole (then `code` is None)."""

    id: str
    """Tells this end from every other."""
    code: int | None
    reason: str
    """OOMKilled, Error, Completed, Evicted, ..."""
    message: str
    """The last lines of the log, or why the kubelet ended it."""
    at: datetime | None
    report: Report | None = None
    """Of a coordinator: its last one."""


@dataclass(frozen=True, slots=True)
class Pod:
    """What is observed of one pod."""

    name: str
    uid: str
    group: names.Group
    index: int
    phase: str
    """Pending, Running, Succeeded, Failed, Unknown."""
    version: int = field(default=0, compare=False)
    """resourceVersion; a later one is newer. Two that differ in nothing else are the same to every decision."""
    epoch: int = 0
    ready: bool = False
    address: str = ""
    created: datetime | None = None
    deletion: datetime | None = None
    """When its grace ends, once its deletion is asked for."""
    grace: int = 0
    """Seconds of that grace."""
    unschedulable: str = ""
    """The scheduler's words when no node can take it."""
    waiting: str = ""
    """Reason our container waits: ImagePullBackOff, CrashLoopBackOff, ContainerCreating, ..."""
    waiting_message: str = ""
    end: End | None = None
    """The newest end of our container, or of the pod."""
    template: str = ""
    """Fingerprint of the user's template that it was made from; empty: made before there were any."""
    pooled: bool = False
    """It carries the label of the migration pool."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of its conditions, but for those that every pod goes through when it starts."""
    done: bool = False
    """All its containers ended well: none is started again, and the kubelet says so of the pod a moment later."""
    disruption: str = ""
    """Reason of its DisruptionTarget condition, or Evicted, NodeLost, ...: not the job's fault."""

    @property
    def over(self) -> bool:
        """The pod has ended and never runs again."""
        return self.done or self.phase in ("Succeeded", "Failed")

    @property
    def active(self) -> bool:
        """It runs or may run, and nobody asked for its deletion."""
        return not self.over and self.deletion is None

    def stuck(self, now: datetime) -> bool:
        """No node can take it, and not only because volumes are still being bound."""
        return bool(self.unschedulable) and self.active and (self.created is None or now - self.created >= PATIENCE)

    @property
    def deletion_asked(self) -> datetime | None:
        """When its deletion was asked for."""
        return None if self.deletion is None else self.deletion - timedelta(seconds=self.grace)


DISRUPTED: Final = frozenset(
    {"Evicted", "NodeLost", "NodeShutdown", "NodeAffinity", "Preempting", "Shutdown", "Terminated"}
)
"""`status.reason` of a failed pod that was not the fault of what ran in it."""


_GROUPS: Final = frozenset(names.Group)


def pod_of(body: Json) -> Pod | None:
    """The record of a pod's body; None for a pod that carries our label but not our form."""
    meta, status = body["metadata"], body.get("status") or {}
    labels = meta.get("labels") or {}
    group, index = labels.get(names.LABEL_GROUP, ""), labels.get(names.LABEL_INDEX, "0")
    if group not in _GROUPS or not str(index).isdigit():
        return None
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    container = _our_container(status)
    waiting = _init_trouble(status) or (container.get("state") or {}).get("waiting") or {}
    return Pod(
        name=meta["name"],
        uid=meta.get("uid", ""),
        group=names.Group(group),
        index=int(index),
        phase=status.get("phase") or "Pending",
        version=int(meta.get("resourceVersion") or 0),
        epoch=int(labels.get(names.LABEL_EPOCH) or 0),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        address=status.get("podIP") or "",
        created=time_of(meta.get("creationTimestamp")),
        deletion=time_of(meta.get("deletionTimestamp")),
        grace=int(meta.get("deletionGracePeriodSeconds") or 0),
        unschedulable=_unschedulable(conditions.get("PodScheduled") or {}),
        waiting=waiting.get("reason") or "",
        waiting_message=(waiting.get("message") or "")[:MESSAGE_KEPT],
        end=_end(meta, status, container),
        template=str((meta.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE) or ""),
        pooled=labels.get(names.LABEL_POOL) == "true",
        conditions=_interned(_telling(conditions)),
        done=_done(status),
        disruption=_disruption(status, conditions),
    )


def _telling(conditions: Mapping[str, Json]) -> frozenset[tuple[str, str]]:
    return frozenset((each, str(found.get("status"))) for each, found in conditions.items() if each not in START_UP)


@lru_cache(maxsize=1024)
def _interned(conditions: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """One object for all pods that have the same: most of them do."""
    return conditions


def time_of(text: str | None) -> datetime | None:
    """A time of the API server, which is RFC 3339 in UTC."""
    return datetime.fromisoformat(text) if text else None


def _our_container(status: Json) -> Json:
    for each in status.get("containerStatuses") or []:
        if each.get("name") == CONTAINER:
            return dict(each)
    return {}


def _done(status: Json) -> bool:
    states = [each.get("state") or {} for each in status.get("containerStatuses") or []]
    sidecars = any((each.get("state") or {}).get("running") for each in status.get("initContainerStatuses") or [])
    ended = [(each.get("terminated") or {}).get("exitCode") for each in states]
    return bool(ended) and not sidecars and all(code == 0 for code in ended)


def _init_trouble(status: Json) -> Json | None:
    """Why an init container of the template keeps ours from starting, as the `waiting` state of ours; else None."""
    listed = status.get("initContainerStatuses") or []
    if listed and ((listed[0].get("state") or {}).get("waiting") or {}).get("reason") == "PodInitializing":
        # None has begun, so the pod waits for volumes, its network or an image, as one without them does.
        return {"reason": "ContainerCreating"}
    for each in listed:
        name, state = each.get("name"), each.get("state") or {}
        waiting = state.get("waiting") or {}
        ended = (each.get("lastState") or {}).get("terminated") or state.get("terminated") or {}
        if ended.get("exitCode") and not each.get("ready"):
            last = (str(ended.get("message") or "").strip().splitlines() or [str(ended.get("reason") or "")])[-1]
            return {"reason": INIT_FAILED, "message": f"{name} ended with exit code {ended['exitCode']}: {last}"}
        if waiting.get("message"):
            return {"reason": waiting.get("reason"), "message": f"init container {name}: {waiting['message']}"}
    return None


def _unschedulable(condition: Json) -> str:
    if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return str(condition.get("message") or "no node can take it")[:MESSAGE_KEPT]
    return ""


def _disruption(status: Json, conditions: Mapping[str, Json]) -> str:
    target = conditions.get("DisruptionTarget") or {}
    if target.get("status") == "True":
        return str(target.get("reason") or "DisruptionTarget")
    reason = str(status.get("reason") or "")
    return reason if status.get("phase") == "Failed" and reason in DISRUPTED else ""


def _end(meta: Json, status: Json, container: Json) -> End | None:
    for state in (container.get("state") or {}, container.get("lastState") or {}):
        if ended := state.get("terminated"):
            full = str(ended.get("containerID") or "").rpartition("/")[2]
            log = str(ended.get("message") or "")
            return End(
                id=full[:CONTAINER_ID_SHOWN] or f"{meta.get('uid', '')}/{container.get('restartCount', 0)}",
                code=int(ended.get("exitCode") or 0),
                reason=str(ended.get("reason") or ""),
                message=readable(log),
                at=time_of(ended.get("finishedAt")),
                report=last_report(log),
            )
    if status.get("phase") in ("Failed", "Succeeded"):
        code = 0 if status["phase"] == "Succeeded" else None
        message = str(status.get("message") or "")[:MESSAGE_KEPT]
        return End(str(meta.get("uid", "")), code, str(status.get("reason") or ""), message, None)
    return None
