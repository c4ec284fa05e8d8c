"""What pods that run rewards are given: functions in the user's ConfigMaps, if they are there, and keys of Secrets.

Rule: pure. The value of a Secret is never read here: the kubelet puts it into the container's environment. A pod that
mounts a function says by an annotation which content it was made with; the kubelet keeps the mounted file up to date,
and a process reads it when it starts, so a change is seen by the next start and by no running worker.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.job.models import Models
from rlhf_api.job.rewards import GivenReward
from rlhf_api.names import GROUP
from rlhf_operator.manifests.mount_paths import REWARD_KEY, REWARDS_PATH

Json = dict[str, Any]

VOLUME: Final = "reward"
"""Name of the volume, and with a dash and its name that of a named reward; with two dashes and its role, which begins
no name, that of what judges otherwise."""
CONTENT: Final = f"{GROUP}/reward-content"
"""Annotation of a pod: digest of the functions that it was made with."""


def volume_name(given: GivenReward) -> str:
    """Return the name of the volume of a reward's ConfigMap."""
    if given.role is not SCORE_REWARD.model:
        return f"{VOLUME}--{given.role}"
    return f"{VOLUME}-{given.name}" if given.name else VOLUME


def mount_path(given: GivenReward) -> str:
    """Return the folder at which a reward's ConfigMap is mounted."""
    return f"{REWARDS_PATH}/{volume_name(given)}"


def config_maps(models: Models) -> list[tuple[GivenReward, str]]:
    """Return the rewards whose function is in a ConfigMap, each with its name."""
    functions = ((given, given.reward.function) for given in models.all_rewards)
    return [(given, function.config_map) for given, function in functions if function and function.config_map]


def is_volume(name: object) -> bool:
    """Return whether a volume of this name is that of a reward."""
    return isinstance(name, str) and (name == VOLUME or name.startswith(f"{VOLUME}-"))


def secret_environment(models: Models) -> list[Json]:
    """Return the variables of our container that hold what rewards are given from Secrets."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
        for reference, variable in models.secret_variables().items()
    ]


def mounted(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return volume -> name of the ConfigMap whose reward function the pod mounts by it."""
    volumes = pod["spec"]["volumes"]
    return {volume["name"]: str(volume["configMap"]["name"]) for volume in volumes if _holds_function(volume)}


def problem(volume: str, name: str, namespace: str, stored: Mapping[str, Any] | None) -> str:
    """Return why the ConfigMap of a volume, as it is stored (None: there is none), cannot be mounted, and what to do;
    empty when it can."""
    _, _, role = volume.partition("--")
    path = (ModelRole(role) if role else SCORE_REWARD.model).manifest_path
    named = "" if role else volume.removeprefix(VOLUME).removeprefix("-")
    field = f"{path}s[{named}].function.configMap" if named else f"{path}.function.configMap"
    remedy = f"kubectl create configmap {name} --namespace={namespace} --from-file={REWARD_KEY}=<your file>"
    if stored is None:
        return f"{field}: {name!r}: no ConfigMap of this name in namespace {namespace}; create it: {remedy}"
    if _function(stored) is None:
        keys = ", ".join(sorted([*(stored.get("data") or {}), *(stored.get("binaryData") or {})])) or "none"
        return f"{field}: {name!r}: the ConfigMap has no key {REWARD_KEY} (its keys: {keys}); make it anew: {remedy}"
    return ""


def stamped(pod: Json, *stored: Mapping[str, Any]) -> Json:
    """Return `pod` with the digest of the functions in the stored ConfigMaps, which have one each."""
    functions = "\0".join(str(_function(each)) for each in stored)
    digest = hashlib.sha256(functions.encode()).hexdigest()[:16]
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), CONTENT: digest}}}


def _holds_function(volume: Mapping[str, Any]) -> bool:
    return is_volume(volume.get("name")) and "configMap" in volume


def _function(stored: Mapping[str, Any]) -> str | None:
    text = (stored.get("data") or {}).get(REWARD_KEY) or (stored.get("binaryData") or {}).get(REWARD_KEY)
    return str(text) if text else None
