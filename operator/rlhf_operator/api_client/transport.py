"""Sends requests to one API server and reads streams of lines, with time-outs, retries and a limit on concurrency.

Callers must be able to repeat a write: the API server may have carried it out although the answer was lost.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient

from rlhf_operator.api_client.connection import Connection, session_options
from rlhf_operator.api_client.errors import UnavailableError, error_of
from rlhf_operator.api_client.resources import Resource

Json = dict[str, Any]
Body = Json | list[Json] | bytes

CONCURRENCY: Final = 32
"""Default maximum of concurrent requests, besides urgent ones and streams."""
TIMEOUT_SECONDS: Final = 30.0
"""Time-out of one attempt at a request in seconds."""
CONNECT_SECONDS: Final = 10.0
"""Time-out of opening a connection in seconds."""
MAX_RETRIES: Final = 4
"""Maximum retries of a request that the API server asked to repeat."""
MAX_RETRY_SECONDS: Final = 10.0
"""Longest wait in seconds before a retry; a longer Retry-After is shortened to it."""
MAX_LINE: Final = 4 * 2**20
"""Bytes of an unfinished line of a stream beyond which it is an error; by default etcd stores no object as large."""
_METHODS: Final = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "apply": "PATCH",
    "patch": "PATCH",
    "update": "PUT",
    "delete": "DELETE",
}


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """The target and verb of a request."""

    verb: str
    """Verb as in a Role, or `apply` for a server-side apply."""
    resource: Resource
    namespace: str | None = None
    """Namespace; None for all namespaces or for a kind without one."""
    name: str = ""
    subresource: str = ""
    rest: str = ""
    """Path below the subresource."""

    @property
    def path(self) -> str:
        """Return the path of its URL."""
        place = (self.resource.prefix, *(("namespaces", self.namespace) if self.namespace else ()))
        named = (part for part in (self.resource.plural, self.name, self.subresource) if part)
        return "/".join((*place, *named)) + self.rest

    def __str__(self) -> str:
        named = "/".join(part for part in (self.name, self.subresource) if part)
        return f"{self.verb} {self.resource.plural} {named}".strip()


class Transport:
    """Sends requests to one API server."""

    def __init__(self, connection: Connection, concurrency: int = CONCURRENCY) -> None:
        """Prepare a connection; it opens with the first request. Needs a running event loop."""
        self.connection = connection
        connection.configuration.connection_pool_maxsize = concurrency * 2
        connection.configuration.client_session_kwargs = session_options()
        self._client = ApiClient(connection.configuration)
        self._slots = asyncio.Semaphore(concurrency)
        self.on_answer: Callable[[str, str, int], None] = lambda verb, resource, code: None
        """Called as `on_answer(verb, resource, code)` after each attempt; code 0: no answer, or only a part of one."""
        self.on_break: Callable[[], None] = lambda: None
        """Called when the connection of a stream breaks off or falls silent after it was answered."""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def request(
        self,
        request: ApiRequest,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        urgent: bool = False,
    ) -> bytes:
        """Return the body of the answer. Raises ApiError."""
        for attempt in range(1 if urgent else MAX_RETRIES + 1):
            async with contextlib.nullcontext() if urgent else self._slots:
                code, content, retry_after = await self._attempt(request, query, body, headers)
            if code < 300:
                break
            if retry_after is None or urgent or attempt == MAX_RETRIES:
                raise error_of(code, content, str(request))
            await asyncio.sleep(retry_after)
        return content

    async def _attempt(
        self,
        request: ApiRequest,
        query: Mapping[str, str] | None,
        body: Body | None,
        headers: Mapping[str, str] | None,
    ) -> tuple[int, bytes, float | None]:
        """Return the code, the body, and the seconds after which the API server wants a retry, or None."""
        limits, code = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS, sock_connect=CONNECT_SECONDS), 0
        try:
            answer = await self._send(request, query, body, headers, limits)
            content, code = bytes(await answer.read()), int(answer.status)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise unanswered(request, error) from error
        finally:
            self.on_answer(request.verb, request.resource.plural, code)
        return code, content, retry_seconds(code, answer.headers.get("Retry-After"))

    async def lines(
        self, request: ApiRequest, query: Mapping[str, str] | None = None, *, silence_seconds: float | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a stream until the API server ends it. `silence_seconds`: longest time without a byte.

        Raises ApiError.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        code = 0
        try:
            try:
                answer = await self._send(request, query, None, {"Accept": _accept(request)}, limits)
                code = int(answer.status)
                content = await answer.read() if code >= 300 else b""
            finally:
                self.on_answer(request.verb, request.resource.plural, code)
            if code >= 300:
                raise error_of(code, content, str(request))
            async with contextlib.aclosing(_lines(request, answer.response)) as lines:
                async for line in lines:
                    yield line
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if code:
                self.on_break()
            raise unanswered(request, error) from error

    async def _send(
        self,
        request: ApiRequest,
        query: Mapping[str, str] | None,
        body: Body | None,
        headers: Mapping[str, str] | None,
        limits: aiohttp.ClientTimeout,
    ) -> Any:
        sent = {"Accept": _accept(request)} if headers is None else dict(headers)
        await self._client.update_params_for_auth(sent, [], ["BearerToken"], "", request.verb, None)
        url = self._client.configuration.host + request.path + (f"?{urlencode(query)}" if query else "")
        return await self._client.rest_client.request(
            _METHODS[request.verb], url, headers=sent, body=body, _request_timeout=limits
        )


async def _lines(request: ApiRequest, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    try:
        rest = b""
        async for chunk in response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > MAX_LINE:
                raise UnavailableError(f"a line of more than {MAX_LINE} bytes", request=str(request), code=200)
        if rest:
            yield rest
    finally:
        response.close()


def decoded(content: bytes) -> Json:
    """Return the JSON object in an answer."""
    body: Json = json.loads(content)
    return body


def unanswered(request: ApiRequest, error: BaseException) -> UnavailableError:
    """Return the error of a request without an answer."""
    silent = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    message = " ".join(str(error).split()) or silent
    return UnavailableError(message, request=str(request))


def retry_seconds(code: int, header: str | None) -> float | None:
    """Return the seconds until a retry, at most MAX_RETRY_SECONDS; None unless the API server asks for one.

    It asks with code 429 or 5xx and `header`, a Retry-After in seconds.
    """
    if (code != 429 and code < 500) or header is None or not header.strip().isdecimal():
        return None
    return min(float(header), MAX_RETRY_SECONDS)


def _accept(request: ApiRequest) -> str:
    return "*/*" if request.subresource in ("log", "proxy") else "application/json"
