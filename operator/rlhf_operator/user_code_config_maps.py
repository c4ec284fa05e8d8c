"""Reads the ConfigMaps of reward functions and environments when pods that mount them are created.

A pod whose code is missing is not creatable; the reason is returned.
"""

from collections.abc import Sequence
from typing import Any

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.manifests import user_code_mounts

Json = dict[str, Any]


async def creatable_pods(client: KubernetesClient, pods: Sequence[Json]) -> tuple[list[Json], dict[str, str]]:
    """Return the pods that can be created, and pod name -> reason for the others. Raises ApiError."""
    ready: list[Json] = []
    lacking: dict[str, str] = {}
    read: dict[tuple[str, str], Json | None] = {}
    for pod in pods:
        mounts, namespace = user_code_mounts.mounted(pod), pod["metadata"]["namespace"]
        if not mounts:
            ready.append(pod)
            continue
        for name in mounts.values():
            if (namespace, name) not in read:
                read[namespace, name] = await client.get("ConfigMap", namespace, name)
        results = {volume: read[namespace, name] for volume, name in mounts.items()}
        wrong = (user_code_mounts.problem(volume, name, namespace, results[volume]) for volume, name in mounts.items())
        if problems := [problem for problem in wrong if problem]:
            lacking[pod["metadata"]["name"]] = "; ".join(problems)
        else:
            found = {volume: result for volume, result in results.items() if result is not None}
            ready.append(user_code_mounts.stamped(pod, found))
    return ready, lacking
