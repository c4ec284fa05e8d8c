"""The vocabulary of a sample, one for coordinator and workers: its key, lease, request, response and version spans.

Rule: plain data of numpy arrays, without messages of the wire; one module on each side converts the two
(`rlhf_workers.sample_codec`, `rlhf_coordinator.storage.sample_codec`). Must never import protobuf.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
FinishReason = Literal["", "stop", "length"]
FINISH_REASONS: Final[tuple[FinishReason, ...]] = get_args(FinishReason)
"""Empty while a response is unfinished; stop: by a stop token or text, or by its environment; length: cut at what is
allowed at most."""
NOT_SAMPLED: Final = math.inf
"""Log-probability of a token that the policy did not draw, but its environment wrote. No engine can give it (what
breaks is NaN or minus infinity), and no sum over it goes unnoticed."""

FIRST_EVALUATION_SAMPLE: Final = 1 << 25
"""Number of the first sample of an evaluation in messages: above every sample of a batch (at most 2^20), and together
with the most of an evaluation (2^24) within 31 bits."""


class SampleKey(NamedTuple):
    """Name of a sample under one lease; each lease of the sample has a higher `attempt`."""

    iteration: int
    sample: int
    """0 .. batch size - 1 inside the iteration."""
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The worker that has a sample, or one of its tasks, and the attempt that fences it."""

    worker: str
    attempt: int


class VersionSpan(NamedTuple):
    """Consecutive response tokens that were sampled with one weight version."""

    version: int
    """0 is the initial model, i + 1 the outcome of training iteration i."""
    tokens: int
    """Number of them."""


class Drawing(IntEnum):
    """How the tokens of a sample are drawn; numbers are those of the wire."""

    ROLLOUT = 0
    """By spec.rollout."""
    GREEDY = 1
    """The most probable token."""
    EVALUATION = 2
    """By spec.rollout, but at the temperature of spec.evaluation."""


@dataclass(frozen=True)
class SampleRequest:
    """A sample to decode, from its start or from the tokens that it already has."""

    key: SampleKey
    prompt: TokenArray
    """int32 [p], p >= 1."""
    random_key: int
    """64 bits; with the response position, the only source of randomness."""
    max_response_tokens: int
    """Response tokens in total, those in `tokens` included."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [k]: response tokens already decoded."""
    log_probabilities: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32 [k], as in `ResponsePart`."""
    versions: tuple[VersionSpan, ...] = ()
    """Their tokens sum to k."""
    drawing: Drawing = Drawing.ROLLOUT
    record: str = ""
    """The prompt's JSON object, as text, where an environment is reset by it."""


@dataclass(frozen=True)
class Episode:
    """What an environment said of a response of several turns."""

    turns: int
    """Of the policy."""
    reward: float | None
    """Of all turns together; None: no turn was given one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers beside the reward, by name."""


@dataclass(frozen=True)
class ResponsePart:
    """Response tokens of a sample from `offset` on; with offset 0 and a finish reason, a whole response."""

    key: SampleKey
    offset: int
    tokens: TokenArray
    """int32 [n]."""
    log_probabilities: FloatArray
    """float32 [n], natural log, under softmax(logits / temperature) before top-p and top-k; NOT_SAMPLED of tokens that
    an environment wrote."""
    versions: tuple[VersionSpan, ...]
    """Their tokens sum to n."""
    finish_reason: FinishReason = ""
    """Empty while the response is unfinished."""
    episode: Episode | None = None
    """Of a whole response whose turns an environment answered."""


@dataclass(frozen=True)
class ScoringSample:
    """A prompt with its whole response, to be scored."""

    key: SampleKey
    prompt: TokenArray
    """int32 [p], p >= 1."""
    response: TokenArray
    """int32 [n], n >= 1."""
    prompt_text: str
    response_text: str
    record: str
    """The prompt's JSON object, as text."""
    finish_reason: FinishReason = ""
    """How the response ended; empty where nobody says it."""
    fields: Mapping[str, FloatArray] = field(default_factory=dict)
    """Fields that its tasks need and other tasks made, by name, float32 [n] or [1]."""
    episode: Episode | None = None
    """Of a response whose turns an environment answered."""

    @property
    def tokens(self) -> TokenArray:
        """Prompt and response, int32 [p + n]."""
        return np.concatenate([self.prompt, self.response])

    @property
    def length(self) -> int:
        """Tokens of prompt and response, p + n."""
        return len(self.prompt) + len(self.response)
