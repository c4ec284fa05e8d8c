"""The requests of the command line to the API server: get, list, watch, patch, logs, a pod's metrics.

Rule: plain objects in and out. Every answer that is not success becomes a `VerbError` whose sentence names the
verb, the resource and what would help. Requests have a time-out; streams have one only for the connection.
"""

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient

from rlhf_api import names
from rlhf_cli.cluster import answers
from rlhf_cli.cluster.connection import Connection
from rlhf_cli.cluster.errors import UnreachableError

Json = dict[str, Any]

FIELD_MANAGER: Final = "kubectl-rlhf"
TIMEOUT_SECONDS: Final = 30.0
"""One request."""
CONNECT_SECONDS: Final = 10.0
"""Until a connection stands."""
WATCH_SECONDS: Final = 290
"""The API server ends a watch after this long; it is then begun again."""
PAGE: Final = 500
"""Objects of a list asked for at once."""
LINE_MAX: Final = 4 * 2**20
"""Bytes of one line of a stream: more than any object or log line of ours."""
RESOURCES: Final[Mapping[str, str]] = {
    names.PLURAL: f"/apis/{names.API_VERSION}",
    "pods": "/api/v1",
    "events": "/apis/events.k8s.io/v1",
    "leases": "/apis/coordination.k8s.io/v1",
}
"""Resource -> where it is served."""


class Api:
    """Requests to one API server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._client = ApiClient(connection.configuration)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """The object. Raises AbsentError."""
        return _object(await self._ask("get", answers.Asked(resource, namespace, name)))

    async def listing(self, resource: str, namespace: str | None, **selectors: str) -> tuple[list[Json], str]:
        """(objects, resourceVersion of the list), in all namespaces for None; `selectors` as in the API."""
        found: list[Json] = []
        query = {"limit": str(PAGE)} | selectors
        while True:
            page = _object(await self._ask("list", answers.Asked(resource, namespace), query))
            found += page.get("items") or []
            if not (following := page["metadata"].get("continue")):
                return found, str(page["metadata"].get("resourceVersion") or "")
            query |= {"continue": following}

    async def watch(self, resource: str, namespace: str | None, version: str, **selectors: str) -> AsyncIterator[Json]:
        """Watch events after `version` until the API server ends the stream."""
        query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)} | selectors
        async for line in self._stream("watch", answers.Asked(resource, namespace), query):
            yield json.loads(line)

    async def patch(self, resource: str, namespace: str, name: str, patch: Json, *, dry_run: bool) -> Json:
        """Merges `patch` into the object on the server; the object as it then is."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return _object(await self._ask("patch", answers.Asked(resource, namespace, name), query, patch))

    def log(self, namespace: str, pod: str, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Lines of a container's log."""
        return self._stream("get", answers.Asked("pods", namespace, pod, "log"), query)

    async def metrics(self, namespace: str, pod: str) -> str:
        """A pod's Prometheus page, through the API server."""
        asked = answers.Asked("pods", namespace, f"{pod}:{names.METRICS_PORT}", "proxy", "/metrics")
        return (await self._ask("get", asked)).decode(errors="replace")

    async def _ask(
        self, verb: str, asked: answers.Asked, query: Mapping[str, str] | None = None, body: Json | None = None
    ) -> bytes:
        limits = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS, sock_connect=CONNECT_SECONDS)
        try:
            answer = await self._request(verb, asked, query or {}, body, limits)
            content = bytes(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise answers.unreachable(self.connection, error) from error
        if answer.status >= 300:
            raise answers.problem(answer.status, content, verb, asked, self.connection)
        return content

    async def _stream(self, verb: str, asked: answers.Asked, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        try:
            answer = await self._request(verb, asked, query, None, limits)
            if answer.status >= 300:
                raise answers.problem(answer.status, await answer.read(), verb, asked, self.connection)
            rest = b""
            async for chunk in answer.response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > LINE_MAX:
                    raise UnreachableError(f"{asked}: a line of more than {LINE_MAX} bytes")
            if rest:
                yield rest
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise answers.unreachable(self.connection, error) from error

    async def _request(
        self,
        verb: str,
        asked: answers.Asked,
        query: Mapping[str, str],
        body: Json | None,
        limits: aiohttp.ClientTimeout,
    ) -> Any:
        headers = {"Accept": "*/*" if asked.subresource else "application/json"}
        if verb == "patch":
            headers["Content-Type"] = "application/merge-patch+json"
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], asked.resource, verb, None)
        url = self._client.configuration.host + asked.path(RESOURCES[asked.resource])
        url += f"?{urlencode(query)}" if query else ""
        method = "PATCH" if verb == "patch" else "GET"
        return await self._client.rest_client.request(method, url, headers=headers, body=body, _request_timeout=limits)


def _object(content: bytes) -> Json:
    found: Json = json.loads(content)
    return found
