"""Merges a user's pod template with our pod: the user adds, our guarantees stay.

Rule: security, command, environment contract, labels and mounts of ours are never weakened. A template that asks for
the contrary is an error that names the field and the value, not something silently dropped: a user who wrote
`hostNetwork: true` must learn that it will not be so. Lists merge by their key, as Kubernetes merges them (containers,
env, volumes by name, mounts by path); everything we do not set is the user's.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.names import GROUP
from rlhf_operator.manifests.pods import CONTAINER, CONTAINER_SECURITY, TMP

Json = dict[str, Any]

_LIST_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Merge key of each list that Kubernetes merges; other lists are taken whole."""
_DEFAULTS: Final = frozenset(
    {"image", "imagePullPolicy", "terminationGracePeriodSeconds", "cpu", "memory"}
    | {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy"}
)
"""Values we set only as a default: the template's wins."""
_OWN_VARIABLES: Final = ("RLHF_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_USERS_VARIABLES: Final = frozenset({"RLHF_LOG_FORMAT", "HOME", "PYTHONUNBUFFERED"})
_OWN_LABELS: Final = (f"{GROUP}/", "app.kubernetes.io/")
_USERS_VOLUMES: Final = frozenset({"tmp", "shm", "/tmp", "/dev/shm"})  # noqa: S108 paths inside the pod
"""Volumes and mounts of ours that a template may replace, to bound or enlarge them."""
_VOLUME_SOURCES: Final = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)
"""What the restricted Pod Security level admits."""


class TemplateError(ValueError):
    """A pod template asks for something a job's pods do not get."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}: {value!r}: {remedy}")
        self.field = field


def merge_pod(ours: Json, template: Mapping[str, Any], labels: Mapping[str, str], path: str) -> Json:
    """`ours` with the template merged in; metadata holds the template's labels and annotations beside `labels`.

    `path` is the template's place in the manifest (`spec.training.template`), for errors. Raises TemplateError.
    """
    theirs = copy.deepcopy(dict(template))
    spec, meta = theirs.pop("spec", None) or {}, theirs.pop("metadata", None) or {}
    if theirs:
        unknown = next(iter(theirs))
        raise TemplateError(f"{path}.{unknown}", theirs[unknown], "a pod template has metadata and spec only")
    _check_spec(spec, f"{path}.spec")
    for label in meta.get("labels") or {}:
        if label.startswith(_OWN_LABELS):
            raise TemplateError(f"{path}.metadata.labels", label, "labels of this prefix are set by the operator")
    # Ours is made anew for every pod and theirs is a copy by now, so parts of both are taken as they are.
    merged = {**ours, "metadata": dict(ours["metadata"])}
    merged["metadata"]["labels"] = {**(meta.get("labels") or {}), **labels}
    if annotations := meta.get("annotations"):
        merged["metadata"]["annotations"] = dict(annotations)
    merged["spec"] = _merge(spec, merged["spec"])
    for container in (*merged["spec"]["containers"], *merged["spec"].get("initContainers", [])):
        context = _merge(CONTAINER_SECURITY, container.get("securityContext") or {})
        container["securityContext"] = {**context, "capabilities": {"drop": ["ALL"]}}
        _give_tmp(container)
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    # Ours first: `kubectl logs` and `kubectl exec` take the first container.
    merged["spec"]["containers"].sort(key=lambda container: container["name"] != CONTAINER)
    return merged


def _give_tmp(container: Json) -> None:
    """A root file system that we make read-only leaves a container of the template without a place for its files."""
    mounts = container.get("volumeMounts") or []
    if container["securityContext"]["readOnlyRootFilesystem"] and TMP["mountPath"] not in {
        each.get("mountPath") for each in mounts
    }:
        container["volumeMounts"] = [*mounts, dict(TMP)]


def _merge(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Json:
    merged = dict(theirs)
    for key, value in ours.items():
        given = merged.get(key)
        if given is None:
            merged[key] = value
        elif key in _LIST_KEYS and isinstance(value, list):
            merged[key] = _merge_list(given, value, _LIST_KEYS[key])
        elif isinstance(value, Mapping) and isinstance(given, Mapping) and key not in _DEFAULTS:
            merged[key] = _merge(given, value)
        elif key not in _DEFAULTS:
            merged[key] = value
    return merged


def _merge_list(theirs: list[Json], ours: list[Json], key: str) -> list[Json]:
    """Ours in our order, each merged with its counterpart, then what only the template has."""
    given = {item.get(key): item for item in theirs}
    merged = []
    for item in ours:
        counterpart = given.pop(item[key], None)
        replaced = item[key] in _USERS_VARIABLES | _USERS_VOLUMES
        if counterpart is None:
            merged.append(item)
        else:
            merged.append(counterpart if replaced else _merge(counterpart, item))
    return merged + list(given.values())


def _check_spec(spec: Json, path: str) -> None:
    for field in ("hostNetwork", "hostPID", "hostIPC", "automountServiceAccountToken", "shareProcessNamespace"):
        if spec.get(field):
            raise TemplateError(f"{path}.{field}", spec[field], "must be false or left out")
    for field in ("hostname", "subdomain", "restartPolicy", "hostUsers", "ephemeralContainers"):
        if field in spec:
            raise TemplateError(f"{path}.{field}", spec[field], "is set by the operator; leave it out")
    _check_security(spec.get("securityContext") or {}, f"{path}.securityContext")
    for i, volume in enumerate(spec.get("volumes") or []):
        _check_volume(volume, f"{path}.volumes[{i}]")
    for kind in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(kind) or []):
            where = f"{path}.{kind}[{i}]"
            if not container.get("name"):
                raise TemplateError(f"{where}.name", container.get("name"), f"needs a name; ours is {CONTAINER!r}")
            if kind == "initContainers" and container["name"] == CONTAINER:
                raise TemplateError(f"{where}.name", CONTAINER, "is the name of our own container; choose another")
            _check_container(container, where)


def _check_container(container: Json, path: str) -> None:
    _check_security(container.get("securityContext") or {}, f"{path}.securityContext")
    for i, port in enumerate(container.get("ports") or []):
        if port.get("hostPort"):
            raise TemplateError(f"{path}.ports[{i}].hostPort", port["hostPort"], "host ports are not allowed")
    if container["name"] != CONTAINER:
        return
    for field in ("command", "args", "lifecycle"):
        if field in container:
            raise TemplateError(f"{path}.{field}", container[field], "is set by the operator; leave it out")
    if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is False:
        field = f"{path}.securityContext.readOnlyRootFilesystem"
        raise TemplateError(field, False, "must be true; write to /tmp or a volume")
    for i, mount in enumerate(container.get("volumeMounts") or []):
        if str(mount.get("mountPath", "")).startswith("/etc/rlhf"):
            raise TemplateError(
                f"{path}.volumeMounts[{i}].mountPath", mount["mountPath"], "is the operator's own folder"
            )
    for i, variable in enumerate(container.get("env") or []):
        name = str(variable.get("name", ""))
        if name.startswith(_OWN_VARIABLES) and name not in _USERS_VARIABLES:
            raise TemplateError(f"{path}.env[{i}].name", name, "is set by the operator; see cpuThreads for threads")


def _check_security(context: Json, path: str) -> None:
    required = {"runAsNonRoot": True, "privileged": False, "allowPrivilegeEscalation": False}
    for field, value in required.items():
        if context.get(field, value) is not value:
            raise TemplateError(f"{path}.{field}", context[field], f"must be {str(value).lower()} or left out")
    if context.get("runAsUser") == 0:
        raise TemplateError(f"{path}.runAsUser", 0, "must not be root; pods run as an unprivileged user")
    if added := (context.get("capabilities") or {}).get("add"):
        raise TemplateError(f"{path}.capabilities.add", added, "capabilities may not be added")
    for field in ("procMount", "seLinuxOptions", "windowsOptions", "sysctls"):
        if field in context:
            raise TemplateError(f"{path}.{field}", context[field], "is not allowed at the restricted level")
    if (profile := (context.get("seccompProfile") or {}).get("type", "RuntimeDefault")) != "RuntimeDefault":
        raise TemplateError(f"{path}.seccompProfile.type", profile, "must be RuntimeDefault or left out")


def _check_volume(volume: Json, path: str) -> None:
    name = volume.get("name")
    if name in ("certificates", "job", "run", "reward"):
        raise TemplateError(f"{path}.name", name, "is the name of a volume of the operator; choose another")
    for source in sorted(set(volume) - {"name"} - _VOLUME_SOURCES):
        raise TemplateError(f"{path}.{source}", volume[source], "use a persistentVolumeClaim for files of a node")
    for item in (volume.get("projected") or {}).get("sources") or []:
        if "serviceAccountToken" in item:
            raise TemplateError(f"{path}.projected", item, "pods of a job hold no API token")
