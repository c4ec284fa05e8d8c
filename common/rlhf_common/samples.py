"""The data of a sample for coordinator and workers, such as its key, lease, request and response.

Rule: plain data; must never import protobuf.
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
"""Empty: unfinished. stop: ended by a stop token or text, or by its environment. length: cut at a limit."""
NOT_SAMPLED: Final = math.inf
"""Log-probability of a token that the environment wrote instead of the policy."""

FIRST_EVALUATION_SAMPLE: Final = 1 << 25
"""Number of the first evaluation sample in messages. It exceeds the numbers of samples of a batch."""
FIRST_AHEAD_SAMPLE: Final = 1 << 26
"""Number, in messages, of the draft of an iteration's first sample that is decoded ahead
(`spec.generation.speculation.ahead`). It exceeds the numbers of evaluation samples."""


def is_ahead(sample: int) -> bool:
    """Return whether the number of a sample in messages is that of a draft decoded ahead."""
    return sample >= FIRST_AHEAD_SAMPLE


class SampleKey(NamedTuple):
    """Name of a sample under one lease; each later lease of the sample has a higher `attempt`."""

    iteration: int
    sample: int
    """Number inside the iteration, from 0; those of evaluations begin at FIRST_EVALUATION_SAMPLE, those of drafts
    ahead at FIRST_AHEAD_SAMPLE."""
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The worker that has a sample, or one of its tasks, and the attempt that fences it."""

    worker: str
    attempt: int


class VersionSpan(NamedTuple):
    """Consecutive response tokens with one weight version."""

    version: int
    """Weight version: 0 is the initial model, i + 1 the result of training iteration i."""
    tokens: int
    """Number of tokens."""


class Drawing(IntEnum):
    """Sampling method of a sample; numbers are those of the messages."""

    ROLLOUT = 0
    """Settings of spec.rollout."""
    GREEDY = 1
    """The most probable token."""
    EVALUATION = 2
    """Settings of spec.rollout with the temperature of spec.evaluation."""


@dataclass(frozen=True)
class SampleRequest:
    """A sample to decode, from its start or from the tokens that it already has."""

    key: SampleKey
    prompt: TokenArray
    """int32 [p], p >= 1."""
    random_key: int
    """Source of randomness, 64 bits."""
    max_response_tokens: int
    """Maximum response tokens in total, including `tokens`."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 [k]: response tokens already decoded."""
    log_probabilities: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    """float32 [k], as in `ResponsePart`."""
    versions: tuple[VersionSpan, ...] = ()
    """Versions of `tokens`; their counts sum to k."""
    drawing: Drawing = Drawing.ROLLOUT
    record: str = ""
    """JSON text of the prompt's object, set if an environment needs it for its reset."""


@dataclass(frozen=True)
class Episode:
    """The environment's results for a response of several turns."""

    turns: int
    """Number of the policy's turns."""
    reward: float | None
    """Total reward of all turns; None if no turn had one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers by name."""


@dataclass(frozen=True)
class ResponsePart:
    """Response tokens of a sample from `offset` on; with offset 0 and a finish reason, a whole response."""

    key: SampleKey
    offset: int
    tokens: TokenArray
    """int32 [n]."""
    log_probabilities: FloatArray
    """float32 [n], natural log, before top-p and top-k; NOT_SAMPLED for tokens that an environment wrote. A temperature
    above 0 divides the logits first, unless the sample is greedy.
    """
    versions: tuple[VersionSpan, ...]
    """Versions of `tokens`; their counts sum to n."""
    finish_reason: FinishReason = ""
    """Empty while the response is unfinished."""
    episode: Episode | None = None
    """Set for a whole response with an environment."""


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
    """JSON text of the prompt's object."""
    finish_reason: FinishReason = ""
    """How the response ended; empty if unknown."""
    fields: Mapping[str, FloatArray] = field(default_factory=dict)
    """Fields from other tasks that its tasks need, by name, float32 [n] or [1]."""
    episode: Episode | None = None
    """Set for a response with an environment."""

    @property
    def tokens(self) -> TokenArray:
        """Prompt and response, int32 [p + n]."""
        return np.concatenate([self.prompt, self.response])

    @property
    def length(self) -> int:
        """Number of tokens of prompt and response, p + n."""
        return len(self.prompt) + len(self.response)
