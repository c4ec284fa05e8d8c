"""Mounts of users' code: reward functions and the rollout environment in ConfigMaps, and keys of Secrets.

Rule: pure. Must never read the value of a Secret: the kubelet puts it into the environment.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.environment import Environment
from rlhf_api.job.models import Models
from rlhf_api.job.rewards import GivenReward
from rlhf_common.names import GROUP, Group
from rlhf_operator.manifests.mount_paths import ENVIRONMENT_KEY, REWARD_KEY, USER_CODE_PATH

Json = dict[str, Any]

VOLUME: Final = "reward"
"""Name of the volume of an unnamed reward. A named reward appends `-` and its name, another role `--` and the role."""
ENVIRONMENT_VOLUME: Final = f"{VOLUME}--environment"
"""Volume of the rollout environment; no role has this name."""
ENVIRONMENT_PATH: Final = f"{USER_CODE_PATH}/{ENVIRONMENT_VOLUME}"
CONTENT: Final = f"{GROUP}/reward-content"
"""Annotation of a pod: digest of the reward functions and the environment that it was created with."""


def volume_name(entry: GivenReward) -> str:
    """Return the name of the volume of a reward's ConfigMap."""
    if entry.role is not SCORE_REWARD.model:
        return f"{VOLUME}--{entry.role}"
    return f"{VOLUME}-{entry.name}" if entry.name else VOLUME


def mount_path(entry: GivenReward) -> str:
    """Return the folder at which a reward's ConfigMap is mounted."""
    return f"{USER_CODE_PATH}/{volume_name(entry)}"


def config_maps(models: Models) -> list[tuple[GivenReward, str]]:
    """Return the rewards whose function is in a ConfigMap, each with the name of the ConfigMap."""
    functions = ((entry, entry.reward.function) for entry in models.all_rewards)
    return [(entry, function.config_map) for entry, function in functions if function and function.config_map]


def mounts_of(spec: RLHFJobSpec, group: Group) -> list[tuple[str, str, str]]:
    """Return (volume, folder, ConfigMap) of the code in ConfigMaps that workers of a group run.

    `group` is generation or inference.
    """
    mounts = [(volume_name(entry), mount_path(entry), name) for entry, name in config_maps(spec.models)]
    environment = spec.rollout.environment
    # The environment runs in generation workers.
    if group is Group.GENERATION and environment is not None and environment.config_map:
        mounts.append((ENVIRONMENT_VOLUME, ENVIRONMENT_PATH, environment.config_map))
    return mounts


def environment_file(environment: Environment | None) -> str:
    """Return the mounted file of an environment's ConfigMap; empty if the environment is not in one."""
    return f"{ENVIRONMENT_PATH}/{ENVIRONMENT_KEY}" if environment and environment.config_map else ""


def is_volume(name: object) -> bool:
    """Return whether the operator may use this volume name for a reward or the environment."""
    return isinstance(name, str) and (name == VOLUME or name.startswith(f"{VOLUME}-"))


def secret_environment(spec: RLHFJobSpec, group: Group) -> list[Json]:
    """Return the variables of our container with the values from Secrets for users' code in a group's workers."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
        for reference, variable in spec.secret_variables(group).items()
    ]


def mounted(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return volume -> name of the ConfigMap for the mounted code of a pod."""
    volumes = pod["spec"]["volumes"]
    return {volume["name"]: str(volume["configMap"]["name"]) for volume in volumes if _holds_code(volume)}


def problem(volume: str, name: str, namespace: str, stored: Mapping[str, Any] | None) -> str:
    """Return why the stored ConfigMap of a volume does not have the code, with a remedy; empty if it has it.

    `stored`: the ConfigMap, or None if it does not exist.
    """
    field, key = _field(volume), _key(volume)
    remedy = f"kubectl create configmap {name} --namespace={namespace} --from-file={key}=<your file>"
    if stored is None:
        return f"{field}: {name!r}: no ConfigMap of this name in namespace {namespace}; create it: {remedy}"
    if _code(volume, stored) is None:
        keys = ", ".join(sorted([*(stored.get("data") or {}), *(stored.get("binaryData") or {})])) or "none"
        return f"{field}: {name!r}: the ConfigMap has no key {key} (its keys: {keys}); create it again: {remedy}"
    return ""


def stamped(pod: Json, stored: Mapping[str, Mapping[str, Any]]) -> Json:
    """Return `pod` with the digest of the code in the stored ConfigMaps; `stored` has one for each of its volumes."""
    code = "\0".join(str(_code(volume, each)) for volume, each in stored.items())
    digest = hashlib.sha256(code.encode()).hexdigest()[:16]
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), CONTENT: digest}}}


def _holds_code(volume: Mapping[str, Any]) -> bool:
    return is_volume(volume.get("name")) and "configMap" in volume


def _field(volume: str) -> str:
    """Return the field of the manifest that names the ConfigMap of a volume."""
    if volume == ENVIRONMENT_VOLUME:
        return "spec.rollout.environment.configMap"
    _, _, role = volume.partition("--")
    path = (ModelRole(role) if role else SCORE_REWARD.model).manifest_path
    named = "" if role else volume.removeprefix(VOLUME).removeprefix("-")
    return f"{path}s[{named}].function.configMap" if named else f"{path}.function.configMap"


def _key(volume: str) -> str:
    return ENVIRONMENT_KEY if volume == ENVIRONMENT_VOLUME else REWARD_KEY


def _code(volume: str, stored: Mapping[str, Any]) -> str | None:
    key = _key(volume)
    text = (stored.get("data") or {}).get(key) or (stored.get("binaryData") or {}).get(key)
    return str(text) if text else None
