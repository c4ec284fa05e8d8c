"""Dynamic refill: replaces prompt groups whose rewards are all equal, since they have no learning signal. Rule: pure.

The groups of an iteration are numbered in the order of its prompts. The first ones fill the batch. A group dropped in
round k - 1 adds one at the end, which belongs to round k, up to the last allowed round.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class UsedUp(StrEnum):
    """How to treat places of a batch that no round could fill."""

    MASK = "Mask"
    """Dropped groups take them, masked out: the batch is smaller."""
    TRAIN = "Train"
    """Dropped groups take them and are trained on: without shaping their advantages are 0, and their tokens count in
    means."""
    FAIL = "Fail"
    """The job fails."""


@dataclass(frozen=True)
class RefillRule:
    """Refill settings of a job."""

    rounds: int
    """Maximum rounds; 0: no group is dropped."""
    used_up: UsedUp = UsedUp.MASK


def teaches_nothing(rewards: Collection[float]) -> bool:
    """Return whether responses to a prompt have no two different rewards, also if there is none.

    `rewards`: without abstentions.
    """
    return len(set(rewards)) <= 1


def round_ends(first: int, dropped: Sequence[int], rounds: int) -> list[int]:
    """Return the number of groups after rounds 0, 1, ..., as far as it is known.

    `first`: groups of the batch; `dropped`: numbers of the groups dropped so far, ascending.
    """
    ends = [first]
    for _ in range(rounds):
        end = first + bisect_left(dropped, ends[-1])
        if end == ends[-1]:
            break
        ends.append(end)
    return ends
