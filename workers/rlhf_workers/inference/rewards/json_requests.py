"""Sends JSON POST requests to one address, for reward endpoints and judges.

Rule: a request that has begun ends within its time-out; a bad status, a body that is no JSON, or one that is too long
is a failure. Values of Secrets are removed from quoted answers.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import httpx

from rlhf_common.json_document import parse_json
from rlhf_workers.inference.rewards.reward_settings import header_values, redacted
from rlhf_workers.inference.rewards.reward_source import RewardError
from rlhf_workers.user_code.code_settings import CodeSettings

REQUESTS: Final = 32
"""Maximum concurrent requests."""
SHOWN_CHARACTERS: Final = 200
"""Maximum characters of a wrong answer in the message."""
BODY_BYTES: Final = 1024 * 1024
"""Maximum bytes of an answer's body."""


class RefusedRequestError(RewardError):
    """The server answered with another status than 200; `answer` is its text, without the values of Secrets."""

    answer = ""


class JsonRequests:
    """A client for one address."""

    def __init__(self, url: str, timeout_seconds: float, settings: CodeSettings, field: str, timeout: str) -> None:
        """Take headers from `settings`; WorkError when a header cannot be sent.

        `field`: manifest path of `url` and `headers`. `timeout`: that of the time-out.
        """
        self.field = f"{field}.url"
        self._url, self._timeout_field = url, timeout
        self._headers = header_values(settings, f"{field}.headers")
        self._secrets = settings.secrets
        self._timeout = timeout_seconds
        self._requests = asyncio.Semaphore(REQUESTS)
        self._client: httpx.AsyncClient | None = None

    def open(self) -> None:
        """Create the client; it connects later, as a server may start after the worker."""
        limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=REQUESTS)
        self._client = httpx.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False, headers=self._headers)

    async def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            await self._client.aclose()

    async def post(self, content: Mapping[str, Any]) -> Any:
        """Return the JSON of the answer; RewardError if there is none, RefusedRequestError if the status is not 200."""
        async with self._requests:
            try:
                status, body = await asyncio.wait_for(self._post(content), self._timeout)
            except (TimeoutError, httpx.TimeoutException):
                message = f"{self._url} did not answer within {self._timeout:g} s"
                raise RewardError("RewardTimeout", message, self._timeout_field) from None
            except httpx.HTTPError as error:
                reason = self.redacted(str(error)) or type(error).__name__
                raise RewardError(
                    "RewardUnreachable", f"{self._url} cannot be reached: {reason}", self.field
                ) from error
        if status != httpx.codes.OK:
            message = f"{self._url} answered with status {status}: {self._shown_text(body)}"
            refused = RefusedRequestError("RewardInvalid", message, self.field)
            refused.answer = self.redacted(body.decode(errors="replace"))
            raise refused
        try:
            return parse_json(body)
        except ValueError:
            raise self.invalid(f"no JSON: {self._shown_text(body)}") from None

    def redacted(self, text: str) -> str:
        """Return a text without the values of Secrets."""
        return redacted(text, self._secrets)

    def shown(self, answer: object) -> str:
        """Return the beginning of an answer, for a message."""
        return self.redacted(json.dumps(answer))[:SHOWN_CHARACTERS]

    def _shown_text(self, body: bytes) -> str:
        return self.redacted(body.decode(errors="replace"))[:SHOWN_CHARACTERS]

    def invalid(self, problem: str) -> RewardError:
        """Return the failure for a wrong answer."""
        return RewardError("RewardInvalid", f"{self._url} answered with {problem}", self.field)

    async def _post(self, content: Mapping[str, Any]) -> tuple[int, bytes]:
        assert self._client is not None
        async with self._client.stream("POST", self._url, json=content) as response:
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > BODY_BYTES:
                    message = f"{self._url} answered with more than {BODY_BYTES} bytes"
                    raise RewardError("RewardInvalid", message, self.field)
            return response.status_code, body
