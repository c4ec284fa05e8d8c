"""Partial scores of unfinished samples of the current iteration, per task, within a budget of bytes.

Rule: `make_room` drops samples beyond the budget, with all their tasks: the least recently updated one goes first.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhf_common.samples import TokenArray
from rlhf_workers.inference.chunk_forward import ComputedTokens


@dataclass
class PartialScore(ComputedTokens):
    """A sample's scores so far under one task; grows with every chunk."""

    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and response tokens: those that passed through the model, and the next one; none at first."""
    prompt: int = 0
    """Number of the sample's prompt tokens."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """Numbers of the response tokens so far, in order; float32 [n] each."""

    def agrees(self, prompt: int, tokens: TokenArray) -> bool:
        """Return whether a sample with this prompt length and these tokens [n] starts with this prefix."""
        mine = len(self.tokens)
        begun = mine > 0
        return not begun or (
            self.prompt == prompt and mine <= len(tokens) and np.array_equal(self.tokens, tokens[:mine])
        )


@dataclass
class UnfinishedSample:
    """Known tokens of an unfinished sample and its partial scores."""

    prompt: int
    tokens: TokenArray
    """Known prompt and response tokens, int32 [n]."""
    prefixes: dict[str, PartialScore] = field(default_factory=dict)
    """Partial scores by task."""

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of all its partial scores."""
        return sum(prefix.bytes for prefix in self.prefixes.values())


class PartialScoreStore:
    """Stores unfinished samples by number."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes, on the device that scores."""
        self._budget = budget
        self._iteration = -1
        self._samples: OrderedDict[int, UnfinishedSample] = OrderedDict()
        self._dropped: list[int] = []

    def enter(self, iteration: int) -> bool:
        """Start work of this iteration and drop earlier ones; return False if a later one has started."""
        if iteration > self._iteration:
            self.clear()
            self._iteration = iteration
        return iteration == self._iteration

    def update(self, sample: int, prompt: int, tokens: TokenArray) -> UnfinishedSample:
        """Store a sample's tokens and return the sample; drop its prefixes if one has other tokens."""
        growing = self._samples.setdefault(sample, UnfinishedSample(prompt, tokens))
        self._samples.move_to_end(sample)
        if not all(prefix.agrees(prompt, tokens) for prefix in growing.prefixes.values()):
            self._dropped.append(sample)
            growing.prefixes.clear()
        growing.prompt, growing.tokens = prompt, tokens
        return growing

    def get(self, sample: int) -> UnfinishedSample | None:
        """Return a stored sample, or None."""
        return self._samples.get(sample)

    def take(self, sample: int, task: str, prompt: int, tokens: TokenArray) -> PartialScore | None:
        """Remove and return the prefix of a finished sample under a task; None if there is none, or it has other
        tokens."""
        growing = self._samples.get(sample)
        prefix = growing.prefixes.pop(task, None) if growing is not None else None
        if growing is not None and not growing.prefixes:
            del self._samples[sample]
        if prefix is None or not prefix.positions:
            return None
        if not prefix.agrees(prompt, tokens):
            self._dropped.append(sample)
            return None
        return prefix

    def make_room(self) -> None:
        """Drop the least recently updated samples until the rest fits into the budget."""
        used = self.bytes
        while used > self._budget:
            sample, growing = self._samples.popitem(last=False)
            used -= growing.bytes
            self._dropped.append(sample)

    def drop(self, sample: int) -> None:
        """Drop a sample."""
        if self._samples.pop(sample, None) is not None:
            self._dropped.append(sample)

    def drop_task(self, task: str) -> None:
        """Drop the prefixes of a task whose model has new weights."""
        for growing in self._samples.values():
            growing.prefixes.pop(task, None)

    def clear(self) -> None:
        """Drop everything."""
        self._samples.clear()
        self._dropped.clear()

    def reported(self) -> list[int]:
        """Return the samples dropped since the last call, or since `clear`."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def bytes(self) -> int:
        """Bytes of the stored keys and values."""
        return sum(growing.bytes for growing in self._samples.values())
