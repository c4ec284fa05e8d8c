"""Cuts off surplus prompts of an iteration that began more than its batch has (`spec.rollout.oversample`).

`spec.rollout.cutBy` chooses the prompts that stay:

- Clock: prompts that are finished, as soon as they are enough; those without a failed sample first, then by number.
- Counts: the prompts whose longest response has the fewest tokens, ties by number.

Rule: pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_coordinator.scheduling.decisions import CutGroups
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Sample

CutBy = Literal["Clock", "Counts"]


@dataclass(frozen=True, slots=True)
class PromptLength:
    """The longest response to a prompt, as far as known."""

    tokens: float
    """Tokens of its longest response so far; infinite if a sample failed."""
    complete: bool
    """Whether no sample is unfinished, so that `tokens` is final."""


@dataclass(frozen=True, slots=True)
class CutChoice:
    """The groups to cut off now, or what the choice waits for."""

    cuts: tuple[CutGroups, ...] = ()
    """The cut of an iteration; empty while the choice is open, or when nothing is left to cut off."""
    awaited_tokens: float | None = None
    """Length that unfinished responses must reach before a cut by counts; None if it waits for something else."""


def decide(ledger: Ledger, cut_by: CutBy) -> CutChoice:
    """Return the prompts to cut off, or what the choice waits for."""
    more = ledger.groups_to_cut
    if not more:
        return CutChoice()
    groups = len(ledger.samples) // ledger.group_size
    if cut_by == "Counts":
        lengths = prompt_lengths(ledger, groups)
        remaining = shortest_prompts(lengths, groups - more)
        if remaining is None:
            return CutChoice(awaited_tokens=awaited_tokens(lengths, groups - more))
    else:
        remaining = _finished_first(ledger, groups - more)
        if remaining is None:
            return CutChoice()
    return CutChoice((CutGroups(tuple(group for group in range(groups) if group not in remaining)),))


def shortest_prompts(lengths: Sequence[PromptLength], count: int) -> frozenset[int] | None:
    """Return the `count` prompts whose longest response is shortest, ties by number.

    None while one of the first prompts is incomplete. `lengths` are by prompt number.
    """
    first = sorted(range(len(lengths)), key=lambda prompt: (lengths[prompt].tokens, prompt))[:count]
    return frozenset(first) if all(lengths[prompt].complete for prompt in first) else None


def awaited_tokens(lengths: Sequence[PromptLength], count: int) -> float | None:
    """Return the length that unfinished responses must reach before `count` prompts are certain to be the shortest;
    None while fewer are complete.
    """
    complete = sorted(length.tokens for length in lengths if length.complete)
    return complete[count - 1] if len(complete) >= count else None


def prompt_lengths(ledger: Ledger, groups: int) -> list[PromptLength]:
    """Return the known lengths of so many prompts of an iteration, by number."""
    return [_length(ledger.members_of(group)) for group in range(groups)]


def _length(members: Sequence[Sample]) -> PromptLength:
    tokens = max(math.inf if sample.failed else len(sample.response) for sample in members)
    return PromptLength(tokens, not any(sample.unfinished for sample in members))


def _finished_first(ledger: Ledger, count: int) -> frozenset[int] | None:
    finished = ledger.finished_groups()
    if len(finished) < count:
        return None
    failed = {group: any(sample.failed for sample in ledger.members_of(group)) for group in finished}
    return frozenset(sorted(finished, key=lambda group: (failed[group], group))[:count])
