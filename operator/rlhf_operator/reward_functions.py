"""Reads the ConfigMaps of reward functions when pods are made that mount them, and at no other time.

Rule: a pod whose function is not there is not made, and the reason is given in words; every other pod is made. Keeps
nothing: the next reconcile asks again.
"""

from collections.abc import Sequence
from typing import Any

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.manifests import reward_mounts

Json = dict[str, Any]


async def given(client: KubernetesClient, pods: Sequence[Json]) -> tuple[list[Json], dict[str, str]]:
    """Return the pods that can be made, and pod name -> why not of the others. Raises ApiError."""
    ready: list[Json] = []
    lacking: dict[str, str] = {}
    read: dict[tuple[str, str], Json | None] = {}
    for pod in pods:
        name, namespace = reward_mounts.mounted(pod), pod["metadata"]["namespace"]
        if name is None:
            ready.append(pod)
            continue
        if (namespace, name) not in read:
            read[namespace, name] = await client.get("ConfigMap", namespace, name)
        result = read[namespace, name]
        if wrong := reward_mounts.problem(name, namespace, result):
            lacking[pod["metadata"]["name"]] = wrong
        else:
            assert result is not None
            ready.append(reward_mounts.stamped(pod, result))
    return ready, lacking
