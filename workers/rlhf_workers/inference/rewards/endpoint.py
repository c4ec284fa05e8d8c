"""Rewards from an HTTP endpoint, by POST requests.

Request: {"samples": [{prompt, response, record, finish_reason, response_tokens}]}. Answer: {"rewards": [number | null],
"metrics": [{name: number}]}; metrics are optional. Rule: a list of another length is a failure.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rewards import GivenReward, RewardEndpoint
from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.rewards.json_requests import JsonRequests
from rlhf_workers.inference.rewards.reward_settings import reward_settings
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError, described, judgment
from rlhf_workers.user_code.code_settings import NO_SETTINGS, CodeSettings


def load_reward(entry: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> "EndpointReward":
    """Return the source of a reward's `endpoint`; it needs no device."""
    endpoint = entry.reward.endpoint
    assert endpoint is not None
    headers = f"{entry.field}.endpoint.headers"
    settings = reward_settings(endpoint.headers, headers, spec)
    return EndpointReward(endpoint, entry.reward.timeout_seconds, settings, field=entry.field)


class EndpointReward:
    """A RewardSource over HTTP."""

    def __init__(
        self,
        endpoint: RewardEndpoint,
        timeout_seconds: float,
        settings: CodeSettings = NO_SETTINGS,
        *,
        field: str,
    ) -> None:
        """`settings`: headers of the endpoint. `field`: manifest field of the reward.

        Raises WorkError for an invalid header.
        """
        timeout = f"{field}.timeoutSeconds"
        self._server = JsonRequests(endpoint.url, timeout_seconds, settings, f"{field}.endpoint", timeout)

    async def start(self) -> None:
        """See RewardSource."""
        self._server.open()

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the reward of one sample, from one request."""
        return (await self.score_group([sample]))[0]

    async def score_group(self, samples: Sequence[ScoringSample]) -> list[Judgment]:
        """Return the rewards of several samples, from one request."""
        answer = await self._server.post({"samples": [described(sample) for sample in samples]})
        return self._rewards(answer, len(samples))

    async def close(self) -> None:
        """Close connections."""
        await self._server.close()

    def _rewards(self, answer: Any, count: int) -> list[Judgment]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else None
        if not isinstance(rewards, list):
            raise self._server.invalid(f'no list under "rewards": {self._server.shown(answer)}')
        if len(rewards) != count:
            raise self._server.invalid(f"{len(rewards)} rewards for {count} sample{'s' if count > 1 else ''}")
        metrics = answer.get("metrics", [{}] * count)
        if not isinstance(metrics, list) or len(metrics) != count:
            raise self._server.invalid(f'no list of {count} under "metrics": {self._server.shown(answer)}')
        return [self._judgment(value, beside) for value, beside in zip(rewards, metrics, strict=True)]

    def _judgment(self, value: Any, metrics: Any) -> Judgment:
        plain = value is None or isinstance(value, int | float)
        if isinstance(metrics, dict):  # before a long name is cut, which leaves a part of a secret
            metrics = {self._server.redacted(name): each for name, each in metrics.items()}
        try:
            return judgment(value if plain else self._server.redacted(str(value)), metrics, self._server.field)
        except RewardError as error:
            message = self._server.redacted(error.failure.message)
            raise RewardError("RewardInvalid", message, self._server.field) from None
