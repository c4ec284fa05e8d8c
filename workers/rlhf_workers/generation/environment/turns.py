"""Turns of a response: whose tokens are whose, and what follows once an environment has answered.

Rule: pure. Who wrote a token is told by its log-probability (`NOT_SAMPLED`) and by nothing else, so a response that
moved, was journaled or was given back is read as it was. Turns are separated by answers, which are never empty.
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
    """What an environment said of one turn."""

    message: str
    """Its answer; empty where it is done, or answers by `messages`."""
    done: bool
    reward: float | None
    """None: this turn was given none."""
    metrics: dict[str, float]
    messages: tuple[dict[str, str], ...] = ()
    """Its answer as chat messages, in place of `message`: role and content of each."""


@dataclass(frozen=True)
class Written:
    """A response by who wrote it: as many answers as turns, the last of which may be missing."""

    turns: tuple[TokenArray, ...]
    answers: tuple[TokenArray, ...]


def written(tokens: TokenArray, log_probabilities: FloatArray) -> Written:
    """Return the turns of the policy in a response, and the answers between and after them."""
    ours = log_probabilities != NOT_SAMPLED
    edges = np.flatnonzero(ours[1:] != ours[:-1]) + 1
    parts = np.split(tokens, edges) if len(tokens) else []
    return Written(tuple(parts[::2]), tuple(parts[1::2]))


def episode_of(steps: Sequence[AnsweredTurn]) -> Episode:
    """Return what an environment said of a whole response: rewards and metrics of its steps are added up."""
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
    """Return what follows a turn that was answered: the request that goes on after the answer, or the whole response.

    `response` ends with the turn, and `answer` is what the last of `steps` wrote. A response that the environment did
    not end, but its last turn, the turns or the tokens that are allowed, was cut: its finish reason is length.
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
