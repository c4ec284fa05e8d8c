"""Rewards from a language model that judges, at an endpoint or on inference workers.

An endpoint has OpenAI's format of chats or completions. Responses are rated, or those to a prompt are compared in
pairs.
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Final

import torch

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.judge import Judge
from rlhf_api.job.rewards import GivenReward
from rlhf_common.names import ExitCode
from rlhf_common.samples import ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards import judge_model
from rlhf_workers.inference.rewards.json_requests import JsonRequests, RefusedRequestError
from rlhf_workers.inference.rewards.judge_answers import (
    UnaskableError,
    UnreadableAnswerError,
    first_probabilities,
    mean_wins,
    of_both_orders,
    question,
    worth,
    written,
)
from rlhf_workers.inference.rewards.reward_settings import reward_settings
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError
from rlhf_workers.user_code.code_settings import NO_SETTINGS, CodeSettings

TOP: Final = 20
"""Number of likeliest tokens requested: each of up to ten ratings has two forms, with and without a blank before it."""
_LOGPROBS: Final = "logprobs"


def load_reward(
    entry: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device
) -> "JudgeAtEndpoint | judge_model.JudgeModelScorer | judge_model.JudgeModelComparer":
    """Return the source of a reward's `judge`; WorkError if it cannot be loaded or has nothing to compare."""
    judge, field = entry.reward.judge, f"{entry.field}.judge"
    assert judge is not None
    if judge.method == "Pairwise" and samples_per_prompt(spec) < 2:
        message = f"{field}.method: Pairwise compares responses to a prompt, and the algorithm samples one: use Direct"
        raise WorkError("RewardInvalid", message, field=f"{field}.method", exit_code=ExitCode.USAGE)
    if judge.endpoint is None:
        return judge_model.load(judge, field, spec, device, home)
    headers = f"{field}.endpoint.headers"
    settings = reward_settings(judge.endpoint.headers, headers, spec)
    return JudgeAtEndpoint(judge, entry.reward.timeout_seconds, settings, field=entry.field)


class JudgeAtEndpoint:
    """A RewardSource that rates responses, or compares the responses of a group."""

    def __init__(
        self, judge: Judge, timeout_seconds: float, settings: CodeSettings = NO_SETTINGS, *, field: str
    ) -> None:
        """`settings`: headers. `field`: manifest field of the reward. WorkError for an invalid header."""
        assert judge.endpoint is not None
        self._judge, self._endpoint = judge, judge.endpoint
        self._template, self._read = f"{field}.judge.template", f"{field}.judge.read"
        path, timeout = f"{field}.judge.endpoint", f"{field}.timeoutSeconds"
        self._server = JsonRequests(self._endpoint.url, timeout_seconds, settings, path, timeout)

    async def start(self) -> None:
        """See RewardSource."""
        self._server.open()

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the rating of a response, -1..1."""
        return Judgment(await self._ask(sample, response=sample.response_text))

    async def score_group(self, samples: Sequence[ScoringSample]) -> list[Judgment]:
        """Return each response's mean probability, 0..1, of being better than another response to the prompt.

        A response without others abstains.
        """
        pairs = list(combinations(range(len(samples)), 2))
        better = await asyncio.gather(*(self._first_is_better(samples[i], samples[j]) for i, j in pairs))
        return [Judgment(reward) for reward in mean_wins(len(samples), dict(zip(pairs, better, strict=True)))]

    async def close(self) -> None:
        """Close connections."""
        await self._server.close()

    async def _first_is_better(self, sample: ScoringSample, other: ScoringSample) -> float:
        """Return the probability that the first is better, averaged over both orders."""
        as_first, as_second = await asyncio.gather(
            self._ask(sample, first=sample.response_text, second=other.response_text),
            self._ask(sample, first=other.response_text, second=sample.response_text),
        )
        return of_both_orders(as_first, as_second)

    async def _ask(self, sample: ScoringSample, **responses: str) -> float:
        try:
            text = question(self._judge, sample, **responses)
        except UnaskableError as error:
            raise RewardError("RewardInvalid", str(error), self._template) from error
        try:
            answer = await self._server.post(self._request(text))
        except RefusedRequestError as error:
            if self._judge.read == "Answer" or _LOGPROBS not in error.answer:
                raise
            remedy = f"set {self._read} to Answer, or let the server give {TOP} logprobs (vLLM: --max-logprobs {TOP})"
            raise RewardError("RewardInvalid", f"{error}; {remedy}", self._read) from error
        try:
            choice = _choice(answer)
            if self._judge.read == "Answer":
                return written(self._judge, _text(choice))
            return worth(self._judge, first_probabilities(choice))
        except UnreadableAnswerError as error:
            raise self._server.invalid(f"{self._server.redacted(str(error))}: {self._server.shown(answer)}") from error

    def _request(self, text: str) -> dict[str, Any]:
        chat, reads = self._endpoint.api == "Chat", self._judge.read == "Answer"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        limits = {"temperature": 0, "max_tokens": self._judge.answer_tokens if reads else 1}
        if reads:
            return {"model": self._endpoint.model, **asked, **limits}
        shown = {"logprobs": True, "top_logprobs": TOP} if chat else {"logprobs": TOP}
        return {"model": self._endpoint.model, **asked, **limits, **shown}


def _choice(answer: Any) -> Mapping[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UnreadableAnswerError('it has no "choices"')
    return choices[0]


def _text(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str):
        raise UnreadableAnswerError("its choice has no text")
    return text
