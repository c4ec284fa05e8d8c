"""Splits a response into turns and answers, and builds its continuation after an answer. Pure.

Rule: the log-probability of a token (`NOT_SAMPLED`) marks who wrote it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf_common.samples import (
    NOT_SAMPLED,
    Episode,
    FloatArray,
    ResponsePart,
    SampleRequest,
    TokenArray,
    VersionSpan,
)


@dataclass(frozen=True)
class AnsweredTurn:
    """An environment's step after one turn."""

    message: str
    """Answer text; it may be empty if the episode is done, or if the answer is in `messages`."""
    done: bool
    reward: float | None
    """Reward of this turn; None without one."""
    metrics: dict[str, float]
    messages: tuple[dict[str, str], ...] = ()
    """Answer as chat messages (role and content) in place of `message`."""


@dataclass(frozen=True)
class Written:
    """A response split by author: as many answers as turns, or one less."""

    turns: tuple[TokenArray, ...]
    answers: tuple[TokenArray, ...]


def written(tokens: TokenArray, log_probabilities: FloatArray) -> Written:
    """Return the policy's turns in a response, and the answers between and after them."""
    ours = log_probabilities != NOT_SAMPLED
    edges = np.flatnonzero(ours[1:] != ours[:-1]) + 1
    parts = np.split(tokens, edges) if len(tokens) else []
    return Written(tuple(parts[::2]), tuple(parts[1::2]))


def episode_of(steps: Sequence[AnsweredTurn]) -> Episode:
    """Return the episode of a whole response, with rewards and metrics of its steps added up."""
    rewards = [step.reward for step in steps if step.reward is not None]
    metrics: dict[str, float] = {}
    for step in steps:
        for name, value in step.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
    return Episode(len(steps), sum(rewards) if rewards else None, metrics)


def following(
    request: SampleRequest,
    response: ResponsePart,
    answer: TokenArray,
    steps: Sequence[AnsweredTurn],
    max_turns: int,
    version: int,
) -> SampleRequest | ResponsePart:
    """Return the request that continues after an answer, or the whole response.

    `response` ends with the turn, and `answer` has the tokens of the last of `steps`.
    """
    longest = request.max_response_tokens
    if steps[-1].done and response.finish_reason == "stop":
        return replace(response, episode=episode_of(steps))
    cut = response.finish_reason == "length" or len(steps) >= max_turns
    if steps[-1].done or cut or len(response.tokens) + len(answer) >= longest:
        return replace(response, finish_reason="length", episode=episode_of(steps))
    unsampled = np.full(len(answer), NOT_SAMPLED, np.float32)
    return replace(
        request,
        tokens=np.concatenate([response.tokens, answer]),
        log_probabilities=np.concatenate([response.log_probabilities, unsampled]),
        versions=_with_span(response.versions, VersionSpan(version, len(answer))),
    )


def _with_span(spans: tuple[VersionSpan, ...], more: VersionSpan) -> tuple[VersionSpan, ...]:
    if spans and spans[-1].version == more.version:
        return (*spans[:-1], VersionSpan(more.version, spans[-1].tokens + more.tokens))
    return (*spans, more)
