"""Asks the API server which gang and queue APIs it serves, and detects changes.

A change ends the process, because watches are opened at its start; the next process starts with the new APIs.
"""

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError
from rlhf_operator.gang.apis import APIS, MODES, ServedApis

log = logging.getLogger(__name__)

DISCOVERY_SECONDS: Final = 300.0
"""Seconds between two discoveries after the first."""
RETRY_SECONDS: Final = 5.0
"""Seconds between attempts until the first answer."""


class ApisChangedError(Exception):
    """Other gang or queue APIs can be used than when the operator started."""


async def served(client: KubernetesClient, modes: Iterable[str] = MODES, *, ignores_labels: bool = False) -> ServedApis:
    """Return the served APIs of the backends in `modes`; the other backends are off. Raises ApiError."""
    allowed = set(modes)
    result = set()
    for mode, versions in APIS.items():
        for version, kinds in versions if mode in allowed else ():
            if set(kinds) <= await client.kinds(version):
                result.add(version)
    return ServedApis(frozenset(result), frozenset(set(MODES) - allowed), ignores_labels)


async def first(client: KubernetesClient, modes: Iterable[str], *, ignores_labels: bool = False) -> ServedApis:
    """Return the served APIs, waiting until the API server answers."""
    while True:
        try:
            return await served(client, modes, ignores_labels=ignores_labels)
        except ApiError as error:
            log.warning("the APIs of schedulers and queues cannot be listed: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


async def changed(client: KubernetesClient, discovered: ServedApis, every: float = DISCOVERY_SECONDS) -> None:
    """Raise ApisChangedError when the usable APIs change; never return."""
    modes = [mode for mode in MODES if mode not in discovered.off]
    while modes:
        await asyncio.sleep(every)
        try:
            now = await served(client, modes)
        except ApiError as error:
            log.warning("the APIs of schedulers and queues cannot be listed: %s", error)
            continue
        if now.usable() != discovered.usable():
            raise ApisChangedError(
                f"the cluster serves {sorted(now.usable().values())}: the operator restarts to use it"
            )
    await asyncio.Event().wait()
