"""Follow the objects of a list as they change: list them, then watch them, for as long as the caller iterates.

Rule: every step yields all objects that exist, so several changes may arrive as one. A watch that breaks is replaced by
a new list and a new watch. Before the first list every error is raised. After it, an API server that does not answer is
retried, and `on_outage` is called once per outage.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from rlhf_cli.cluster.api import Api
from rlhf_operator.api_client.errors import UnavailableError

Json = dict[str, Any]
Objects = dict[tuple[str, str], Json]
"""(namespace, name) -> object."""

RETRY_SECONDS: Final = 2.0
"""Seconds between attempts while the API server does not answer."""
RELIST_SECONDS: Final = 1.0
"""Seconds between the end of a watch and the next list, so that watches that end at once do not become a busy loop."""


async def list_watch(
    api: Api, resource: str, namespace: str | None, on_outage: Callable[[str], None], **selectors: str
) -> AsyncIterator[Objects]:
    """Yield the objects after the first list and after every change; all namespaces for None."""
    listed = False
    in_outage = False
    while True:
        try:
            items, version = await api.listing(resource, namespace, **selectors)
            objects = {_key(body): body for body in items}
            listed, in_outage = True, False
            yield dict(objects)
            async for event in api.watch(resource, namespace, version, **selectors):
                if event["type"] == "ERROR":
                    break  # mostly 410 (expired); the next list raises what is wrong, if anything is
                if event["type"] != "BOOKMARK":
                    _apply(objects, event)
                    yield dict(objects)
        except UnavailableError as error:
            if not listed:
                raise
            if not in_outage:
                on_outage(str(error))
            in_outage = True
        await asyncio.sleep(RETRY_SECONDS if in_outage else RELIST_SECONDS)


def _apply(objects: Objects, event: Json) -> None:
    body = event["object"]
    if event["type"] == "DELETED":
        objects.pop(_key(body), None)
    else:
        objects[_key(body)] = body


def _key(body: Json) -> tuple[str, str]:
    return str(body["metadata"].get("namespace") or ""), str(body["metadata"]["name"])
