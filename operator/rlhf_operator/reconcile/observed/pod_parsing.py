"""Parses the body of a pod, and decides whether a pod that failed as a whole failed because of a disruption.

A body becomes a record with typed, bounded fields, or an `UnreadableObject`, because users write pods. Rule: pure.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from rlhf_api.job.failure import START_UP
from rlhf_common import names
from rlhf_operator.manifests.pods import CONTAINER
from rlhf_operator.reconcile.observed.malformed_pod import misshapen
from rlhf_operator.reconcile.observed.observed_pod import INIT_FAILED, INIT_RUNS, ObservedPod, PodEnd
from rlhf_operator.reconcile.observed.termination_log import last_report, readable
from rlhf_operator.untrusted import (
    LISTED_MAX,
    NAME_MAX,
    ObjectIdentity,
    UnreadableError,
    UnreadableObject,
    clean,
    identity_of,
    moment,
    owner_of,
    shown,
    whole,
    wrong,
)

Json = Mapping[str, Any]

CONTAINER_ID_SHOWN: Final = 16
"""Characters of a container's id that are stored; enough to distinguish the containers of a pod."""
MESSAGE_KEPT: Final = 600
"""Most characters of a message that are stored, such as the scheduler's."""
WORD_KEPT: Final = 128
"""Most characters that are stored of a reason, a condition's type or a template's hash."""
INDEX_MAX: Final = 10**9
"""Largest index or epoch in a label."""
GRACE_MAX: Final = 10**9
"""Longest grace period in seconds, 30 years; a template may ask for more than a datetime can represent."""
UID_MAX: Final = 40
"""Most characters of a uid; the API server's have 36."""
NAMES_KEPT: Final = 8
"""Maximum number of finalizers, or of scheduling gates, that are stored."""
CODE_MAX: Final = 2**32
"""Bound of exit codes, which have 32 bits, with or without a sign."""
GONE: Final = frozenset({"NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})
"""Reasons of pods that others ended."""
REFUSED: Final = frozenset(
    {
        "InvalidNodeInfo",
        "NodeAffinity",
        "NodeName",
        "NodePorts",
        "TaintToleration",
        "TopologyAffinityError",
        "UnexpectedAdmissionError",
        "UnexpectedPredicateFailureType",
        "UnknownReason",
        "VolumeAttachmentLimitExceeded",
    }
)
"""Reasons of the kubelet's admission that depend on the node's state, so that another node may help."""
LACKING: Final = "OutOf"
"""Prefix of such a reason: OutOfcpu, OutOfnvidia.com/gpu."""
EVICTED: Final = "Evicted"
PRESSURE: Final = "The node had condition: ["
"""Text of a node under pressure that refuses a pod with the reason of an eviction."""
_GROUPS: Final[Mapping[str, names.Group]] = {group.value: group for group in names.Group}
_START_UP: Final = frozenset(START_UP)
_NONE: Final[frozenset[tuple[str, str]]] = frozenset()
_STARTED: Final = "status.containerStatuses: startedAt"
_PHASES: Final = {phase: phase for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown")} | {
    None: "Pending"
}


def pod_of(body: Json) -> ObservedPod | UnreadableObject:
    """Return the record of a pod's body, or the reason why there is none."""
    try:
        return _pod(body)
    except UnreadableError as error:
        why = str(error)
    except Exception as error:
        why = misshapen(body) or f"{type(error).__name__} while it was read"
    try:
        meta = body["metadata"]
        identity, going = identity_of(meta), bool(meta.get("deletionTimestamp"))
    except Exception:
        identity, going = ObjectIdentity("", "", 0, ""), False
    return UnreadableObject(identity.name, identity.uid, identity.version, identity.owner, why, going)


def _pod(body: Json) -> ObservedPod:
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    container = _our_container(status)
    waiting = _init_problem(spec, status) or (container.get("state") or {}).get("waiting") or {}
    name, uid, address, owner = meta["name"], meta["uid"], status.get("podIP") or "", owner_of(meta)
    reason, message = (waiting.get("reason") or "")[:WORD_KEPT], (waiting.get("message") or "")[:MESSAGE_KEPT]
    template = ((meta.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE) or "")[:WORD_KEPT]
    # join() raises if one of them is not a text.
    if not "".join((reason, message, template)).isascii():
        reason, message = clean(reason), clean(message)
    if not "".join((name, uid, address)).isascii() or len(name) > NAME_MAX or len(uid) > UID_MAX:
        raise UnreadableError("metadata.name, metadata.uid or status.podIP is no name, uid or address")
    disruption, disruption_message = _disruption(status, conditions)
    placed = conditions.get("PodScheduled") or {}
    unschedulable = _unschedulable(placed)
    at = moment(placed.get("lastTransitionTime"), "status.conditions: lastTransitionTime")
    done = _ended_for_good(spec, container, deleted=bool(meta.get("deletionTimestamp")))
    return ObservedPod(
        name=name,
        uid=uid,
        group=_group(labels),
        index=whole(labels.get(names.LABEL_INDEX), f"metadata.labels[{names.LABEL_INDEX}]", INDEX_MAX),
        phase=_PHASES.get(status.get("phase"), "Unknown"),
        owner=owner,
        version=whole(meta.get("resourceVersion"), "metadata.resourceVersion"),
        epoch=whole(labels.get(names.LABEL_EPOCH), f"metadata.labels[{names.LABEL_EPOCH}]", INDEX_MAX),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        address=address,
        created=moment(meta.get("creationTimestamp"), "metadata.creationTimestamp"),
        deletion=moment(meta.get("deletionTimestamp"), "metadata.deletionTimestamp"),
        grace=min(whole(meta.get("deletionGracePeriodSeconds"), "metadata.deletionGracePeriodSeconds"), GRACE_MAX),
        unschedulable=unschedulable,
        unscheduled=at if unschedulable else None,
        scheduled=at if placed.get("status") == "True" else None,
        waiting=reason,
        waiting_message=message,
        running=moment(((container.get("state") or {}).get("running") or {}).get("startedAt"), _STARTED),
        end=_end(uid, status, container),
        template_hash=template,
        pooled=labels.get(names.LABEL_POOL) == "true",
        conditions=_telling(conditions),
        done=done,
        accompanied=_others_run(status),
        finalizers=_names(meta.get("finalizers")),
        gates=_names([gate["name"] for gate in spec.get("schedulingGates") or ()]),
        disruption=disruption,
        disruption_message=disruption_message,
        began=_began(container),
    )


def _group(labels: Json) -> names.Group:
    value = labels.get(names.LABEL_GROUP)
    group = _GROUPS.get(value) if value is not None else None
    if group is None:
        raise wrong(f"metadata.labels[{names.LABEL_GROUP}]", value, f"one of {', '.join(_GROUPS)}")
    return group


def _telling(conditions: Mapping[str, Json]) -> frozenset[tuple[str, str]]:
    if len(conditions) > LISTED_MAX:
        raise wrong("status.conditions", list(conditions), f"a list of at most {LISTED_MAX}")
    telling = conditions.keys() - _START_UP
    if not telling:
        return _NONE
    if not all(isinstance(kind, str) for kind in telling):
        raise TypeError("a condition has no type")
    return _interned(frozenset((_word(kind), _word(conditions[kind].get("status"))) for kind in telling))


def _word(value: object) -> str:
    """Return a reason or a type as text."""
    return clean(value[:WORD_KEPT]) if isinstance(value, str) else "" if value is None else shown(value)


def _words(value: object) -> str:
    """Return a message as text."""
    return clean(value[:MESSAGE_KEPT]) if isinstance(value, str) else "" if value is None else shown(value)


@lru_cache(maxsize=1024)
def _interned(conditions: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return one shared object for pods with equal conditions, while they are cached."""
    return conditions


def _our_container(status: Json) -> Json:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            return dict(container)
    return {}


def _ended_for_good(spec: Json, container: Json, *, deleted: bool) -> bool:
    """Return whether our container has ended and the kubelet will not restart it.

    `container`: its status. `deleted`: deletion of the pod is requested, after which no container starts.
    """
    ended = (container.get("state") or {}).get("terminated")
    if not ended:
        return False
    ours: Json = next((each for each in spec.get("containers") or () if each["name"] == CONTAINER), {})
    policy = ours.get("restartPolicy") or spec.get("restartPolicy") or "OnFailure"
    return deleted or policy == "Never" or (policy == "OnFailure" and _code(ended) == 0)


def _others_run(status: Json) -> bool:
    """Return whether another container has not ended; a native sidecar is a running init container."""
    others = (each for each in status.get("containerStatuses") or () if each.get("name") != CONTAINER)
    if not all((other.get("state") or {}).get("terminated") for other in others):
        return True
    return any((init.get("state") or {}).get("running") for init in status.get("initContainerStatuses") or ())


def _names(values: Any) -> tuple[str, ...]:
    """Return the first names of a list."""
    return tuple(map(_word, values[:NAMES_KEPT])) if values else ()


def _init_problem(spec: Json, status: Json) -> Json | None:
    """Return the `waiting` state that init containers cause, for our container; None if they cause none."""
    inits = status.get("initContainerStatuses") or []
    sidecars = {each["name"] for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"}
    if inits and ((inits[0].get("state") or {}).get("waiting") or {}).get("reason") == "PodInitializing":
        # No init container has started, so the pod waits for volumes, its network or an image like any other pod.
        return {"reason": "ContainerCreating"}
    for container in inits:
        name, state = _word(container.get("name")), container.get("state") or {}
        waiting = state.get("waiting") or {}
        ended = (container.get("lastState") or {}).get("terminated") or state.get("terminated") or {}
        if ended.get("exitCode") and not container.get("ready"):
            last = (_words(ended.get("message")).strip().splitlines() or [_word(ended.get("reason"))])[-1]
            return {"reason": INIT_FAILED, "message": f"{name} ended with exit code {_code(ended)}: {last}"}
        if waiting.get("message"):
            return {"reason": waiting.get("reason"), "message": f"init container {name}: {_words(waiting['message'])}"}
        # A started sidecar keeps running beside the others. The kubelet sets `started` for every running container.
        started = name in sidecars and container.get("started")
        if (running := state.get("running")) and not started:
            return {"reason": INIT_RUNS, "message": f"{name} {_word(running.get('startedAt'))}"}
    return None


def _code(ended: Json) -> int:
    value = ended.get("exitCode")
    if value is not None and (type(value) is not int or abs(value) > CODE_MAX):
        raise wrong("status.containerStatuses: exitCode", value, "a whole number of 32 bits")
    return value or 0


def _unschedulable(condition: Json) -> str:
    if condition.get("status") == "False" and condition.get("reason") == "Unschedulable":
        return _words(condition.get("message")) or "no node can take it"
    return ""


def _disruption(status: Json, conditions: Mapping[str, Json]) -> tuple[str, str]:
    """Return (reason, message) of the disruption that ended the pod; empty if there was none."""
    reason, message = _word(status.get("reason")), _words(status.get("message")).strip()
    target = conditions.get("DisruptionTarget") or {}
    if target.get("status") == "True":
        return _word(target.get("reason")) or "DisruptionTarget", message or _words(target.get("message"))
    failed = status.get("phase") == "Failed" and disrupted(reason, message)
    return (reason, message) if failed else ("", "")


def _began(container: Json) -> datetime | None:
    run = (container.get("state") or {}).get("running") or _ended(container, "state") or _ended(container, "lastState")
    return moment(run.get("startedAt"), _STARTED)


def _end(uid: str, status: Json, container: Json) -> PodEnd | None:
    ended = _ended(container, "state") or _ended(container, "lastState")
    phase, reason, message = status.get("phase"), _word(status.get("reason")), _words(status.get("message")).strip()
    if not ended:
        code = 0 if phase == "Succeeded" else None
        return PodEnd(uid, code, reason, message, None) if phase in ("Failed", "Succeeded") else None
    full = str(ended.get("containerID") or "").rpartition("/")[2]
    restarts = whole(container.get("restartCount"), "status.containerStatuses: restartCount")
    name = clean(full[:CONTAINER_ID_SHOWN]) or f"{uid}/{restarts}"
    log, code = ended.get("message"), _code(ended)
    at = moment(ended.get("finishedAt"), "status.containerStatuses: finishedAt")
    report = last_report(log) if isinstance(log, str) else None
    if phase == "Failed" and reason:
        # The kubelet ended the pod, so its reason counts and not the exit code. The container may have ended before.
        end_id = name if _code(_ended(container, "state")) else uid
        return PodEnd(end_id, None, reason, message, at, report)
    return PodEnd(
        name, code, _word(ended.get("reason")), readable(log) if isinstance(log, str) else _words(log), at, report
    )


def _ended(container: Json, state: str) -> Json:
    return (container.get(state) or {}).get("terminated") or {}


def disrupted(reason: str, message: str) -> bool:
    """Return whether a failed pod without the condition DisruptionTarget failed through no fault of its own."""
    if reason == EVICTED:
        return PRESSURE in message
    return reason in GONE or reason in REFUSED or reason.startswith(LACKING)
