"""What a drafter is: the seam between what guesses a sample's next tokens and what verifies and chooses guesses.

A drafter implements `Drafter`, and the Protocols below it that name what it can do besides; `drafter_registry` says
how it is found. Rule: a guess costs time and never a token, so a drafter may be wrong, empty or stale, and is told of
samples by the thread that drives the engine. A drafter must never keep a token of a sample or group that has ended
beyond its stated bound, and never trust that what it learns from others is what the policy says.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

import torch

from rlhf_common.samples import SampleKey, SampleRequest, TokenArray

MAX_DRAFT: Final = 16
"""Tokens: the most that is drafted for one sample at once, as `spec.generation.speculation.maxTokens` allows."""
MATCHES: Final = 16
"""Values of `Draft.match`, 0 .. MATCHES - 1; acceptance is learned for each apart."""


class DraftRequest(NamedTuple):
    """A sample whose next tokens are to be guessed."""

    key: SampleKey
    tokens: TokenArray
    """int32 [p + k]: the prompt and the response so far."""
    prompt_length: int
    """p, at least 1."""
    longest: int
    """Most tokens that are of use, 0 .. MAX_DRAFT."""


class Draft(NamedTuple):
    """What a drafter guesses for one request."""

    tokens: TokenArray
    """int32 [0 .. longest]; empty: no guess."""
    match: int
    """What the guess rests on, 0 .. MATCHES - 1: acceptance is learned by drafter, match and position."""


class PromptGroup(NamedTuple):
    """The samples of one prompt in one iteration, which are siblings of each other."""

    iteration: int
    prompt: int
    """Place of the prompt in the iteration's batch, from 0: sample // samples per prompt."""

    @classmethod
    def for_sample(cls, key: SampleKey, samples_per_prompt: int) -> "PromptGroup":
        """Return the group that a sample belongs to."""
        return cls(key.iteration, key.sample // samples_per_prompt)


class SampleSource(NamedTuple):
    """The sample that learned tokens were drawn for: of the group's own iteration, or of an earlier epoch's."""

    iteration: int
    sample: int


def tokens_right(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens of a draft, from the first on, are those that were drawn in their places."""
    pairs = list(zip(draft, drawn, strict=False))
    return next((place for place, (said, token) in enumerate(pairs) if said != token), len(pairs))


@runtime_checkable
class Drafter(Protocol):
    """Guesses next tokens. Not thread-safe."""

    name: str
    """As in `spec.generation.speculation.drafters`."""

    def begin(self, request: SampleRequest) -> None:
        """Takes note that a sample is decoded here from now on, with the tokens that it already has."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Takes note of tokens, int32 [n], that the policy drew for a sample which began here."""

    def end(self, key: SampleKey) -> None:
        """Takes note that a sample finished or was withdrawn; an unknown one is left out."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return one guess per request, in order. It costs microseconds per token, or one pass of a small model."""


# ------------------------------------------------------------ abilities that a drafter may have, found by isinstance


@runtime_checkable
class LearnsSiblings(Protocol):
    """A drafter that learns from responses to the same prompt that were decoded elsewhere, or in an earlier epoch."""

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Takes tokens, int32 [n], that `source` has from response position `offset` on; known ones are left out.

        `weight` is how much they count beside tokens of a sample that is decoded here, above 0 and at most 1. What is
        out of bounds is left out and counted: it comes from other machines.
        """

    def forget(self, group: PromptGroup) -> None:
        """Drops all that was learned of a group; an unknown one is left out."""

    def age(self) -> None:
        """Makes all that was learned so far count less: the weights of the policy changed."""


@runtime_checkable
class TakesWeights(Protocol):
    """A drafter with weights of its own, which may be trained with the policy's."""

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Replaces all weights or none; returns bytes. WorkError WeightsMismatch."""
