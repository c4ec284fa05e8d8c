"""The refill of an iteration: the dropped prompt groups, the number of groups, and the groups of the batch.

Rule: pure, and a part of the ledger; `rlhf_api.algorithms.refill` defines the rule.
"""

from bisect import insort
from collections.abc import Sequence
from typing import Final

import numpy as np

from rlhf_api.algorithms import Graph, Task
from rlhf_api.algorithms.refill import RefillRule, round_ends, teaches_nothing
from rlhf_coordinator.state.sample import Sample, SampleState

NO_REFILL: Final = RefillRule(0)


class BatchRefill:
    """The dropped groups of one iteration, and the groups that follow from them."""

    def __init__(self, rule: RefillRule, tasks: Sequence[Task], groups: int) -> None:
        """`tasks`: the scoring tasks of the graph; `groups`: number of prompts of the batch."""
        self.rule, self.first = rule, groups
        self._reward = next(iter(Graph("", tuple(tasks)).reward_fields), "")
        self.dropped: list[int] = []
        """Numbers of the dropped groups, in ascending order."""

    def drops(self, group: int, members: Sequence[Sample]) -> bool:
        """Return whether a group is dropped: all its members are scored, and no two have different rewards. Record it
        then.

        `members`: the samples of the group that did not fail.
        """
        if not self.rule.rounds or not members or any(sample.state is not SampleState.SCORED for sample in members):
            return False
        rewards = [sample.fields[self._reward] for sample in members if self._reward in sample.fields]
        if not teaches_nothing([float(np.frombuffer(reward, dtype="<f4")[0]) for reward in rewards]):
            return False
        insort(self.dropped, group)
        return True

    @property
    def groups(self) -> int:
        """Number of groups that the iteration has, as far as known."""
        return round_ends(self.first, self.dropped, self.rule.rounds)[-1]

    @property
    def rounds(self) -> int:
        """Rounds that added groups."""
        return len(round_ends(self.first, self.dropped, self.rule.rounds)) - 1

    @property
    def missing(self) -> int:
        """Number of groups that the batch lacks, if no other group is dropped."""
        return self.first - (self.groups - len(self.dropped))

    def batch(self) -> list[tuple[int, bool]]:
        """Return the groups of the batch, and for each whether it is masked out.

        Dropped groups, first ones first, take the places that no round could fill.
        """
        gone = set(self.dropped)
        remaining = [(group, False) for group in range(self.groups) if group not in gone]
        return [
            *remaining,
            *((group, self.rule.used_up != "Train") for group in self.dropped[: self.first - len(remaining)]),
        ]
