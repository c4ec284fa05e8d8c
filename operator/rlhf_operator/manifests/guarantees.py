"""The fields that a pod template must not set, and warnings about those without effect.

Takes templates with valid types (`pod_schema`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rlhf_api.problems import Problem, Severity
from rlhf_common.names import GROUP
from rlhf_operator.manifests import claimed_devices, engine_pods, user_code_mounts
from rlhf_operator.manifests.own_folders import mount_problem
from rlhf_operator.manifests.pods import CONTAINER, GPU_RESOURCE, TERMINATION_MESSAGE_POLICY
from rlhf_operator.manifests.quantity import amount

Json = Mapping[str, Any]

USERS_VARIABLES: Final = frozenset({"RLHF_LOG_FORMAT", "HOME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}).union(
    engine_pods.CACHES, engine_pods.SILENT, engine_pods.OFFLINE, engine_pods.LOOPBACK
)
"""Variables that we set and that a template may override."""
_DEVELOPERS_ROUTES: Final = "VLLM_SERVER_DEV_MODE"
"""Variable that opens development routes of vLLM's server."""
_OWN_VARIABLES: Final = ("RLHF_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_OWN_LABELS: Final = (f"{GROUP}/", "app.kubernetes.io/")
_OWN_VOLUMES: Final = frozenset({"certificates", "job", "run"})
_METADATA: Final = frozenset({"labels", "annotations", "creationTimestamp"})
"""Metadata of a template that may be present; `kubectl create --dry-run` writes the time, as null."""
_VOLUME_SOURCES: Final = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
"""Volume sources that a template may use."""
_DEVICES: Final = re.compile(r"nvidia\.com/(gpu|mig-).*|amd\.com/gpu.*|gpu\.intel\.com/.*|google\.com/tpu|.*/gpu")
"""Resources that are compute devices."""


def problems_of(template: Json, path: str, gpus: int, shared: int = 0, devices: str = "") -> Iterator[Problem]:
    """Yield the fields of a template that are not allowed, and warnings.

    `gpus`: GPUs of our container. `shared`: limit of its /dev/shm in bytes, 0 for none. `devices`: devices of its
    processes.
    """
    metadata, spec = template.get("metadata") or {}, template.get("spec") or {}
    for name in metadata.get("labels") or {}:
        if name.startswith(_OWN_LABELS):
            yield Problem(f"{path}.metadata.labels", name, "labels of this prefix are set by the operator")
    for name in metadata.keys() - _METADATA:
        message = "is not read from a template; pods get only its labels and annotations: remove it"
        yield Problem(f"{path}.metadata.{name}", metadata[name], message)
    yield from _spec(spec, f"{path}.spec")
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            where = f"{path}.spec.{kind}[{index}]"
            if kind == "initContainers" and container.get("name") == CONTAINER:
                yield Problem(f"{where}.name", CONTAINER, "is the name of our own container; choose another")
                continue
            yield from _container(container, where, devices)
            yield from _devices(container, where, path, gpus)
            if container.get("name") == CONTAINER and not _own_shared_memory(spec, container):
                yield from _memory(container, where, shared)


def _spec(spec: Json, path: str) -> Iterator[Problem]:
    for field in ("hostNetwork", "hostPID", "hostIPC", "automountServiceAccountToken", "shareProcessNamespace"):
        if spec.get(field):
            yield Problem(f"{path}.{field}", spec[field], "must be false or left out")
    for field in ("hostname", "subdomain", "restartPolicy", "hostUsers", "ephemeralContainers", "hostnameOverride"):
        if field in spec:
            yield Problem(f"{path}.{field}", spec[field], "is set by the operator; leave it out")
    if spec.get("enableServiceLinks"):
        message = "has no effect: variables of Services could be taken for those of the operator; leave it out"
        yield Problem(f"{path}.enableServiceLinks", True, message, severity=Severity.WARNING)
    yield from _security(spec.get("securityContext") or {}, f"{path}.securityContext")
    for index, volume in enumerate(spec.get("volumes") or []):
        yield from _volume(volume, f"{path}.volumes[{index}]")


def _container(container: Json, path: str, devices: str) -> Iterator[Problem]:
    context = container.get("securityContext") or {}
    yield from _security(context, f"{path}.securityContext")
    for index, port in enumerate(container.get("ports") or []):
        if port.get("hostPort"):
            yield Problem(f"{path}.ports[{index}].hostPort", port["hostPort"], "host ports are not allowed")
    if not container.get("name"):
        yield Problem(f"{path}.name", container.get("name"), f"needs a name; ours is {CONTAINER!r}")
    if container.get("name") != CONTAINER:
        return
    for field in ("command", "args", "lifecycle"):
        if field in container:
            yield Problem(f"{path}.{field}", container[field], "is set by the operator; leave it out")
    policy = container.get("terminationMessagePolicy")
    if policy not in (None, TERMINATION_MESSAGE_POLICY):
        message = f"has no effect: the job's status quotes the log, by {TERMINATION_MESSAGE_POLICY}; leave it out"
        yield Problem(f"{path}.terminationMessagePolicy", policy, message, severity=Severity.WARNING)
    if context.get("readOnlyRootFilesystem") is False:
        field = f"{path}.securityContext.readOnlyRootFilesystem"
        yield Problem(field, False, "must be true; write to /tmp or a volume")
    for field, key in (("volumeMounts", "mountPath"), ("volumeDevices", "devicePath")):
        for index, mount in enumerate(container.get(field) or []):
            if (place := mount.get(key)) and (wrong := mount_problem(place)):
                yield Problem(f"{path}.{field}[{index}].{key}", place, wrong)
    yield from _variables(container, path, devices)


def _variables(container: Json, path: str, devices: str) -> Iterator[Problem]:
    for index, variable in enumerate(container.get("env") or []):
        name = str(variable.get("name", ""))
        where = f"{path}.env[{index}].name"
        if name == _DEVELOPERS_ROUTES:
            yield Problem(
                where, name, "opens routes that let everyone who reaches the port control the engine: remove it"
            )
        elif name == claimed_devices.VARIABLE and devices and (container.get("resources") or {}).get("claims"):
            yield from claimed_devices.problems_of_variable(variable, f"{path}.env[{index}].value", devices)
        elif name.startswith(_OWN_VARIABLES) and name not in USERS_VARIABLES:
            yield Problem(where, name, "is set by the operator; see cpuThreads for threads")


def _security(context: Json, path: str) -> Iterator[Problem]:
    required = {"runAsNonRoot": True, "privileged": False, "allowPrivilegeEscalation": False}
    for field, value in required.items():
        if context.get(field, value) is not value:
            yield Problem(f"{path}.{field}", context[field], f"must be {str(value).lower()} or left out")
    if context.get("runAsUser") == 0:
        yield Problem(f"{path}.runAsUser", 0, "must not be root; pods run as an unprivileged user")
    # In a pod's security context this field is unknown, so it may have any type.
    capabilities = context.get("capabilities")
    if isinstance(capabilities, Mapping) and (added := capabilities.get("add")):
        yield Problem(f"{path}.capabilities.add", added, "capabilities may not be added")
    for field in ("procMount", "seLinuxOptions", "windowsOptions", "sysctls"):
        if field in context:
            yield Problem(f"{path}.{field}", context[field], "is not allowed at the restricted level")
    if (profile := (context.get("seccompProfile") or {}).get("type", "RuntimeDefault")) != "RuntimeDefault":
        yield Problem(f"{path}.seccompProfile.type", profile, "must be RuntimeDefault or left out")


def _volume(volume: Json, path: str) -> Iterator[Problem]:
    name = volume.get("name")
    if name in _OWN_VOLUMES or user_code_mounts.is_volume(name):
        yield Problem(f"{path}.name", name, "is the name of a volume of the operator; choose another")
    for source in sorted(volume.keys() - {"name"} - _VOLUME_SOURCES):
        yield Problem(f"{path}.{source}", volume[source], "use a persistentVolumeClaim for files of a node")
    for item in (volume.get("projected") or {}).get("sources") or []:
        if "serviceAccountToken" in item:
            yield Problem(f"{path}.projected", item, "pods of a job hold no API token")


def _devices(container: Json, path: str, template: str, gpus: int) -> Iterator[Problem]:
    """Yield devices and claims of a template that conflict with the manifest's GPUs, and warn of claims that may."""
    resources = container.get("resources") or {}
    ours = container.get("name") == CONTAINER
    group = template.removesuffix(".template")
    coordinator = group == "spec.coordinator"
    remedy = "the coordinator computes on CPU" if coordinator else f"use {group}.gpusPerReplica"
    if ours and claimed_devices.gives_gpus(container):
        yield from claimed_devices.problems_of(container, path, group, gpus)
        return
    for kind in ("limits", "requests"):
        for name, value in (resources.get(kind) or {}).items():
            same = name == GPU_RESOURCE and amount(value) == gpus
            if _DEVICES.fullmatch(name) and ((ours and not same) or (not ours and not gpus)) and amount(value):
                count = f"{gpus} {GPU_RESOURCE}" if gpus else "no GPU"
                message = f"the group's processes have {count}: remove it, {remedy}"
                yield Problem(f"{path}.resources.{kind}.{name}", value, message)
    if ours and not gpus and resources.get("claims"):
        message = f"the claimed devices would idle, because the process computes on CPU: remove it, {remedy}"
        if not coordinator:
            message += f", or set {claimed_devices.VARIABLE} to cuda:0 in env where the claim gives the GPU"
        yield Problem(f"{path}.resources.claims", resources["claims"], message)
    elif ours and any("gpu" in str(claim.get("name", "")).lower() for claim in resources.get("claims") or []):
        message = (
            f"the container has {gpus} {GPU_RESOURCE} beside what is claimed: where the claim gives the GPU, set "
            f"{claimed_devices.VARIABLE} to cuda:0 in env, and it gets no second one"
        )
        yield Problem(f"{path}.resources.claims", resources["claims"], message, severity=Severity.WARNING)


def _own_shared_memory(spec: Json, container: Json) -> bool:
    mounts = container.get("volumeMounts") or []
    return any(volume.get("name") == "shm" for volume in spec.get("volumes") or []) or any(
        mount.get("mountPath") == "/dev/shm"  # noqa: S108 an emptyDir of the pod
        for mount in mounts
    )


def _memory(container: Json, path: str, shared: int) -> Iterator[Problem]:
    """Yield a memory limit that /dev/shm, which counts as memory, could use up alone."""
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    if limit is not None and shared and amount(limit) <= shared:
        message = (
            f"must be more than {shared // 2**20}Mi, which /dev/shm may take of it: raise it, or bound the volume shm "
            "by a smaller sizeLimit"
        )
        yield Problem(f"{path}.resources.limits.memory", limit, message)
