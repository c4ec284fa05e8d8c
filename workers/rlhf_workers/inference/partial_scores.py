"""Prefixes of the iteration's unfinished samples: what is computed of each under each task, within a budget of bytes.

Rule: memory pressure costs time, never results: what is dropped is computed again. The least recently used sample goes
first, whole. Only samples of one iteration are held, for with the next there are other responses and other weights.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhf_common.samples import TokenArray
from rlhf_workers.inference.chunk_forward import ComputedTokens


@dataclass
class PartialScore(ComputedTokens):
    """Grows with every chunk."""

    tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    """Prompt and response as far as they went into the numbers: one more than `positions`, or none."""
    prompt: int = 0
    """Tokens of them that are the prompt's."""
    scores: list[torch.Tensor] = field(default_factory=list)
    """float32 [n] each: the numbers of the response's tokens so far, in order."""

    def agrees(self, prompt: int, tokens: TokenArray) -> bool:
        """Whether a sample with this prompt length and these tokens [n] begins as this one did."""
        mine = len(self.tokens)
        begun = mine > 0
        return not begun or (
            self.prompt == prompt and mine <= len(tokens) and np.array_equal(self.tokens, tokens[:mine])
        )


@dataclass
class UnfinishedSample:
    """An unfinished sample."""

    prompt: int
    tokens: TokenArray
    """int32 [n]: prompt and response, as far as they are known."""
    prefixes: dict[str, PartialScore] = field(default_factory=dict)
    """What is scored already, by task."""

    @property
    def bytes(self) -> int:
        """Device memory of all its partial scores."""
        return sum(prefix.bytes for prefix in self.prefixes.values())


class PartialScoreStore:
    """Holds them by the sample's number."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes, on the device that scores."""
        self._budget = budget
        self._iteration = -1
        self._samples: OrderedDict[int, UnfinishedSample] = OrderedDict()
        self._dropped: list[int] = []

    def enter(self, iteration: int) -> bool:
        """Work of this iteration comes: nothing of earlier ones is kept. False: it is of an earlier one itself."""
        if iteration > self._iteration:
            self.clear()
            self._iteration = iteration
        return iteration == self._iteration

    def known(self, sample: int, prompt: int, tokens: TokenArray) -> UnfinishedSample:
        """The sample with these tokens; prefixes of other tokens are dropped."""
        growing = self._samples.setdefault(sample, UnfinishedSample(prompt, tokens))
        self._samples.move_to_end(sample)
        if not all(prefix.agrees(prompt, tokens) for prefix in growing.prefixes.values()):
            self._dropped.append(sample)
            growing.prefixes.clear()
        growing.prompt, growing.tokens = prompt, tokens
        return growing

    def get(self, sample: int) -> UnfinishedSample | None:
        """Return what is held of a sample, if anything."""
        return self._samples.get(sample)

    def take(self, sample: int, task: str, prompt: int, tokens: TokenArray) -> PartialScore | None:
        """The prefix of a finished sample under a task, which is the caller's from here on; None when there is none."""
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
        """Drops the least recently used samples until the rest fits into the budget."""
        held = self.bytes
        while held > self._budget:
            sample, growing = self._samples.popitem(last=False)
            held -= growing.bytes
            self._dropped.append(sample)

    def drop(self, sample: int) -> None:
        """Nothing is held of it any more."""
        if self._samples.pop(sample, None) is not None:
            self._dropped.append(sample)

    def drop_task(self, task: str) -> None:
        """The model of a task has other weights now."""
        for growing in self._samples.values():
            growing.prefixes.pop(task, None)

    def clear(self) -> None:
        """Holds nothing any more."""
        self._samples.clear()
        self._dropped.clear()

    def reported(self) -> list[int]:
        """Samples that were dropped since the last time this was asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def bytes(self) -> int:
        """Keys and values held."""
        return sum(growing.bytes for growing in self._samples.values())
