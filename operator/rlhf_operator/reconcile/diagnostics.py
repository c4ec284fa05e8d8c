"""Explains what keeps pods of a job from running, in sentences with the pods, the cause and often a remedy. Rule:
pure.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.names import COORDINATOR_PORT, Group
from rlhf_operator.manifests import identity
from rlhf_operator.manifests.pods import CONTAINER
from rlhf_operator.reconcile.failures import hung_workers
from rlhf_operator.reconcile.failures.exit_messages import how_it_ended
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading, ObservedJob
from rlhf_operator.reconcile.observed.observed_pod import (
    CONFIG_REASONS,
    CREATING,
    IMAGE_REASONS,
    INIT_FAILED,
    INIT_RUNS,
    PATIENCE,
    ObservedPod,
)
from rlhf_operator.reconcile.refusals import refusal_messages
from rlhf_operator.reconcile.scaling import pod_places
from rlhf_operator.reconcile.timestamps import rfc3339

SLOW: Final = timedelta(seconds=60)
"""Age from which a pod whose container is still being created is reported."""
UNHEARD: Final = timedelta(seconds=120)
"""Age from which running workers are reported if no worker has connected."""
SHOWN: Final = 3
"""Pods or objects that are named; for more, the number is given."""
GATE_OWNERS: Final[Mapping[str, str]] = {
    "kueue.x-k8s.io/admission": "Kueue removes it when it admits the pod's Workload: see `kubectl get workloads`, and "
    "take the queue label out of the pod template where the job itself is to be queued",
    "kueue.x-k8s.io/topology": "Kueue removes it when it has chosen the pod's place in the topology: see the Workload "
    "and the log of Kueue's controller",
    "kueue.x-k8s.io/elastic-job": "Kueue removes it when it admits the Workload slice of the larger job: see "
    "`kubectl get workloads`",
    "grove.io/podgang-pending-creation": "Grove removes it when it has made the pod's PodGang: see the log of Grove's "
    "operator",
    "multiarch.openshift.io/scheduling-gate": "the Multiarch Tuning Operator removes it when it knows the image's "
    "architectures: see the log of its pods",
}
"""Scheduling gate -> the component that removes it, and where to look."""
WHY_SHOWN: Final = 300
"""Most characters shown of the reason why an object cannot be read."""


def diagnose(
    job: RLHFJob,
    pods: Iterable[ObservedPod],
    refusals: Mapping[str, str],
    now: datetime,
    reading: CoordinatorReading | None = None,
) -> list[str]:
    """Return sentences about what keeps pods from running, grouped by cause."""
    listed = sorted(pods, key=lambda pod: (pod.group, pod.index))
    messages = refusal_messages(job, refusals)
    stuck = [pod for pod in listed if pod.stuck(now)]
    causes = dict.fromkeys(pod.unschedulable for pod in stuck)
    messages += [_unschedulable(job, [pod for pod in stuck if pod.unschedulable == words]) for words in causes]
    gated = [pod for pod in listed if pod.gated(now)]
    messages += [
        describe_gate(gate, _named([pod for pod in gated if gate in pod.gates]))
        for gate in dict.fromkeys(gate for pod in gated for gate in pod.gates)
    ]
    without_image = [pod for pod in listed if pod.waiting in IMAGE_REASONS]
    for default in (True, False):
        if images := [pod for pod in without_image if _lacks_default(job, pod) is default]:
            messages.append(_without_image(job, images, default=default))
    if broken := [pod for pod in listed if pod.waiting in CONFIG_REASONS]:
        messages.append(_broken(job, broken))
    if initializing := [pod for pod in listed if pod.waiting == INIT_RUNS and pod.active]:
        messages.append(_initializing(initializing))
    if slow := [pod for pod in listed if pod.waiting == CREATING and pod.active and _older(pod, SLOW, now)]:
        messages.append(_slow(job, slow))
    for pod in [pod for pod in listed if pod.waiting == "CrashLoopBackOff" and pod.end][:SHOWN]:
        assert pod.end is not None
        messages.append(f"{pod.name} keeps ending: {how_it_ended(pod.end)}")
    if not messages and reading is not None and not reading.streams and reading.phase == "Starting":
        silent = [pod for pod in listed if pod.phase == "Running" and pod.active and _older(pod, UNHEARD, now)]
        silent = [pod for pod in silent if pod.group is not Group.COORDINATOR]
        messages += [_unheard(job, silent)] if silent else []
    if silence := hung_workers.silence_message(job, listed, reading):
        messages.append(silence)
    return messages


def describe_gate(gate: str, pods: str = "it") -> str:
    """Return that a scheduling gate keeps pods from being scheduled, with its owner and a remedy."""
    owner = GATE_OWNERS.get(gate) or _unknown_owner(gate)
    return f"scheduling gate {gate} keeps {pods} from being scheduled: {owner}"


def _unknown_owner(gate: str) -> str:
    domain, separator, _ = gate.rpartition("/")
    who = f"the controller of {domain}" if separator else "the tool that set it"
    return f"{who} removes it; see that it runs, or take the gate out of the pod template or the webhook that sets it"


def unreadable_objects(observed: ObservedJob) -> list[str]:
    """Return sentences about the first SHOWN objects in `observed.unreadable`, and one with the number of others.

    The index lists at most MAX_UNREADABLE_NAMED.
    """
    messages = [
        f"{kind.rpartition('/')[2]} {body.name} cannot be read ({body.why[:WHY_SHOWN]}): correct that, or delete it"
        for kind, body in observed.unreadable
    ]
    more = len(messages) - SHOWN
    return messages if more <= 0 else [*messages[:SHOWN], f"{more} more cannot be read"]


def names_taken(job: RLHFJob, observed: ObservedJob) -> list[str]:
    """Return a sentence about pods of an earlier job or of others that have the names of the job's own pods.

    The list is empty if there are none.
    """
    unreadable = {body.name for kind, body in observed.unreadable if kind == "Pod"}
    wanted = {name for name, _, _ in pod_places(job)} - unreadable
    others = sorted(observed.taken & wanted)
    if not others:
        return []
    more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    return [f"{', '.join(others[:SHOWN])}{more}: a pod of this name is not this job's; delete it if it does not go"]


def occupied_names(job: RLHFJob, observed: ObservedJob) -> list[str]:
    """Return a sentence about objects of others that have the names of the job's own; empty if there are none."""
    if not observed.occupied:
        return []
    titles, place = sorted(observed.occupied), identity.namespace(job)
    listed = " and ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)
    resources = " ".join(observed.occupied[name] for name in titles)
    text = (
        f"the job needs the name of {listed} in namespace {place}, and what is there is not the job's: it is left as "
        f"it is, and no pod is made beside it. Give the job another name, or remove what is not needed: "
        f"kubectl delete {resources} --namespace={place}"
    )
    return [text]


def requeue_after(pods: Iterable[ObservedPod], reading: CoordinatorReading | None, now: datetime) -> float | None:
    """Return the seconds until the age of a pod may make a problem reportable; None if no age will.

    A pod whose container is being created is checked every SLOW.
    """
    left: list[float] = []
    for pod in pods:
        if pod.created is None or not pod.active:
            continue
        age = now - pod.created
        if pod.waiting == CREATING:
            left.append((SLOW - age if age < SLOW else SLOW).total_seconds())
        if (pod.unschedulable or pod.gates) and age < PATIENCE:
            left.append((PATIENCE - age).total_seconds())
        if pod.phase == "Running" and age < UNHEARD and reading is not None and reading.phase == "Starting":
            left.append((UNHEARD - age).total_seconds())
    return min(left, default=None)


def _older(pod: ObservedPod, than: timedelta, now: datetime) -> bool:
    return pod.created is not None and now - pod.created >= than


def _template(pods: Sequence[ObservedPod]) -> str:
    """Return the fields with the templates of these pods as text; for more than two, a general phrase."""
    groups = list(dict.fromkeys(pod.group for pod in pods))
    named = [_named_template(group) for group in groups]
    return " and ".join(named) if len(named) < 3 else "the pod templates"


def _named_template(group: Group) -> str:
    return f"spec.{group}.template"


def _unschedulable(job: RLHFJob, stuck: list[ObservedPod]) -> str:
    words = _NOISE.split(stuck[0].unschedulable)[0].rstrip(". ")
    template = _template(stuck)
    remedies = []
    if "persistentvolumeclaim" in words.lower():
        shared = f"the coordinator has those of {_named_template(job.spec.rank_group)}"
        remedies.append(
            f"see that the claim exists in namespace {identity.namespace(job)} and can be bound (kubectl get pvc), or "
            f"correct the volumes of the pod template ({shared})"
        )
    # "Insufficient" refers to the nodes that the pod selects, so the selector itself is right.
    if "node affinity/selector" in words and "Insufficient" not in words:
        remedies.append(f"correct nodeSelector or affinity in {template}, or label a node so")
    if "untolerated taint" in words and (taints := _meant_taints(words)) is not None:
        named = f" {' or '.join(taints)}" if taints else ""
        remedies.append(f"add a toleration to {template}, where the taint{named} is meant for such pods")
    if "volume node affinity" in words:
        remedies.append("let the pods go where their volume is, or use a volume that all nodes reach")
    if "Insufficient" in words or not remedies:
        remedies.insert(0, _more(job, stuck))
    since = min((pod.unscheduled for pod in stuck if pod.unscheduled is not None), default=None)
    lasting = f" since {rfc3339(since)}" if since else ""
    return f"no node can take {_named(stuck)}{lasting} ({words}): {'; '.join(remedies)}"


_NOISE: Final = re.compile(r"\.? no new claims to deallocate|,? preemption: ")
"""Separates the scheduler's message from text about other pods."""


def _meant_taints(words: str) -> list[str] | None:
    """Return the taints that pods of jobs may tolerate; empty if the message names no taint.

    None: every taint is the cluster's own.
    """
    named = list(dict.fromkeys(_TAINT.findall(words)))
    meant = [key for key in named if not key.startswith(_OF_CLUSTER)]
    return meant if meant or not named else None


_TAINT: Final = re.compile(r"untolerated taint(?:\(s\))? \{([^:}]+)")
_OF_CLUSTER: Final = ("node-role.kubernetes.io/", "node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")


def _more(job: RLHFJob, stuck: list[ObservedPod]) -> str:
    groups, ranks = {pod.group for pod in stuck}, job.spec.rank_group
    resizable = [group for group in (Group.GENERATION, Group.INFERENCE) if group in groups and group is not ranks]
    if resizable:
        return f"add nodes, free some, or lower {' or '.join(f'spec.{group}.replicas' for group in resizable)}"
    if ranks in groups and getattr(job.spec, ranks).gpus_per_replica:
        return "add nodes with GPUs, or free some"
    return "add nodes, free some, or lower what the pods ask for"


def _broken(job: RLHFJob, broken: list[ObservedPod]) -> str:
    first = broken[0]
    words = first.waiting_message or first.waiting
    template = _template(broken)
    if first.waiting == INIT_FAILED:
        remedy = f"correct that container of {template}, or what it needs"
    elif "not found" in words and ("secret" in words or "configmap" in words):
        remedy = f"create it in namespace {identity.namespace(job)}, or correct {template}"
    else:
        remedy = f"correct the image or the container in {template}"
    return f"{_named(broken)} cannot be started ({first.waiting}: {words}): {remedy}"


def _without_image(job: RLHFJob, images: list[ObservedPod], *, default: bool) -> str:
    words, template = images[0].waiting_message or images[0].waiting, _template(images)
    remedy = f"correct the image in {template}, or give imagePullSecrets there"
    if default:
        remedy = (
            f"{template} names none, so it is the operator's default: push it there, or have the operator installed "
            "with one that is there (image.registry of the chart; it holds for jobs that start anew), or name one in "
            f"{template}"
        )
    return f"{_named(images)} cannot get the image ({words}): {remedy}"


def _lacks_default(job: RLHFJob, pod: ObservedPod) -> bool:
    """Return whether the missing image is the operator's default rather than one of the template."""
    containers = (getattr(job.spec, pod.group).template.get("spec") or {}).get("containers") or []
    named = any(container.get("name") == CONTAINER and container.get("image") for container in containers)
    return not named and not pod.waiting_message.startswith("init container")


def _initializing(pods: list[ObservedPod]) -> str:
    name, _, since = pods[0].waiting_message.partition(" ")
    wait = "waits for its" if len(pods) == 1 else "wait for their"
    return (
        f"{_named(pods)} {wait} init container {name}, which runs since {since}: "
        f"`kubectl logs {pods[0].name} -c {name}` says what it does"
    )


def _slow(job: RLHFJob, slow: list[ObservedPod]) -> str:
    mounted = _mounted(job, slow[0].group)
    cause = f"a mounted object does not exist ({', '.join(mounted)})" if mounted else "a mounted object does not exist"
    remedy = f"`kubectl describe pod {slow[0].name}` has the kubelet's words"
    return (
        f"{_named(slow)} got a node over {SLOW.total_seconds():.0f} s ago and cannot start: the image is large, or "
        f"{cause}; {remedy}"
    )


def _mounted(job: RLHFJob, group: Group) -> list[str]:
    """Return the objects that the volumes of a group's template name, such as `secret hub-token`.

    For the coordinator, also those of the template of the ranks.
    """
    groups: Sequence[Group] = (job.spec.rank_group, Group.COORDINATOR) if group is Group.COORDINATOR else (group,)
    objects: list[str] = []
    for mounting in groups:
        spec: Mapping[str, Any] = getattr(job.spec, mounting).template.get("spec") or {}
        for volume in spec.get("volumes") or []:
            for kind, field, key in _SOURCES:
                if name := (volume.get(field) or {}).get(key):
                    objects.append(f"{kind} {name}")
    return list(dict.fromkeys(objects))


_SOURCES: Final = (
    ("secret", "secret", "secretName"),
    ("configMap", "configMap", "name"),
    ("claim", "persistentVolumeClaim", "claimName"),
    ("NFS export", "nfs", "server"),
)


def _unheard(job: RLHFJob, silent: list[ObservedPod]) -> str:
    """Return that workers run but cannot reach the coordinator, with a remedy."""
    host = identity.pod_host(job, Group.COORDINATOR)
    return (
        f"{_named(silent)} run and cannot reach the coordinator: see that the cluster's DNS finds {host}, and that no "
        f"NetworkPolicy of namespace {identity.namespace(job)} keeps pods of the job from DNS and from port "
        f"{COORDINATOR_PORT}; `kubectl logs {silent[0].name}` says what it tries"
    )


def _named(pods: list[ObservedPod]) -> str:
    names = ", ".join(pod.name for pod in pods[:SHOWN])
    return names if len(pods) <= SHOWN else f"{names} and {len(pods) - SHOWN} more"
