"""Checks a user's pod template and merges it with our pod: the user adds, our guarantees stay.

Lists merge by the keys in _LIST_KEYS.
"""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from rlhf_api.problems import ManifestError, Problem, Severity
from rlhf_api.structural_schema import without_nulls
from rlhf_common.nesting import too_deep
from rlhf_operator.bounded_cache import cached
from rlhf_operator.manifests import claimed_devices, guarantees, pod_rules, pod_schema
from rlhf_operator.manifests.engine_pods import shared_bytes
from rlhf_operator.manifests.pods import CONTAINER, CONTAINER_SECURITY, GPU_RESOURCE, TERMINATION_MESSAGE_POLICY, TMP
from rlhf_operator.manifests.quantity import amount

Json = dict[str, Any]

MAX_PROBLEMS: Final = 20
"""Maximum problems that are reported for one template at a time."""
MAX_DEPTH: Final = 32
"""Most levels of a template."""
MAX_CHARACTERS: Final = 1_048_576
"""Most characters of a template as JSON."""
REMEMBERED: Final = 1024
"""Most templates whose problems are cached."""

_LIST_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
"""Merge key of the lists that are merged with ours; other lists of ours replace those of a template, unless they are
defaults.
"""
_DEFAULTS: Final = frozenset(
    {"image", "imagePullPolicy", "terminationGracePeriodSeconds", "cpu", "memory"}
    | {"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "startupProbe", "livenessProbe", "readinessProbe"}
)
"""Fields that we set as defaults: the template's value wins."""
_USERS_VOLUMES: Final = frozenset({"tmp", "shm", "/tmp", "/dev/shm"})  # noqa: S108 paths inside the pod
"""Our volumes and mounts that a template may replace, to limit or enlarge them."""


class TemplateError(ManifestError):
    """No pod can be created from a pod template; has the problems that prevent it."""


def problems_of(template: object, path: str, ours: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return at most MAX_PROBLEMS problems of a template to merge with our pod `ours`; `path` is its place in the
    manifest.

    Problems with `Severity.SERVER` do not prevent a merge.
    """
    # This check comes first, because the following code recurses.
    if deep := too_deep(template, MAX_DEPTH):
        return (Problem(path, None, f"is nested more than {MAX_DEPTH} levels deep, as no pod is, below {deep[:80]}"),)
    (container,) = ours["spec"]["containers"]
    gpus = int(container["resources"].get("limits", {}).get(GPU_RESOURCE, 0))
    text, volumes = json.dumps(template, sort_keys=True), ours["spec"]["volumes"]
    names = frozenset(str(volume.get("name")) for volume in volumes)
    devices = next((each["value"] for each in container["env"] if each["name"] == claimed_devices.VARIABLE), "")
    return _problems(text, path, names, gpus, shared_bytes(volumes), devices)


@cached(REMEMBERED)
def _problems(
    text: str, path: str, volumes: frozenset[str], gpus: int, shared: int, devices: str
) -> tuple[Problem, ...]:
    if len(text) > MAX_CHARACTERS:
        return (Problem(path, None, f"has {len(text)} characters as JSON: must be at most {MAX_CHARACTERS}"),)
    template = json.loads(text)
    problems = list(islice(pod_schema.problems_of(template, path), MAX_PROBLEMS))
    if all(problem.severity is Severity.SERVER for problem in problems):
        # The other checks need values of the right types.
        problems += islice(guarantees.problems_of(template, path, gpus, shared, devices), MAX_PROBLEMS)
        problems += islice(pod_rules.problems_of(template, path, CONTAINER, volumes), MAX_PROBLEMS)
    return tuple(problems[:MAX_PROBLEMS])


def check(template: object, path: str, ours: Mapping[str, Any]) -> None:
    """Raise TemplateError with the problems that prevent the merge."""
    errors = [problem for problem in problems_of(template, path, ours) if problem.severity is Severity.ERROR]
    if errors:
        raise TemplateError(errors, path)


def merge_pod(ours: Json, template: Mapping[str, Any], labels: Mapping[str, str], path: str) -> Json:
    """Return `ours` with the template merged in, and its labels, annotations and `labels`. Raises TemplateError.

    `path` is the template's place in the manifest, for errors.
    """
    check(template, path, ours)
    theirs = without_nulls(dict(template))
    spec, meta = theirs.get("spec") or {}, theirs.get("metadata") or {}
    # Our pod was created for this call and theirs is a copy, so parts of both can be reused.
    merged = {**ours, "metadata": dict(ours["metadata"])}
    merged["metadata"]["labels"] = {**(meta.get("labels") or {}), **labels}
    if annotations := {**(ours["metadata"].get("annotations") or {}), **(meta.get("annotations") or {})}:
        merged["metadata"]["annotations"] = annotations
    merged["spec"] = _merge(spec, _within_limits(merged["spec"], spec))
    for container in (*merged["spec"]["containers"], *(merged["spec"].get("initContainers") or ())):
        context = _merge(CONTAINER_SECURITY, container.get("securityContext") or {})
        container["securityContext"] = {**context, "capabilities": {"drop": ["ALL"]}}
        _give_tmp(container)
        container.setdefault("terminationMessagePolicy", TERMINATION_MESSAGE_POLICY)
    # Ours first: `kubectl logs` and `kubectl exec` use the first container.
    merged["spec"]["containers"].sort(key=lambda container: container.get("name") != CONTAINER)
    return merged


def _within_limits(ours: Json, theirs: Mapping[str, Any]) -> Json:
    """Return our pod without default requests above the template's limits, and without GPUs that a claim provides."""
    counterpart: Mapping[str, Any] = next(
        (each for each in theirs.get("containers") or () if each.get("name") == CONTAINER), {}
    )
    limits = (counterpart.get("resources") or {}).get("limits") or {}
    container = ours["containers"][0]
    resources = container["resources"]
    if claimed_devices.gives_gpus(counterpart):
        resources = claimed_devices.without_gpus(resources, GPU_RESOURCE)
    requests = resources.get("requests", {})
    within_limits = {
        name: value for name, value in requests.items() if amount(value) <= amount(limits.get(name, value))
    }
    return {**ours, "containers": [{**container, "resources": resources | {"requests": within_limits}}]}


def _give_tmp(container: Json) -> None:
    """Mount /tmp in a container with a read-only root file system, unless something is mounted there."""
    mounts = container.get("volumeMounts") or []
    if container["securityContext"]["readOnlyRootFilesystem"] and TMP["mountPath"] not in {
        mount.get("mountPath") for mount in mounts
    }:
        container["volumeMounts"] = [*mounts, dict(TMP)]


def _merge(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Json:
    merged = dict(theirs)
    for key, value in ours.items():
        existing = merged.get(key)
        if existing is None:
            merged[key] = value
        elif key in _LIST_KEYS and isinstance(value, list):
            merged[key] = _merge_list(existing, value, _LIST_KEYS[key])
        elif isinstance(value, Mapping) and isinstance(existing, Mapping) and key not in _DEFAULTS:
            merged[key] = _merge(existing, value)
        elif key not in _DEFAULTS:
            merged[key] = value
    return merged


def _merge_list(theirs: list[Json], ours: list[Json], key: str) -> list[Json]:
    """Return our items in our order, each merged with its counterpart or replaced by it, then the template's other
    items.
    """
    left = list(theirs)
    merged = []
    for item in ours:
        counterpart: Json | None = next((entry for entry in left if entry.get(key) == item.get(key)), None)
        if counterpart is None:
            merged.append(item)
            continue
        left.remove(counterpart)
        replaced = item.get(key) in guarantees.USERS_VARIABLES | _USERS_VOLUMES | {claimed_devices.VARIABLE}
        merged.append(counterpart if replaced else _merge(counterpart, item))
    return merged + left
