"""A bare client of the API server: minimal Python for many requests, as the raw limit for comparison.

`posts` and `applies` make bodies before they are timed. Rule: no retries; a failed request ends the run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
import yaml

from rlhf_operator.api_client.resources import CORE_RESOURCES

Json = dict[str, Any]
APPLY = {"fieldManager": "bare-client", "force": "true"}
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
TIMEOUT = aiohttp.ClientTimeout(total=120)


class BareClient:
    """Sends requests as the cluster's administrator."""

    def __init__(self, kubeconfig: Path, connections: int) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server = cluster["server"]
        self._ssl = ssl.create_default_context(cadata=authority)
        with tempfile.NamedTemporaryFile() as file:
            for part in ("client-certificate-data", "client-key-data"):
                file.write(base64.b64decode(user[part]) + b"\n")
            file.flush()
            self._ssl.load_cert_chain(file.name)
        self._connections = connections

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=self._connections, ssl=self._ssl)
        self._session = aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, body: bytes | None = None, **how: Any) -> bytes:
        """Return the answer's content. Raises RuntimeError with the API server's message."""
        async with self._session.request(method, self._server + path, data=body, **how) as answer:
            content = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {content.decode()[:500]}")
            return content

    async def create(self, manifest: Json) -> Json:
        """POST an object; return the stored object."""
        body, kind, namespace = json.dumps(manifest).encode(), manifest["kind"], manifest["metadata"]["namespace"]
        headers = {"Content-Type": "application/json"}
        document: Json = json.loads(await self.ask("POST", place(kind, namespace), body, headers=headers))
        return document

    async def all_at_once(self, asks: Iterable[Callable[[], Awaitable[Any]]], concurrency: int) -> float:
        """Send requests, `concurrency` at a time; return the seconds."""
        waiting = iter(asks)

        async def serve() -> None:
            for item in waiting:
                await item()

        begun = time.perf_counter()
        await asyncio.gather(*(serve() for _ in range(concurrency)))
        return time.perf_counter() - begun

    def posts(self, manifests: Sequence[Json]) -> list[Callable[[], Awaitable[bytes]]]:
        """Return one POST per object; like the operator, ask only for metadata in return."""
        headers = {"Content-Type": "application/json", "Accept": METADATA}
        asks: list[Callable[[], Awaitable[bytes]]] = []
        for manifest in manifests:
            path = place(manifest["kind"], manifest["metadata"]["namespace"])
            asks.append(partial(self.ask, "POST", path, json.dumps(manifest).encode(), headers=headers))
        return asks

    def applies(self, manifests: Sequence[Json]) -> list[Callable[[], Awaitable[bytes]]]:
        """Return one server-side apply per object."""
        headers = {"Content-Type": "application/apply-patch+yaml", "Accept": METADATA}
        asks: list[Callable[[], Awaitable[bytes]]] = []
        for manifest in manifests:
            path = f"{place(manifest['kind'], manifest['metadata']['namespace'])}/{manifest['metadata']['name']}"
            asks.append(partial(self.ask, "PATCH", path, json.dumps(manifest).encode(), headers=headers, params=APPLY))
        return asks

    async def count(self, kind: str, namespace: str) -> int:
        """Return the number of objects of a kind in a namespace, with one short request."""
        headers = {"Accept": METADATA_LIST}
        answer = json.loads(await self.ask("GET", f"{place(kind, namespace)}?limit=1", headers=headers))
        return len(answer.get("items") or []) + int(answer["metadata"].get("remainingItemCount") or 0)

    async def none(self, kind: str, namespace: str, field: str) -> bool:
        """Return whether no object matches the field selector."""
        params = {"limit": "1", "fieldSelector": field}
        content = await self.ask("GET", place(kind, namespace), params=params, headers={"Accept": METADATA_LIST})
        return not json.loads(content).get("items")

    async def delete_all(self, kind: str, namespace: str) -> None:
        """Delete all objects of a kind in a namespace, without grace period."""
        body = json.dumps({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}).encode()
        await self.ask("DELETE", place(kind, namespace), body, headers={"Content-Type": "application/json"})

    async def watch(self, kind: str, namespace: str, name: str) -> AsyncIterator[Json]:
        """Yield events of one object."""
        params = {"watch": "true", "fieldSelector": f"metadata.name={name}"}
        url = self._server + place(kind, namespace)
        async with self._session.get(url, params=params, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            async for line in answer.content:
                yield json.loads(line)


def place(kind: str, namespace: str) -> str:
    """Return the path of a kind in a namespace."""
    resource = CORE_RESOURCES[kind]
    return f"{resource.prefix}/namespaces/{namespace}/{resource.plural}"
