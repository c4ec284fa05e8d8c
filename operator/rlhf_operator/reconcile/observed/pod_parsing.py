"""From a pod's body to its record, or to why there is none; and whose fault it is when a pod failed as a whole.

Labels, annotations and termination logs are written by anybody who may make a pod: a body becomes a record whose fields
have their types and bounds, fields that are absent included, or an `UnreadableObject` that says what is wrong with it.
Hundreds are read a second, so a body is read as if it were well formed; one that is not raises somewhere, and only then
`malformed_pod` looks where.

What somebody else did to a pod that ran (preemption, drain, pressure on the node, a lost node) has the condition
DisruptionTarget since Kubernetes 1.26. Without it are: a pod that its node refused before anything of it ran, which is
the node's matter as long as the reason is the node's state and not what the pod asks for; and a pod that was evicted or
ended for what it did itself (an emptyDir's sizeLimit, limits of ephemeral storage, its own deadline).
Rule: pure and total. A reason that nobody knows is the pod's own, so that it counts and cannot go on for ever.
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
"""Characters of a container's id that are kept; enough to tell the containers of one pod apart."""
MESSAGE_KEPT: Final = 600
"""Characters of a message that are kept, such as the words of a scheduler."""
WORD_KEPT: Final = 128
"""Characters of a reason, of a condition's type, of a fingerprint."""
INDEX_MAX: Final = 10**9
"""Of an index or an epoch in a label."""
GRACE_MAX: Final = 10**9
"""Seconds, 30 years: a template may ask for more than a time can hold."""
UID_MAX: Final = 40
"""Characters of a uid; the API server's have 36."""
NAMES_KEPT: Final = 8
"""Finalizers, or scheduling gates, that are kept."""
CODE_MAX: Final = 2**32
"""Exit codes are 32 bits wide, with or without a sign."""
GONE: Final = frozenset({"NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"})
"""Reasons of pods that ran; the condition goes with most of them."""
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
"""Reasons of the kubelet's admission that are the node's state: taken meanwhile, labelled anew, a sick device plugin.
SysctlForbidden, AppArmor, PodOSNotSupported and their like are no node's fault, and no other node of its kind helps."""
LACKING: Final = "OutOf"
"""Beginning of such a reason: OutOfcpu, OutOfnvidia.com/gpu."""
EVICTED: Final = "Evicted"
PRESSURE: Final = "The node had condition: ["
"""In the words by which a node under pressure refuses a pod, with the reason of an eviction."""
_GROUPS: Final[Mapping[str, names.Group]] = {group.value: group for group in names.Group}
_START_UP: Final = frozenset(START_UP)
_NONE: Final[frozenset[tuple[str, str]]] = frozenset()
_STARTED: Final = "status.containerStatuses: startedAt"
_PHASES: Final = {phase: phase for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown")} | {
    None: "Pending"
}


def pod_of(body: Json) -> ObservedPod | UnreadableObject:
    """Return the record of a pod's body, or why there is none."""
    try:
        return _pod(body)
    except UnreadableError as error:
        why = str(error)
    except Exception as error:
        why = misshapen(body) or f"{type(error).__name__} while it was read"
    try:
        meta = body["metadata"]
        known, going = identity_of(meta), bool(meta.get("deletionTimestamp"))
    except Exception:
        known, going = ObjectIdentity("", "", 0, ""), False
    return UnreadableObject(known.name, known.uid, known.version, known.owner, why, going)


def _pod(body: Json) -> ObservedPod:
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    container = _our_container(status)
    waiting = _init_problem(spec, status) or (container.get("state") or {}).get("waiting") or {}
    name, uid, address, owner = meta["name"], meta["uid"], status.get("podIP") or "", owner_of(meta)
    reason, message = (waiting.get("reason") or "")[:WORD_KEPT], (waiting.get("message") or "")[:MESSAGE_KEPT]
    template = ((meta.get("annotations") or {}).get(names.ANNOTATION_TEMPLATE) or "")[:WORD_KEPT]
    # Fails when one of them is no text.
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
    """Return a reason or a type, or what stands for one."""
    return clean(value[:WORD_KEPT]) if isinstance(value, str) else "" if value is None else shown(value)


def _words(value: object) -> str:
    """Return a message."""
    return clean(value[:MESSAGE_KEPT]) if isinstance(value, str) else "" if value is None else shown(value)


@lru_cache(maxsize=1024)
def _interned(conditions: frozenset[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return one object for all pods that have the same conditions: most of them do."""
    return conditions


def _our_container(status: Json) -> Json:
    for container in status.get("containerStatuses") or ():
        if container.get("name") == CONTAINER:
            return dict(container)
    return {}


def _ended_for_good(spec: Json, container: Json, *, deleted: bool) -> bool:
    """Return whether our container has ended and the kubelet does not start it again.

    `container`: its status; `deleted`: the deletion of the pod is asked for, after which nothing is started.
    """
    ended = (container.get("state") or {}).get("terminated")
    if not ended:
        return False
    ours: Json = next((each for each in spec.get("containers") or () if each["name"] == CONTAINER), {})
    policy = ours.get("restartPolicy") or spec.get("restartPolicy") or "OnFailure"
    return deleted or policy == "Never" or (policy == "OnFailure" and _code(ended) == 0)


def _others_run(status: Json) -> bool:
    """Return whether a container beside ours has not ended; a native sidecar is an init container that runs."""
    others = (each for each in status.get("containerStatuses") or () if each.get("name") != CONTAINER)
    if not all((other.get("state") or {}).get("terminated") for other in others):
        return True
    return any((init.get("state") or {}).get("running") for init in status.get("initContainerStatuses") or ())


def _names(values: Any) -> tuple[str, ...]:
    """Return the first of a list of names."""
    return tuple(map(_word, values[:NAMES_KEPT])) if values else ()


def _init_problem(spec: Json, status: Json) -> Json | None:
    """Return why an init container of the template keeps ours from starting, as the `waiting` state of ours; None: none
    does.
    """
    inits = status.get("initContainerStatuses") or []
    sidecars = {each["name"] for each in spec.get("initContainers") or () if each.get("restartPolicy") == "Always"}
    if inits and ((inits[0].get("state") or {}).get("waiting") or {}).get("reason") == "PodInitializing":
        # None has begun, so the pod waits for volumes, its network or an image, as one without them does.
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
        # A sidecar that has started goes on beside the others; a kubelet says of all that run that they have started.
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
    """Return (why the pod was taken away, what is said of it); empty: it was not, or by its own fault."""
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
        # The kubelet ended what ran, so its words count and not the exit code; it may have message of that end before.
        known = name if _code(_ended(container, "state")) else uid
        return PodEnd(known, None, reason, message, at, report)
    return PodEnd(
        name, code, _word(ended.get("reason")), readable(log) if isinstance(log, str) else _words(log), at, report
    )


def _ended(container: Json, state: str) -> Json:
    return (container.get(state) or {}).get("terminated") or {}


def disrupted(reason: str, message: str) -> bool:
    """Return whether a failed pod without the condition DisruptionTarget failed by no fault of what ran in it."""
    if reason == EVICTED:
        return PRESSURE in message
    return reason in GONE or reason in REFUSED or reason.startswith(LACKING)
