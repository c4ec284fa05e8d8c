"""Dynamic refill: prompt groups whose rewards are all equal teach nothing, and others take their place.

Owns the rule of a job, and what follows from it: which group is dropped, and how many groups an iteration has. The
groups of an iteration are numbered in the order of its prompts. The first ones fill the batch; every dropped group of
round k - 1 or before adds one at the end, which belongs to round k. How many there are to be is a function of which
were dropped, whatever the order in which that was known: it only grows while more is known, so a group is added as soon
as it is certain to be needed, and a replay adds the same.
Rule: pure.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum


class UsedUp(StrEnum):
    """What the places of a batch hold that no round could fill."""

    MASK = "Mask"
    """Dropped groups, masked out: the batch is smaller, and nothing is trained on what teaches nothing."""
    TRAIN = "Train"
    """Dropped groups, trained on: their advantages are 0, and their tokens count in means."""
    FAIL = "Fail"
    """Nothing: the job fails."""


@dataclass(frozen=True)
class RefillRule:
    """How an iteration is refilled."""

    rounds: int
    """At most so many; 0: no group is dropped."""
    used_up: UsedUp = UsedUp.MASK


def teaches_nothing(rewards: Collection[float]) -> bool:
    """Return whether the responses to a prompt are all worth the same. `rewards`: without those that abstained."""
    return len(set(rewards)) <= 1


def round_ends(first: int, dropped: Sequence[int], rounds: int) -> list[int]:
    """Return after round 0, 1, ... how many groups there are by then, as far as it is known.

    `first`: groups of the batch; `dropped`: numbers of the groups that are dropped by now, in ascending order. Ends
    with the round that adds nothing, or with the last one that is allowed; what is still open may add more.
    """
    ends = [first]
    for _ in range(rounds):
        end = first + bisect_left(dropped, ends[-1])
        if end == ends[-1]:
            break
        ends.append(end)
    return ends
