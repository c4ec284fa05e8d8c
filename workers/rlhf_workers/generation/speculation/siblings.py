"""Drafts from responses of siblings, here and on other workers, and from earlier responses to the prompt.

Rule: tokens out of bounds or without room are refused and counted. At MAX_BYTES, groups without a sample that is
decoded here are dropped.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import Draft, DraftRequest, PromptGroup, SampleSource
from rlhf_workers.generation.speculation.suffix_index import (
    BYTES_PER_TEXT,
    BYTES_PER_TOKEN,
    LONGEST_MATCH,
    SOMEWHERE,
    START,
    Guess,
    SuffixIndex,
    Text,
)
from rlhf_workers.generation.speculation.vocabulary import policy_vocabulary

MAX_BYTES: Final = 256 * 2**20
"""Maximum estimated bytes of all groups; responses of 64 samples of 4096 tokens fit."""
BYTES_PER_GROUP: Final = 4000
AGEING: Final = 0.5
"""Factor of the weight of stored tokens at a change of the policy's weights."""
LENGTHS: Final = (2, 5, 15)
"""Bounds of the classes of match length, in tokens."""
SHARES: Final = (0.45, 0.6, 0.8)
"""Bounds of the classes of agreement: share of the votes, with one vote against always added."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)


class _Group:
    """Known responses to one prompt."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.texts: dict[SampleSource, tuple[int, Text]] = {}
        """Start position and content of each source's newest text."""
        self.live: set[SampleSource] = set()
        """Sources that are decoded here."""
        self.bytes = BYTES_PER_GROUP


class SiblingsDrafter:
    """The drafter `Siblings`."""

    name = "Siblings"

    def __init__(
        self, samples_per_prompt: int, vocabulary: int, max_response_tokens: int, max_bytes: int = MAX_BYTES
    ) -> None:
        """`vocabulary` is the width of the policy's logits; `max_bytes` bounds all groups together."""
        self._samples_per_prompt = samples_per_prompt
        self._vocabulary = vocabulary
        self._max_response_tokens = max_response_tokens
        self._max_bytes = max_bytes
        self._groups: dict[PromptGroup, _Group] = {}
        """Groups, least recently begun or learned first."""
        self._live: dict[SampleSource, tuple[SampleKey, Text]] = {}
        """Samples that are decoded here and extend their text, each with its key and text."""
        self.held_bytes = 0
        """Estimated upper bound of the bytes of all groups; about `max_bytes` at most."""
        self.refused_tokens = 0
        """Tokens of the calls of `learn` that were refused: out of bounds, or without room."""

    @property
    def held_groups(self) -> int:
        """Number of stored groups."""
        return len(self._groups)

    # ------------------------------------------------------------ samples that are decoded here

    def begin(self, request: SampleRequest) -> None:
        """Register a sample with its known tokens, if its group fits; extend its stored text if they begin with it."""
        key = request.key
        source = SampleSource(key.iteration, key.sample)
        self._leave(source)
        self._drop_before(key.iteration)
        name = PromptGroup.for_sample(key, self._samples_per_prompt)
        group = self._group(name)
        if group is None:
            return
        start, text = group.texts.get(source, (0, None))
        tokens = request.tokens
        if text is None or start or not _begins(tokens, text):
            text = self._add(group, source, 0, 1.0)
        group.live.add(source)
        self._live[source] = (key, text)
        self.extend(key, tokens[len(text) :])

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Add tokens to the index of the sample's group, if they fit; otherwise extend its text no more."""
        source = SampleSource(key.iteration, key.sample)
        holder, text = self._live.get(source, (None, None))
        group = self._groups.get(PromptGroup.for_sample(key, self._samples_per_prompt))
        if text is None or group is None or holder != key:
            return
        if self._room_for(BYTES_PER_TOKEN * len(tokens), group):
            self._append(group, text, tokens)
        else:  # a text with a gap would be wrong
            self._leave(source)

    def end(self, key: SampleKey) -> None:
        """Register that a sample is no longer decoded here; its tokens may stay for its siblings."""
        source = SampleSource(key.iteration, key.sample)
        if source in self._live and self._live[source][0] == key:
            self._leave(source)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return the continuation for which the group's texts vote; `match` is the class of the match's length and of
        their agreement."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        group = self._groups.get(PromptGroup.for_sample(request.key, self._samples_per_prompt))
        if group is None or request.longest < 1:
            return NOTHING
        guess = group.index.guess(_context(request), request.longest)
        return NOTHING if guess is None else Draft(np.array(guess.tokens, np.int32), match_class(guess))

    # ------------------------------------------------------------ learning from other workers

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Learn tokens of a sample that is not decoded here; after a gap they form a new text.

        Calls with tokens outside the vocabulary or beyond the longest response, or with a weight outside (0, 1], are
        refused.
        """
        count = len(tokens)
        if source in self._live or not count:
            return
        in_bounds = 0 <= offset <= self._max_response_tokens - count and 0 < weight <= 1
        if not in_bounds or int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            self.refused_tokens += count
            return
        prompt_group = self._group(group)
        if prompt_group is None or not self._room_for(BYTES_PER_TEXT + BYTES_PER_TOKEN * count, prompt_group):
            self.refused_tokens += count
            return
        start, text = prompt_group.texts.get(source, (0, None))
        if text is None or offset > start + len(text):
            start, text = offset, self._add(prompt_group, source, offset, weight)
        self._append(prompt_group, text, tokens[max(0, start + len(text) - offset) :])

    def forget(self, group: PromptGroup) -> None:
        """Drop a group; its samples that are decoded here continue without it."""
        dropped = self._groups.pop(group, None)
        if dropped is not None:
            self.held_bytes -= dropped.bytes
            for source in dropped.live:
                del self._live[source]

    def age(self) -> None:
        """Reduce the weight of the stored tokens relative to later ones."""
        for group in self._groups.values():
            group.index.age(AGEING)

    # ------------------------------------------------------------ bounds

    def _group(self, name: PromptGroup) -> _Group | None:
        """Return the group as the most recently used, new if necessary; None if it does not fit."""
        group = self._groups.pop(name, None)
        if group is None:
            group = _Group()
            if not self._room_for(BYTES_PER_GROUP + BYTES_PER_TEXT, group):
                return None
            self.held_bytes += group.bytes
        self._groups[name] = group
        return group

    def _room_for(self, count: int, wanted: _Group) -> bool:
        """Drop unused groups in order until `count` more bytes fit; return whether they do."""
        if self.held_bytes + count > self._max_bytes:
            for name in [name for name, group in self._groups.items() if not group.live and group is not wanted]:
                self.forget(name)
                if self.held_bytes + count <= self._max_bytes:
                    break
        return self.held_bytes + count <= self._max_bytes

    def _drop_before(self, iteration: int) -> None:
        for name in [name for name, group in self._groups.items() if name.iteration < iteration and not group.live]:
            self.forget(name)

    def _add(self, group: _Group, source: SampleSource, offset: int, weight: float) -> Text:
        text = group.index.add(weight, SOMEWHERE if offset else START)
        group.texts[source] = (offset, text)
        self._count(group, BYTES_PER_TEXT)
        return text

    def _append(self, group: _Group, text: Text, tokens: TokenArray) -> None:
        group.index.append(text, tokens)
        self._count(group, BYTES_PER_TOKEN * len(tokens))

    def _count(self, group: _Group, count: int) -> None:
        group.bytes += count
        self.held_bytes += count

    def _leave(self, source: SampleSource) -> None:
        if self._live.pop(source, None) is not None:
            name = PromptGroup(source.iteration, source.sample // self._samples_per_prompt)
            self._groups[name].live.discard(source)


def build_drafter(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> SiblingsDrafter:
    """Return the drafter for a job's groups, with the vocabulary of the policy's folder."""
    vocabulary = policy_vocabulary(spec)
    return SiblingsDrafter(samples_per_prompt(spec), vocabulary, spec.rollout.max_response_tokens)


def match_class(guess: Guess) -> int:
    """Return 0 .. MATCHES - 1: four classes of the match's length times four of the voters' agreement."""
    length = sum(guess.match > bound for bound in LENGTHS)
    return 4 * length + sum(guess.share >= bound for bound in SHARES)


def _begins(tokens: TokenArray, text: Text) -> bool:
    """Return whether `tokens` begins with a text."""
    return len(text) <= len(tokens) and text.written[LONGEST_MATCH:] == array("i", tokens[: len(text)].tobytes())


def _context(request: DraftRequest) -> "array[int]":
    response = request.tokens[request.prompt_length :][-LONGEST_MATCH:]
    context = START[: LONGEST_MATCH - len(response)]
    context.frombytes(np.ascontiguousarray(response, np.int32).tobytes())
    return context
