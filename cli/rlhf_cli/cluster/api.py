"""The requests of the command line to the API server: get, list, watch, patch, logs, metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

from rlhf_cli.cluster.errors import explained
from rlhf_common import names
from rlhf_operator.api_client.client import PAGE
from rlhf_operator.api_client.connection import Connection
from rlhf_operator.api_client.errors import ApiError, UnavailableError
from rlhf_operator.api_client.resources import CORE_RESOURCES, Resource
from rlhf_operator.api_client.transport import ApiRequest, Transport, decoded

Json = dict[str, Any]
Objects = dict[tuple[str, str], Json]
"""(namespace, name) -> object."""

RETRY_SECONDS: Final = 2.0
"""Seconds between attempts while the API server does not answer."""
RELIST_SECONDS: Final = 1.0
"""Seconds between the end of a watch and the next list, so that watches that end at once do not cause a busy loop."""
FIELD_MANAGER: Final = "kubectl-rlhf"
WATCH_SECONDS: Final = 290
"""Seconds after which the API server ends a watch; the client then lists and watches again."""
_MERGE_PATCH: Final = {"Accept": "application/json", "Content-Type": "application/merge-patch+json"}
_RESOURCES: Final[Mapping[str, Resource]] = {resource.plural: resource for resource in CORE_RESOURCES.values()}


class Api:
    """Requests to one API server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._transport = Transport(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._transport.close()

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """Return the object. Raises ApiError or VerbError; MissingError if there is no such object."""
        return decoded(await self._ask(_request("get", resource, namespace, name)))

    async def listing(self, resource: str, namespace: str | None, **selectors: str) -> tuple[list[Json], str]:
        """Return the objects of a list and its resourceVersion; None lists all namespaces. `selectors` as in the
        API."""
        items: list[Json] = []
        query = {"limit": str(PAGE)} | selectors
        while True:
            page = decoded(await self._ask(_request("list", resource, namespace), query))
            items += page.get("items") or []
            if not (following := page["metadata"].get("continue")):
                return items, str(page["metadata"].get("resourceVersion") or "")
            query |= {"continue": following}

    async def watch(self, resource: str, namespace: str | None, version: str, **selectors: str) -> AsyncIterator[Json]:
        """Yield watch events after `version` until the API server ends the stream."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)} | selectors
        async for line in self._lines(_request("watch", resource, namespace), query):
            yield json.loads(line)

    async def patch(self, resource: str, namespace: str, name: str, patch: Json, *, dry_run: bool) -> Json:
        """Merge `patch` into the object on the server; return the changed object."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return decoded(await self._ask(_request("patch", resource, namespace, name), query, patch, _MERGE_PATCH))

    def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the lines of a container's log."""
        return self._lines(_request("get", "pods", namespace, pod, "log"), query)

    async def metrics(self, namespace: str, pod: str) -> str:
        """Return a pod's Prometheus page, read through the API server."""
        request = _request("get", "pods", namespace, f"{pod}:{names.METRICS_PORT}", "proxy", "/metrics")
        return (await self._ask(request)).decode(errors="replace")

    async def _ask(
        self,
        request: ApiRequest,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        try:
            return await self._transport.request(request, query, body, headers)
        except ApiError as error:
            raise explained(error, request, self.connection) from error

    async def _lines(self, request: ApiRequest, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        try:
            async for line in self._transport.lines(request, query):
                yield line
        except ApiError as error:
            raise explained(error, request, self.connection) from error


def _request(
    verb: str, resource: str, namespace: str | None, name: str = "", subresource: str = "", rest: str = ""
) -> ApiRequest:
    return ApiRequest(verb, _RESOURCES[resource], namespace, name, subresource, rest)


async def list_watch(
    api: Api, resource: str, namespace: str | None, on_outage: Callable[[str], None], **selectors: str
) -> AsyncIterator[Objects]:
    """Yield the objects of a list, and again after changes, for as long as the caller iterates. None means all
    namespaces.

    Errors before the first list are raised. A later UnavailableError is retried; `on_outage` is called once per outage.
    """
    listed = False
    in_outage = False
    while True:
        try:
            items, version = await api.listing(resource, namespace, **selectors)
            objects = {_object_key(body): body for body in items}
            listed, in_outage = True, False
            yield dict(objects)
            async for event in api.watch(resource, namespace, version, **selectors):
                if event["type"] == "ERROR":
                    break  # mostly 410 (expired); the next list raises any real error
                if event["type"] != "BOOKMARK":
                    _apply_event(objects, event)
                    yield dict(objects)
        except UnavailableError as error:
            if not listed:
                raise
            if not in_outage:
                on_outage(str(error))
            in_outage = True
        await asyncio.sleep(RETRY_SECONDS if in_outage else RELIST_SECONDS)


def _apply_event(objects: Objects, event: Json) -> None:
    body = event["object"]
    if event["type"] == "DELETED":
        objects.pop(_object_key(body), None)
    else:
        objects[_object_key(body)] = body


def _object_key(body: Json) -> tuple[str, str]:
    return str(body["metadata"].get("namespace") or ""), str(body["metadata"]["name"])
