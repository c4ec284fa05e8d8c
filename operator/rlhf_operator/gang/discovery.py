"""Asks the API server which of the gang and queue APIs it serves, and notices when that changes.

Rule: an API server that does not answer serves what it served before: a job that waits for its quota must not start
because a request was lost. A watch is opened when the operator starts, so a change ends the process, and the next one
begins with what is served then; jobs do not notice.
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
"""Between two discoveries: a scheduler or a queue is installed once in a cluster's life."""
RETRY_SECONDS: Final = 5.0
"""Until the first answer."""


class ApisChangedError(Exception):
    """The cluster serves other APIs than when the operator started."""


async def served(client: KubernetesClient, modes: Iterable[str] = MODES, *, ignores_labels: bool = False) -> ServedApis:
    """Return what is served; backends that are not among `modes` are off. Raises ApiError."""
    allowed = set(modes)
    result = set()
    for mode, versions in APIS.items():
        for version, kinds in versions if mode in allowed else ():
            if set(kinds) <= await client.kinds(version):
                result.add(version)
    return ServedApis(frozenset(result), frozenset(set(MODES) - allowed), ignores_labels)


async def first(client: KubernetesClient, modes: Iterable[str], *, ignores_labels: bool = False) -> ServedApis:
    """Return what is served, as soon as the API server says so."""
    while True:
        try:
            return await served(client, modes, ignores_labels=ignores_labels)
        except ApiError as error:
            log.warning("the APIs of schedulers and queues cannot be listed: %s", error)
        await asyncio.sleep(RETRY_SECONDS)


async def changed(client: KubernetesClient, known: ServedApis, every: float = DISCOVERY_SECONDS) -> None:
    """Raise ApisChangedError when something else can be used than is known; never return."""
    modes = [mode for mode in MODES if mode not in known.off]
    while modes:
        await asyncio.sleep(every)
        try:
            now = await served(client, modes)
        except ApiError as error:
            log.warning("the APIs of schedulers and queues cannot be listed: %s", error)
            continue
        if now.usable() != known.usable():
            raise ApisChangedError(
                f"the cluster serves {sorted(now.usable().values())}: the operator starts anew to use it"
            )
    await asyncio.Event().wait()
