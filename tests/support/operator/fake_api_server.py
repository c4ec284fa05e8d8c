"""An API server in memory: resourceVersions, uids, server-side apply, patch, delete with preconditions, list and watch.

It serves HTTP on this machine, so that the client is tested too. It stores all bodies unchecked: it has no schemas, no
admission, no garbage collector and no controllers. `fail` makes requests fail like an API server.

Rule: every write goes through `put` or `drop`, gets the next resourceVersion and is an event of the watches.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from rlhf_operator.__main__ import RESOURCES
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.connection import Connection
from rlhf_operator.api_client.resources import CORE_RESOURCES, Resource
from rlhf_operator.api_client.transport import Transport

Json = dict[str, Any]
Place = tuple[str, str, str]
"""(path of the resource's group and version with its plural, namespace, name)."""
HISTORY: Final = 1000
"""Number of past events from which a watch may start; older versions are answered as gone."""


@dataclass
class InjectedFailure:
    """An answer that replaces the real one of some requests."""

    method: str
    part: str
    """Part of the path."""
    code: int
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    after: bool = False
    """Whether the request is carried out and only its answer is lost."""
    message: str = "injected"


class FakeApiServer:
    """One server; an async context manager."""

    def __init__(self) -> None:
        self.objects: dict[Place, Json] = {}
        self.requests: list[tuple[str, str]] = []
        """(method, path) of every request."""
        self.failures: list[InjectedFailure] = []
        self.before_answer: Callable[[str, str], None] = lambda method, path: None
        """Called with every request before it is carried out."""
        self.version = 100
        self.compacted = 0
        """Version below which watches may not start."""
        self._history: deque[tuple[int, Resource, Json]] = deque(maxlen=HISTORY)
        self.hold: asyncio.Event | None = None
        """Requests are not answered until this is set."""
        self.refuse_watches = False
        self._streams: set[asyncio.Task[Any]] = set()
        self._injected: dict[asyncio.Task[Any], list[bytes]] = {}

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**22)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        await self._runner.cleanup()

    def connection(self) -> Connection:
        """Return the connection to this server."""
        configuration = Configuration()
        configuration.host = self.url
        return Connection(configuration, context="fake")

    def client(self) -> KubernetesClient:
        """Return a client of this server; the caller closes it."""
        return KubernetesClient(Transport(self.connection()), RESOURCES)

    @contextlib.contextmanager
    def kubeconfig(self) -> Iterator[Path]:
        """Yield a kubeconfig of this server."""
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "nobody", "user": {"token": "none"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config"
            path.write_text(json.dumps(document))
            yield path

    def fail(
        self,
        method: str,
        part: str,
        code: int,
        times: int = 1,
        *,
        after: bool = False,
        message: str = "injected",
        **headers: str,
    ) -> None:
        """Answer the next `times` requests of a method whose path contains `part` with a code."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures.append(InjectedFailure(method, part, code, named, times, after, message))

    def put(self, kind: str, body: Json) -> Json:
        """Store an object under the next resourceVersion; return the stored object."""
        resource, meta = RESOURCES[kind], body["metadata"]
        place = _place(resource, meta.get("namespace", ""), meta["name"])
        previous = self.objects.get(place)
        self.version += 1
        stored = copy.deepcopy(body)
        stored["metadata"] |= {"resourceVersion": str(self.version)}
        stored["metadata"].setdefault("uid", previous["metadata"]["uid"] if previous else f"uid-{self.version}")
        stored["metadata"].setdefault("creationTimestamp", "2026-08-22T10:00:00Z")
        stored["metadata"].setdefault("generation", 1)
        if kind == "Pod":
            stored.setdefault("status", {"phase": "Pending"})
        self.objects[place] = stored
        self._tell("MODIFIED" if previous else "ADDED", resource, stored)
        return stored

    def drop(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object."""
        self._drop(RESOURCES[kind], _place(RESOURCES[kind], namespace, name))

    def get(self, kind: str, namespace: str, name: str) -> Json | None:
        """Return a stored object."""
        return self.objects.get(_place(RESOURCES[kind], namespace, name))

    def names(self, kind: str) -> list[str]:
        """Return the names of all objects of a kind."""
        prefix = _place(RESOURCES[kind], "", "")[0]
        return sorted(name for found, _, name in self.objects if found == prefix)

    def writes(self) -> list[tuple[str, str]]:
        """Return (method, path) of the requests that were writes."""
        return [request for request in self.requests if request[0] != "GET"]

    def compact(self) -> None:
        """Forget the history: watches of older versions are answered as gone."""
        self.compacted = self.version
        self._history.clear()

    def end_watches(self) -> None:
        """End every open watch, like a restarting API server."""
        for stream in self._streams:
            stream.cancel()

    def tell_watches(self, line: Json | bytes) -> None:
        """Write a line into every open watch."""
        for lines in self._injected.values():
            lines.append(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")

    @property
    def streams(self) -> int:
        """Return the number of open watches."""
        return len(self._streams)

    def _tell(self, event: str, resource: Resource, body: Json) -> None:
        self._history.append((self.version, resource, {"type": event, "object": copy.deepcopy(body)}))

    def _drop(self, resource: Resource, place: Place) -> None:
        self.version += 1
        gone = self.objects.pop(place)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", resource, gone)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        self.before_answer(request.method, request.path)
        if self.hold is not None:
            await self.hold.wait()
        lost: InjectedFailure | None = None
        for failure in self.failures:
            if failure.times and failure.method == request.method and failure.part in request.path:
                failure.times -= 1
                if not failure.after:
                    return _status(failure.code, "Injected", failure.message, **failure.headers)
                lost = failure
                break
        answer = await self._carry_out(request)
        return _status(lost.code, "Injected", "the answer is lost") if lost else answer

    async def _carry_out(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if request.path in ("/api", "/apis") or len(parts) == (2 if parts[0] == "api" else 3):
            return self._discovery(request.path)
        resource, namespace, name, subresource = _parsed(parts)
        if resource is None:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if not name and request.method == "GET":
            watched = request.query.get("watch") == "true"
            return await self._watch(request, resource) if watched else self._list(request, resource, namespace)
        body = json.loads(await request.read() or b"null")
        if request.method == "POST":
            return self._create(resource, body, dry="dryRun" in request.query)
        return self._answer_object(request.method, resource, _place(resource, namespace, name), subresource, body)

    def _answer_object(
        self, method: str, resource: Resource, place: Place, subresource: str, body: Any
    ) -> web.StreamResponse:
        stored = self.objects.get(place)
        if method == "GET":
            return web.json_response(stored) if stored else _not_found(resource, place)
        applies = method == "PATCH" and isinstance(body, dict)
        if stored is None and not (applies and "uid" not in body["metadata"] and not subresource):
            conflict = applies and "uid" in body["metadata"]
            return _status(409, "Conflict", "it is gone") if conflict else _not_found(resource, place)
        meta = stored["metadata"] if stored else {}
        sent = (body.get("preconditions") or body.get("metadata") or {}) if isinstance(body, dict) else {}
        for identity in ("uid", "resourceVersion"):
            if stored and sent.get(identity) not in (None, meta[identity]):
                return _status(409, "Conflict", f"the object has been modified: another {identity}")
        kind = next(kind for kind, found in RESOURCES.items() if found == resource)
        if method == "DELETE":
            if meta.get("finalizers"):
                grace = body.get("gracePeriodSeconds", 30)
                asked = {"deletionTimestamp": "2026-08-22T10:00:00Z", "deletionGracePeriodSeconds": grace}
                self.put(kind, {**(stored or {}), "metadata": meta | asked})
            else:
                self._drop(resource, place)
            return web.json_response({"metadata": meta})
        if isinstance(body, list):
            return web.json_response(self.put(kind, stored or {}))
        merged = copy.deepcopy(stored or {}) | {key: body[key] for key in body if key != "metadata"}
        if subresource == "status":
            merged = copy.deepcopy(stored or {}) | {"status": body["status"]}
        merged["metadata"] = meta | (body["metadata"] if not subresource else {})
        return web.json_response(self.put(kind, merged))

    def _create(self, resource: Resource, body: Json, *, dry: bool) -> web.StreamResponse:
        place = _place(resource, body["metadata"]["namespace"], body["metadata"]["name"])
        if place in self.objects:
            return _status(409, "AlreadyExists", f'{resource.plural} "{place[2]}" already exists')
        kind = next(kind for kind, found in RESOURCES.items() if found == resource)
        return web.json_response(body if dry else self.put(kind, body), status=201)

    def _list(self, request: web.Request, resource: Resource, namespace: str) -> web.StreamResponse:
        label = request.query.get("labelSelector", "").partition("=")[0]
        items = [
            body
            for (found, where, _), body in sorted(self.objects.items())
            if found == _place(resource, "", "")[0]
            and namespace in ("", where)
            and (not label or label in (body["metadata"].get("labels") or {}))
        ]
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or 0)
        page = items[start : start + limit] if limit else items
        following = str(start + limit) if limit and len(items) > start + limit else ""
        meta = {"resourceVersion": str(self.version), "continue": following}
        return web.json_response({"kind": "List", "apiVersion": resource.api_version, "metadata": meta, "items": page})

    async def _watch(self, request: web.Request, resource: Resource) -> web.StreamResponse:
        if self.refuse_watches:
            return _status(503, "Injected", "no watches now")
        since = int(request.query.get("resourceVersion") or self.version)
        answer = web.StreamResponse()
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        label = request.query.get("labelSelector", "")
        self._streams.add(task)
        self._injected[task] = []
        try:
            if since < self.compacted:
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                await _line(answer, {"type": "ERROR", "object": gone})
                return answer
            while True:
                for version, of, event in list(self._history):
                    if version > since and of == resource:
                        since = version
                        if not label or label in (event["object"]["metadata"].get("labels") or {}):
                            await _line(answer, event)
                for line in self._injected[task]:
                    await answer.write(line)
                self._injected[task].clear()
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            return answer
        finally:
            self._streams.discard(task)
            del self._injected[task]

    def _discovery(self, path: str) -> web.StreamResponse:
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        served = sorted(CORE_RESOURCES.values())
        if path == "/apis":
            groups = sorted({(resource.group, resource.version) for resource in served if resource.group})
            versions = [{"groupVersion": f"{group}/{version}", "version": version} for group, version in groups]
            return web.json_response(
                {
                    "groups": [
                        {"name": group, "versions": [each], "preferredVersion": each}
                        for (group, _), each in zip(groups, versions, strict=True)
                    ]
                }
            )
        listed = [
            {
                "name": resource.plural,
                "kind": next(kind for kind, found in CORE_RESOURCES.items() if found == resource),
                "singularName": "",
                "namespaced": True,
                "verbs": ["get", "list", "watch", "create", "patch", "update", "delete"],
            }
            for resource in served
            if resource.prefix == path
        ]
        if path == "/api/v1":
            # kopf checks whether namespaces exist.
            listed.append(listed[0] | {"name": "namespaces", "kind": "Namespace", "namespaced": False})
        return web.json_response({"resources": listed}) if listed else _status(404, "NotFound", "not found")


async def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("it never held")
        await asyncio.sleep(0.01)


def _place(resource: Resource, namespace: str, name: str) -> Place:
    return f"{resource.prefix}/{resource.plural}", namespace, name


def _parsed(parts: list[str]) -> tuple[Resource | None, str, str, str]:
    """Return resource, namespace, name and subresource of a path."""
    cut = 2 if parts[0] == "api" else 3
    prefix, rest = "/" + "/".join(parts[:cut]), parts[cut:]
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource, *_ = [*rest, "", "", ""]
    resource = next((item for item in RESOURCES.values() if (item.prefix, item.plural) == (prefix, plural)), None)
    return resource, namespace, name, subresource


def _status(code: int, reason: str, message: str, **headers: str) -> web.Response:
    body = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message}
    return web.json_response(body, status=code, headers=headers)


def _not_found(resource: Resource, place: Place) -> web.Response:
    return _status(404, "NotFound", f'{resource.plural} "{place[2]}" not found')


async def _line(answer: web.StreamResponse, event: Json) -> None:
    await answer.write(json.dumps(event).encode() + b"\n")
