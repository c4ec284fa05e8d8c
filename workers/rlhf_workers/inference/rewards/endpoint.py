"""Rewards by an HTTP endpoint: POST {"samples": [{prompt, response, record}]} -> {"rewards": [number | null]}.

One sample a request, so one sample's failure is its own; many requests at once over kept connections. Rule: a request
ends within the job's time-out; a bad status, a body that is no JSON, or a list of another length is a failure that says
so. Redirects are not followed, and proxies of the environment are not used. A header from a Secret is in no message,
not even where the endpoint's answer quotes it.
"""

import asyncio
import json
import os
from typing import Any, Final

import httpx
import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.models import RewardEndpoint
from rlhf_api.samples import ScoringSample
from rlhf_workers.inference.rewards.reward_settings import (
    NO_SETTINGS,
    RewardSettings,
    header_values,
    redacted,
    resolve_settings,
)
from rlhf_workers.inference.rewards.reward_source import (
    ENDPOINT_FIELD,
    HEADERS_FIELD,
    TIMEOUT_FIELD,
    RewardError,
    checked_reward,
)

REQUESTS: Final = 32
"""Requests in flight; a reward server batches what arrives together."""
SHOWN_CHARACTERS: Final = 200
"""Of a wrong body, in the message."""
BODY_BYTES: Final = 1024 * 1024
"""Longest body that is read; a reward is a few bytes."""


def load_reward(spec: RLHFJobSpec, device: torch.device, home: torch.device) -> "EndpointReward":
    """Return the source of `spec.models.reward.endpoint`; it needs no device."""
    reward = spec.models.reward
    assert reward.endpoint is not None
    settings = resolve_settings(reward.endpoint.headers, HEADERS_FIELD, reward, os.environ)
    return EndpointReward(reward.endpoint, reward.timeout_seconds, settings)


class EndpointReward:
    """A RewardSource over HTTP."""

    def __init__(
        self, endpoint: RewardEndpoint, timeout_seconds: float, settings: RewardSettings = NO_SETTINGS
    ) -> None:
        """`settings`: the endpoint's headers. WorkError when one cannot be sent."""
        self._url = endpoint.url
        self._headers = header_values(settings, HEADERS_FIELD)
        self._secrets = settings.secrets
        self._timeout = timeout_seconds
        self._requests = asyncio.Semaphore(REQUESTS)
        self._client: httpx.AsyncClient | None = None

    async def start(self) -> None:
        """Opens no connection yet: an endpoint may come up later than the worker."""
        limits = httpx.Limits(max_connections=REQUESTS, max_keepalive_connections=REQUESTS)
        self._client = httpx.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False, headers=self._headers)

    async def score(self, sample: ScoringSample) -> float | None:
        """Return the reward of one sample, by one request."""
        async with self._requests:
            try:
                status, body = await asyncio.wait_for(self._post(sample), self._timeout)
            except (TimeoutError, httpx.TimeoutException):
                message = f"{self._url} did not answer within {self._timeout:g} s"
                raise RewardError("RewardTimeout", message, TIMEOUT_FIELD) from None
            except httpx.HTTPError as error:
                message = (
                    f"{self._url} cannot be reached: {redacted(str(error), self._secrets) or type(error).__name__}"
                )
                raise RewardError("RewardUnreachable", message, ENDPOINT_FIELD) from error
        return self._reward(status, body)

    async def close(self) -> None:
        """Closes connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, sample: ScoringSample) -> tuple[int, bytes]:
        assert self._client is not None
        entry = {
            "prompt": sample.prompt_text,
            "response": sample.response_text,
            "record": json.loads(sample.record or "{}"),
        }
        async with self._client.stream("POST", self._url, json={"samples": [entry]}) as response:
            body = b""
            async for part in response.aiter_bytes():
                body += part
                if len(body) > BODY_BYTES:
                    message = f"{self._url} answered with more than {BODY_BYTES} bytes"
                    raise RewardError("RewardInvalid", message, ENDPOINT_FIELD)
            return response.status_code, body

    def _reward(self, status: int, body: bytes) -> float | None:
        shown = redacted(body.decode(errors="replace"), self._secrets)[:SHOWN_CHARACTERS]
        if status != httpx.codes.OK:
            raise self._invalid(f"status {status}: {shown}")
        try:
            answer: Any = json.loads(body)
        except ValueError:
            raise self._invalid(f"no JSON: {shown}") from None
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self._invalid(f'no list under "rewards": {shown}')
        if len(rewards) != 1:
            raise self._invalid(f"{len(rewards)} rewards for 1 sample")
        (value,) = rewards
        quotable = value if value is None or isinstance(value, int | float) else redacted(str(value), self._secrets)
        return checked_reward(quotable, ENDPOINT_FIELD)

    def _invalid(self, what: str) -> RewardError:
        return RewardError("RewardInvalid", f"{self._url} answered with {what}", ENDPOINT_FIELD)
