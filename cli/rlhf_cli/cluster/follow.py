"""The objects of a list as they change: listed once, then watched, for as long as the caller wants.

Rule: each step yields the whole of what is there, so a reader never misses a change that came and went together. A
broken watch is begun again from a fresh list. Before the first list every problem is raised; after it, an API server
that does not answer is waited for, and `on_trouble` is told once each time.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from rlhf_cli.cluster.api import Api
from rlhf_cli.cluster.errors import UnreachableError

Json = dict[str, Any]
Objects = dict[tuple[str, str], Json]
"""(namespace, name) -> object."""

AGAIN_SECONDS: Final = 2.0
"""Between attempts while the API server does not answer."""
REST_SECONDS: Final = 1.0
"""Between the end of a watch and the next list: an end that comes at once must not become a loop."""


async def follow(
    api: Api, resource: str, namespace: str | None, on_trouble: Callable[[str], None], **selectors: str
) -> AsyncIterator[Objects]:
    """Yields after the first list and after every change."""
    listed = False
    troubled = False
    while True:
        try:
            items, version = await api.listing(resource, namespace, **selectors)
            objects = {_key(each): each for each in items}
            listed, troubled = True, False
            yield dict(objects)
            async for event in api.watch(resource, namespace, version, **selectors):
                if event["type"] == "ERROR":
                    break  # mostly 410; a fresh list says what is wrong if anything is
                if event["type"] != "BOOKMARK":
                    _change(objects, event)
                    yield dict(objects)
        except UnreachableError as problem:
            if not listed:
                raise
            if not troubled:
                on_trouble(str(problem))
            troubled = True
        await asyncio.sleep(AGAIN_SECONDS if troubled else REST_SECONDS)


def _change(objects: Objects, event: Json) -> None:
    body = event["object"]
    if event["type"] == "DELETED":
        objects.pop(_key(body), None)
    else:
        objects[_key(body)] = body


def _key(body: Json) -> tuple[str, str]:
    return str(body["metadata"].get("namespace") or ""), str(body["metadata"]["name"])
