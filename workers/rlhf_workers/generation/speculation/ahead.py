"""Drafts from tokens that idle workers decoded ahead for the same sample, under its own random key.

The coordinator sends them as tokens of the source FIRST_AHEAD_SAMPLE + the sample's number. While a response equals
them, the rest of them is its draft; after the first difference the drafter `Siblings`, which learns them too, goes on.
Rule: tokens from other machines are checked; those out of bounds, after a gap or without room are counted.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.groups import AHEAD
from rlhf_common.samples import FIRST_AHEAD_SAMPLE, SampleKey, SampleRequest, TokenArray, is_ahead
from rlhf_workers.generation.speculation.drafter import MATCHES, Draft, DraftRequest, PromptGroup, SampleSource
from rlhf_workers.generation.speculation.vocabulary import policy_vocabulary

MAX_TOKENS: Final = 1 << 20
"""Maximum tokens of all samples: 4 MiB."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)


class AheadDrafter:
    """The drafter for drafts ahead."""

    name = AHEAD

    def __init__(
        self, samples_per_prompt: int, vocabulary: int, max_response_tokens: int, max_tokens: int = MAX_TOKENS
    ) -> None:
        """`vocabulary` is the width of the policy's logits; `max_tokens` bounds all samples together."""
        self._samples_per_prompt = samples_per_prompt
        self._vocabulary = vocabulary
        self._max_response_tokens = max_response_tokens
        self._max_tokens = max_tokens
        self._texts: dict[SampleSource, array[int]] = {}
        """Tokens decoded ahead, by iteration and number of the sample."""
        self._equal: dict[SampleSource, int] = {}
        """Tokens at the start of these texts that equal the response; -1 after a difference."""
        self.held_tokens = 0
        """Tokens of all texts."""
        self.refused_tokens = 0
        """Tokens given to `learn` that were out of bounds, came after a gap or did not fit."""

    # ------------------------------------------------------------ samples that are decoded here

    def begin(self, request: SampleRequest) -> None:
        """Drop the drafts of iterations before that of the sample."""
        for source in [source for source in self._texts if source.iteration < request.key.iteration]:
            self._drop(source)

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Ignore drawn tokens: a request for a draft has them all."""

    def end(self, key: SampleKey) -> None:
        """Ignore the end of a sample, which may come back; its draft is dropped with its iteration."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return what was decoded ahead after each response that it equals; `match` is the class of its length."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        source = SampleSource(request.key.iteration, request.key.sample)
        text, response = self._texts.get(source), request.tokens[request.prompt_length :]
        count = len(response)
        if text is None or count >= len(text) or not self._equals(source, text, response):
            return NOTHING
        rest = np.array(text[count : count + request.longest], np.int32)
        return Draft(rest, min(count.bit_length(), MATCHES - 1))

    def _equals(self, source: SampleSource, text: "array[int]", response: TokenArray) -> bool:
        """Return whether a text begins with the response; compare what was not compared before."""
        first = self._equal[source]
        if first < 0:
            return False
        if np.array_equal(response[first:], np.array(text[first : len(response)], np.int32)):
            self._equal[source] = max(first, len(response))
            return True
        self._equal[source] = -1
        return False

    # ------------------------------------------------------------ learning from other workers

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Learn tokens decoded ahead; ignore those of other sources and known ones."""
        if not is_ahead(source.sample) or not len(tokens):
            return
        own = SampleSource(source.iteration, source.sample - FIRST_AHEAD_SAMPLE)
        text = self._texts.get(own, array("i"))
        count = len(tokens)
        sound = 0 <= offset <= min(len(text), self._max_response_tokens - count)
        sound = sound and int(tokens.min()) >= 0 and int(tokens.max()) < self._vocabulary
        more = tokens[max(0, len(text) - offset) :]
        if not sound or self.held_tokens + len(more) > self._max_tokens:
            self.refused_tokens += count
            return
        text.extend(more.tolist())
        self._texts[own] = text
        self._equal.setdefault(own, 0)
        self.held_tokens += len(more)

    def forget(self, group: PromptGroup) -> None:
        """Drop the drafts of a prompt's samples."""
        members = [
            source
            for source in self._texts
            if PromptGroup(source.iteration, source.sample // self._samples_per_prompt) == group
        ]
        for source in members:
            self._drop(source)

    def age(self) -> None:
        """Ignore new weights: drafts ahead are of earlier weights anyway."""

    def _drop(self, source: SampleSource) -> None:
        self.held_tokens -= len(self._texts.pop(source))
        del self._equal[source]


def build_drafter(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> AheadDrafter:
    """Return the drafter for a job's samples, with the vocabulary of the policy's folder."""
    return AheadDrafter(samples_per_prompt(spec), policy_vocabulary(spec), spec.rollout.max_response_tokens)
