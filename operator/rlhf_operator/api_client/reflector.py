"""Lists the objects of one kind, then watches them from the version of the list, until cancelled.

A stream that breaks off or is silent is reopened at the last received version. After 410 Gone it lists again.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from rlhf_operator.api_client.client import PAGE
from rlhf_operator.api_client.errors import ApiError, MissingError
from rlhf_operator.api_client.resources import Resource
from rlhf_operator.api_client.transport import ApiRequest, Transport, decoded

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 300
"""Seconds after which the API server ends a watch, plus up to a quarter."""
SILENCE_SECONDS: Final = 75.0
"""Seconds without a byte before a watch is reopened; the API server sends a bookmark every minute."""
FIRST_BACK_OFF_SECONDS: Final = 0.5
LAST_BACK_OFF_SECONDS: Final = 30.0
GONE: Final = 410


class ReflectorConsumer(Protocol):
    """Receiver of a reflector's objects. Its methods must not raise."""

    def take(self, event: Mapping[str, Any]) -> None:
        """Accept one object of a list (`type` is None) or one event of the watch."""

    def listed(self) -> None:
        """Note that a list is complete, the first or a later one."""

    def alive(self) -> None:
        """Note that the API server sent an event or a bookmark."""


class Reflector:
    """The objects of one kind in one namespace or all; with `labels`, those that this selector matches."""

    def __init__(
        self,
        transport: Transport,
        resource: Resource,
        namespace: str | None,
        consumer: ReflectorConsumer,
        labels: str = "",
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` returns numbers from 0 to 1."""
        self._transport, self._resource, self._namespace = transport, resource, namespace
        self._consumer, self._jitter = consumer, jitter
        self._selector = {"labelSelector": labels} if labels else {}
        self._version = ""
        """Version from which the watch continues; empty if a list is needed first."""
        self._failures = 0

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                heard = await self._watch()
                # A stream that ends at once without an event counts as a failure.
                failed = not heard and time.monotonic() - began < 1.0
            except MissingError as error:
                failed = not self._version or error.code != GONE or time.monotonic() - began < 1.0
                self._note(error, failed=failed)
                self._version = ""
            except ApiError as error:
                failed = True
                self._note(error, failed=True)
            except Exception:
                # An answer cannot be processed. The next list returns what this stream missed.
                failed, self._version = True, ""
                log.exception("the watch of %s is opened again", self._resource.plural)
            self._failures = self._failures + 1 if failed else 0
            if failed:
                await asyncio.sleep(self.back_off())

    def back_off(self) -> float:
        """Return the seconds to wait after the latest failure: half to all of a delay that doubles each time, up to
        LAST_BACK_OFF_SECONDS.
        """
        delay: float = min(LAST_BACK_OFF_SECONDS, FIRST_BACK_OFF_SECONDS * 2 ** min(self._failures - 1, 16))
        return delay * (0.5 + self._jitter() / 2)

    def _note(self, error: ApiError, *, failed: bool) -> None:
        log.log(
            logging.WARNING if failed else logging.INFO, "%s cannot be watched on: %s", self._resource.plural, error
        )

    async def _list(self) -> None:
        request = ApiRequest("list", self._resource, self._namespace)
        query = {"limit": str(PAGE)} | self._selector
        while True:
            page = decoded(await self._transport.request(request, query, headers={"Accept": "application/json"}))
            kind, version = str(page.get("kind", "")).removesuffix("List"), page.get("apiVersion")
            for item in page.get("items") or ():
                # The API server sends these once for all items.
                item.setdefault("kind", kind)
                item.setdefault("apiVersion", version)
                self._consumer.take({"type": None, "object": item})
            following, listed_at = page["metadata"].get("continue"), str(page["metadata"].get("resourceVersion") or "")
            del page
            if not following:
                self._version = listed_at
                self._consumer.listed()
                return
            query = {"limit": str(PAGE), "continue": following} | self._selector

    async def _watch(self) -> bool:
        """Follow one stream to its end; return whether it sent anything. Raises ApiError."""
        heard = False
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(WATCH_SECONDS * (1 + self._jitter() / 4))),
        }
        request = ApiRequest("watch", self._resource, self._namespace)
        stream = self._transport.lines(request, query | self._selector, silence_seconds=SILENCE_SECONDS)
        async with contextlib.aclosing(stream) as lines:
            async for line in lines:
                if not line.strip():
                    continue
                self._heard(json.loads(line))
                heard, self._failures = True, 0
        return heard

    def _heard(self, event: Mapping[str, Any]) -> None:
        """Process one line of the stream. Raises ApiError if the line says that the watch cannot continue."""
        kind, body = event["type"], event["object"]
        if kind == "ERROR":
            code, message = int(body.get("code") or 0), str(body.get("message"))
            error = MissingError if code == GONE else ApiError
            if code != GONE:
                self._version = ""
            raise error(message, request=f"watch {self._resource.plural}", code=code)
        self._consumer.alive()
        if kind != "BOOKMARK":
            self._consumer.take(event)
        version = (body.get("metadata") or {}).get("resourceVersion")
        if isinstance(version, str) and version:
            self._version = version
