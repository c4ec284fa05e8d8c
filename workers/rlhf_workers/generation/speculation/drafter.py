"""Interface between drafters, which guess a sample's next tokens, and the code that chooses and verifies guesses.

A drafter implements `Drafter` and, for more abilities, the Protocols below; `drafter_registry` finds it. A drafter must
never store tokens of an ended sample or group beyond its stated bound, nor trust tokens that other workers sent.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray

MAX_DRAFT: Final = 16
"""Maximum tokens drafted for one sample at once; the schema's bound of `speculation.maxTokens`."""
MATCHES: Final = 16
"""Number of values of `Draft.match`."""


class DraftRequest(NamedTuple):
    """A sample whose next tokens are to be guessed."""

    key: SampleKey
    tokens: TokenArray
    """The prompt and the response so far, int32 [p + k]."""
    prompt_length: int
    """Prompt length p, at least 1."""
    longest: int
    """Maximum useful tokens, 0 .. MAX_DRAFT."""


class Draft(NamedTuple):
    """A drafter's guess for one request."""

    tokens: TokenArray
    """Guessed tokens, int32 [0 .. longest]; empty: no guess."""
    match: int
    """Class of the guess's basis, 0 .. MATCHES - 1; acceptance is learned by drafter, match and position."""


class PromptGroup(NamedTuple):
    """The samples of one prompt in one iteration, which are siblings of each other."""

    iteration: int
    prompt: int
    """Index of the prompt in the iteration's batch, from 0: sample // samples per prompt."""

    @classmethod
    def for_sample(cls, key: SampleKey, samples_per_prompt: int) -> "PromptGroup":
        """Return the group of a sample."""
        return cls(key.iteration, key.sample // samples_per_prompt)


class SampleSource(NamedTuple):
    """A sample with known tokens: of the group's iteration, or of an earlier one with the same prompt."""

    iteration: int
    sample: int


def tokens_right(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens at the start of a draft equal the drawn tokens."""
    pairs = list(zip(draft, drawn, strict=False))
    return next((place for place, (said, token) in enumerate(pairs) if said != token), len(pairs))


@runtime_checkable
class Drafter(Protocol):
    """Guesses next tokens. Not thread-safe."""

    name: str
    """Name as in `spec.generation.speculation.drafters`."""

    def begin(self, request: SampleRequest) -> None:
        """Register a sample that is decoded here from now on, with its known tokens."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Add tokens, int32 [n], that the policy drew for a registered sample."""

    def end(self, key: SampleKey) -> None:
        """Remove a sample that finished or was withdrawn; ignore an unknown one."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one guess per request, in order."""


# ------------------------------------------------------------ optional abilities of a drafter, found by isinstance


@runtime_checkable
class LearnsSiblings(Protocol):
    """A drafter that learns from responses to the same prompt on other workers, or in an earlier epoch."""

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Learn tokens, int32 [n], of `source` from response position `offset` on; ignore known ones.

        `weight`, above 0 and at most 1, is relative to tokens of samples decoded here.
        """

    def forget(self, group: PromptGroup) -> None:
        """Drop everything learned of a group; ignore an unknown one."""

    def age(self) -> None:
        """Reduce the weight of everything learned so far: the policy has new weights."""


@runtime_checkable
class TakesWeights(Protocol):
    """A drafter with its own weights, which may be trained with the policy's."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replace all weights; return bytes. Raises WorkError WeightsMismatch, before any change, if they do not
        match."""
