"""The parts of a packed row: samples alone, or a prompt that several samples share and their responses.

Rule: neighbours with equal prompts share; the prompt's tokens come once, then all responses. Must never let samples
share that differ in a prompt token.

Source: Prefix Grouper (arXiv 2506.05433).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch


@dataclass(frozen=True)
class RowSegment:
    """A prompt and the responses that continue it, in tokens. A sample that shares nothing is one prompt."""

    prompt: int
    """Tokens that all responses see."""
    responses: tuple[int, ...] = ()
    """Tokens of each response."""

    @property
    def tokens(self) -> int:
        """Tokens of the segment."""
        return self.prompt + sum(self.responses)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt + max(self.responses, default=0)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key up to it, in tokens squared."""
        return self.prompt**2 / 2 + sum(length * (self.prompt + length / 2) for length in self.responses)


PackedRow = tuple[RowSegment, ...]
"""Segments of a row, end to end."""


@dataclass(frozen=True)
class PromptTable:
    """Prompts of the samples of a batch."""

    numbers: Sequence[int]
    """Number of each sample's prompt: the first sample with an equal one."""
    lengths: Sequence[int]
    """Tokens of each sample's prompt."""

    @classmethod
    def from_prompts(cls, prompts: Sequence[torch.Tensor]) -> "PromptTable":
        """Return the table of prompts, int64 [p] each, which are compared token by token."""
        first: dict[bytes, int] = {}
        numbers = [first.setdefault(prompt.numpy().tobytes(), sample) for sample, prompt in enumerate(prompts)]
        return cls(numbers, [len(prompt) for prompt in prompts])


@dataclass(frozen=True)
class SamplePlace:
    """Where a sample's tokens are in the flattened rows of a micro-batch."""

    prompt: int
    """Index of its first token."""
    response: int
    """Index of the first token of its response."""


def packed_row(samples: Sequence[int], lengths: Sequence[int], prompts: PromptTable | None) -> PackedRow:
    """Return the row of some samples of a batch, `lengths` tokens each; `prompts`: None shares nothing."""
    if prompts is None:
        return tuple(RowSegment(lengths[sample]) for sample in samples)
    row = []
    for _, same in groupby(samples, key=lambda sample: prompts.numbers[sample]):
        run = list(same)
        length = prompts.lengths[run[0]]
        shared = RowSegment(length, tuple(lengths[sample] - length for sample in run))
        row.append(shared if len(run) > 1 else RowSegment(lengths[run[0]]))
    return tuple(row)


def sample_places(row: PackedRow, prompts: Sequence[int]) -> Iterator[SamplePlace]:
    """Yield the place of each sample of a row; `prompts`: tokens of their prompts."""
    start, own = 0, iter(prompts)
    for segment in row:
        if not segment.responses:
            yield SamplePlace(start, start + next(own))
        begin = start + segment.prompt
        for length in segment.responses:
            next(own)
            yield SamplePlace(start, begin)
            begin += length
        start += segment.tokens
