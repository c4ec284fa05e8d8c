"""Drafts from what the siblings of a sample said, here and on other workers, and from earlier responses to its prompt.

One suffix index per prompt group: samples that are decoded here feed it themselves, all others through `learn`. Rule:
what comes from other machines is bounded and checked before it is kept, and what is left out is counted. A group is
dropped when it is forgotten, when a later iteration has begun and none of its samples is decoded here, or, the longest
unused first, when MAX_BYTES are held; samples of a dropped group are decoded on without guesses of this drafter.
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
"""Of all groups together, on one worker: the responses of 64 samples of 4096 tokens fit."""
BYTES_PER_GROUP: Final = 4000
AGEING: Final = 0.5
"""What tokens of earlier weights count beside those of later ones."""
LENGTHS: Final = (2, 5, 15)
"""Tokens: a match longer than these is of the next class."""
SHARES: Final = (0.45, 0.6, 0.8)
"""Of the votes, one against always among them: one voter has a half, two of one mind two thirds."""
NOTHING: Final = Draft(np.empty(0, np.int32), 0)


class _Group:
    """What is known of the responses to one prompt."""

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.texts: dict[SampleSource, tuple[int, Text]] = {}
        """Of every source: the response position at which its newest text begins, and that text."""
        self.live: set[SampleSource] = set()
        """Those that are decoded here."""
        self.bytes = BYTES_PER_GROUP


class SiblingsDrafter:
    """The drafter `Siblings`."""

    name = "Siblings"

    def __init__(
        self, samples_per_prompt: int, vocabulary: int, max_response_tokens: int, max_bytes: int = MAX_BYTES
    ) -> None:
        """`vocabulary` is the width of the policy's logits; the sizes are bounds on what is learned from others."""
        self._samples_per_prompt = samples_per_prompt
        self._vocabulary = vocabulary
        self._max_response_tokens = max_response_tokens
        self._max_bytes = max_bytes
        self._groups: dict[PromptGroup, _Group] = {}
        """The least recently used first."""
        self._live: dict[SampleSource, tuple[SampleKey, Text]] = {}
        """Samples that are decoded here, each under one lease, and their texts."""
        self.held_bytes = 0
        """Of all groups, at most `max_bytes`; estimated from above."""
        self.refused_tokens = 0
        """Learned ones that were out of bounds or had no room, since the start."""

    @property
    def held_groups(self) -> int:
        """Return the number of groups of which something is known."""
        return len(self._groups)

    # ------------------------------------------------------------ samples that are decoded here

    def begin(self, request: SampleRequest) -> None:
        """Take note of a sample with the tokens that it already has; what others told of it may be known."""
        key = request.key
        source = SampleSource(key.iteration, key.sample)
        self._leave(source)
        self._drop_before(key.iteration)
        name = PromptGroup.for_sample(key, self._samples_per_prompt)
        group = self._group(name)
        if group is None:
            return
        start, text = group.texts.get(source, (0, None))
        known = request.tokens
        if text is None or start or not _begins(known, text):
            text = self._add(group, source, 0, 1.0)
        group.live.add(source)
        self._live[source] = (key, text)
        self.extend(key, known[len(text) :])

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Add tokens to the index of the sample's group."""
        source = SampleSource(key.iteration, key.sample)
        holder, text = self._live.get(source, (None, None))
        group = self._groups.get(PromptGroup.for_sample(key, self._samples_per_prompt))
        if text is None or group is None or holder != key:
            return
        if self._room_for(BYTES_PER_TOKEN * len(tokens), group):
            self._append(group, text, tokens)
        else:  # a text with a gap would say what was never said
            self._leave(source)

    def end(self, key: SampleKey) -> None:
        """Take note that a sample is not decoded here any more; its tokens stay for its siblings."""
        source = SampleSource(key.iteration, key.sample)
        if source in self._live and self._live[source][0] == key:
            self._leave(source)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Return what most siblings went on with; `match` is the class of its length and of how they agree."""
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> Draft:
        group = self._groups.get(PromptGroup.for_sample(request.key, self._samples_per_prompt))
        if group is None or request.longest < 1:
            return NOTHING
        guess = group.index.guess(_context(request), request.longest)
        return NOTHING if guess is None else Draft(np.array(guess.tokens, np.int32), match_class(guess))

    # ------------------------------------------------------------ what others tell

    def learn(
        self, group: PromptGroup, source: SampleSource, offset: int, tokens: TokenArray, weight: float = 1.0
    ) -> None:
        """Add tokens of a sample that is not decoded here; where some before them are missing, as a text of their own.

        Tokens outside the vocabulary or beyond the longest response, and weights that are no share, are left out.
        """
        count = len(tokens)
        if source in self._live or not count:
            return
        in_bounds = 0 <= offset <= self._max_response_tokens - count and 0 < weight <= 1
        if not in_bounds or int(tokens.min()) < 0 or int(tokens.max()) >= self._vocabulary:
            self.refused_tokens += count
            return
        known = self._group(group)
        if known is None or not self._room_for(BYTES_PER_TEXT + BYTES_PER_TOKEN * count, known):
            self.refused_tokens += count
            return
        start, text = known.texts.get(source, (0, None))
        if text is None or offset > start + len(text):
            start, text = offset, self._add(known, source, offset, weight)
        self._append(known, text, tokens[max(0, start + len(text) - offset) :])

    def forget(self, group: PromptGroup) -> None:
        """Drop a group; samples of it that are decoded here go on without it."""
        dropped = self._groups.pop(group, None)
        if dropped is not None:
            self.held_bytes -= dropped.bytes
            for source in dropped.live:
                del self._live[source]

    def age(self) -> None:
        """Make what is held count less than tokens to come."""
        for group in self._groups.values():
            group.index.age(AGEING)

    # ------------------------------------------------------------ bounds

    def _group(self, name: PromptGroup) -> _Group | None:
        """Return the group, made where it is new, as the most recently used; None: there is no room for it."""
        group = self._groups.pop(name, None)
        if group is None:
            group = _Group()
            if not self._room_for(BYTES_PER_GROUP + BYTES_PER_TEXT, group):
                return None
            self.held_bytes += group.bytes
        self._groups[name] = group
        return group

    def _room_for(self, count: int, wanted: _Group) -> bool:
        """Drop unused groups, the longest unused first, until so many bytes more fit; False: they do not."""
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
    """Return the drafter for a job's groups; the vocabulary is that of the policy's folder."""
    vocabulary = policy_vocabulary(spec)
    return SiblingsDrafter(samples_per_prompt(spec), vocabulary, spec.rollout.max_response_tokens)


def match_class(guess: Guess) -> int:
    """Return 0 .. MATCHES - 1: four classes of the match's length, each of four of how the voters agree."""
    length = sum(guess.match > bound for bound in LENGTHS)
    return 4 * length + sum(guess.share >= bound for bound in SHARES)


def _begins(known: TokenArray, text: Text) -> bool:
    """Return whether a text is how `known` begins."""
    return len(text) <= len(known) and text.written[LONGEST_MATCH:] == array("i", known[: len(text)].tobytes())


def _context(request: DraftRequest) -> "array[int]":
    response = request.tokens[request.prompt_length :][-LONGEST_MATCH:]
    context = START[: LONGEST_MATCH - len(response)]
    context.frombytes(np.ascontiguousarray(response, np.int32).tobytes())
    return context
