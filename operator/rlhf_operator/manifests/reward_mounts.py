"""What pods that run rewards are given: the function in the user's ConfigMap, if it is there, and keys of Secrets.

Rule: pure. The value of a Secret is never read here: the kubelet puts it into the container's environment. A pod that
mounts a function says by an annotation which content it was made with; the kubelet keeps the mounted file up to date,
and a process reads it when it starts, so a change is seen by the next start and by no running worker.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.job.models import Reward
from rlhf_api.names import GROUP
from rlhf_operator.manifests.mount_paths import REWARD_KEY

Json = dict[str, Any]

VOLUME: Final = "reward"
"""Name of the volume."""
CONTENT: Final = f"{GROUP}/reward-content"
"""Annotation of a pod: digest of the function that it was made with."""
FIELD: Final = "spec.models.reward.function.configMap"


def secret_environment(reward: Reward) -> list[Json]:
    """Return the variables of our container that hold what the reward is given from Secrets."""
    return [
        {"name": variable, "valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
        for reference, variable in reward.secret_variables().items()
    ]


def mounted(pod: Mapping[str, Any]) -> str | None:
    """Return the name of the ConfigMap whose reward function the pod mounts; None when it mounts none."""
    for volume in pod["spec"]["volumes"]:
        if volume.get("name") == VOLUME:
            return str(volume["configMap"]["name"])
    return None


def problem(name: str, namespace: str, stored: Mapping[str, Any] | None) -> str:
    """Return why the stored ConfigMap (None: there is none) cannot be mounted, and what to do; empty when it can."""
    remedy = f"kubectl create configmap {name} --namespace={namespace} --from-file={REWARD_KEY}=<your file>"
    if stored is None:
        return f"{FIELD}: {name!r}: no ConfigMap of this name in namespace {namespace}; create it: {remedy}"
    if _function(stored) is None:
        keys = ", ".join(sorted([*(stored.get("data") or {}), *(stored.get("binaryData") or {})])) or "none"
        return f"{FIELD}: {name!r}: the ConfigMap has no key {REWARD_KEY} (its keys: {keys}); make it anew: {remedy}"
    return ""


def stamped(pod: Json, stored: Mapping[str, Any]) -> Json:
    """Return `pod` with the digest of the function in the stored ConfigMap, which has one."""
    digest = hashlib.sha256(str(_function(stored)).encode()).hexdigest()[:16]
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), CONTENT: digest}}}


def _function(stored: Mapping[str, Any]) -> str | None:
    text = (stored.get("data") or {}).get(REWARD_KEY) or (stored.get("binaryData") or {}).get(REWARD_KEY)
    return str(text) if text else None
