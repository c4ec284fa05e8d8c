"""The group table of an iteration: tasks whose unit is a prompt's group, and whether they are open or leased.

A group is the samples of one prompt that did not fail. One worker leases a task for the whole group; results of an
incomplete group are dropped with the lease. Rule: pure, and a part of the ledger.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_api.algorithms import Scope, Task
from rlhf_coordinator.state.sample import Sample, SampleState

GroupTask = tuple[int, str]
"""(group, name of the task)."""
Results = Mapping[int, bytes | None]
"""Sample -> float32 values; None for an abstention."""


@dataclass
class GroupLease:
    """A group that one worker has leased for one task."""

    members: tuple[int, ...]
    results: dict[int, bytes | None] = field(default_factory=dict)
    """Results so far, by sample."""


class GroupTable:
    """The group tasks of one iteration."""

    def __init__(self, tasks: Sequence[Task], group_size: int) -> None:
        """`tasks`: the ledger's scoring tasks; this table has those of scope GROUP. `group_size`: consecutive samples
        of one prompt; 1 in an evaluation, which has no group tasks."""
        self.names = frozenset(task.name for task in tasks if task.scope is Scope.GROUP)
        maker = {produced: task.name for task in tasks for produced in task.produces}
        self._after = {
            task.name: frozenset(maker[need] for need in task.needs if need in maker)
            for task in tasks
            if task.name in self.names
        }
        self._size = group_size
        self._open: dict[GroupTask, None] = {}
        self._leased: dict[GroupTask, GroupLease] = {}
        self._done: set[GroupTask] = set()

    def open(self) -> Collection[GroupTask]:
        """Return the open tasks, in the order in which they opened."""
        return self._open.keys()

    def group_of(self, index: int) -> int:
        """Return the group of a sample."""
        return index // self._size

    def members(self, group: int, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of a group that did not fail. `samples`: all of the iteration, by index."""
        return [sample for sample in samples[group * self._size : (group + 1) * self._size] if not sample.failed]

    def refresh(self, index: int, samples: Sequence[Sample]) -> None:
        """Open the tasks of a sample's group that became possible after a change of the sample."""
        if not self.names:
            return
        group = self.group_of(index)
        members = self.members(group, samples)
        for name in sorted(self.names):
            item = (group, name)
            if item in self._open or item in self._leased or item in self._done or not members:
                continue
            if all(self._has_needs(sample, name) for sample in members):
                self._open[item] = None

    def lease(self, group: int, task: str, samples: Sequence[Sample]) -> list[Sample]:
        """Lease an open task; return its samples."""
        del self._open[group, task]
        members = self.members(group, samples)
        self._leased[group, task] = GroupLease(tuple(sample.index for sample in members))
        return members

    def collect(self, index: int, task: str, values: bytes | None) -> Results | None:
        """Store the result of one sample of a leased task; return all results with the last one, and None before.

        A second result of a sample is ignored.
        """
        item = self.group_of(index), task
        lease = self._leased[item]
        lease.results.setdefault(index, values)
        if len(lease.results) < len(lease.members):
            return None
        del self._leased[item]
        self._done.add(item)
        return {member: lease.results[member] for member in lease.members}

    def give_back(self, index: int, task: str) -> tuple[int, ...]:
        """Reopen a leased task and drop its results; return its samples."""
        item = self.group_of(index), task
        self._open[item] = None
        return self._leased.pop(item).members

    def restore(self, task: str, indices: Collection[int]) -> None:
        """Mark an open task as done for the group of these samples. Raises ValueError if it is not open."""
        item = self.group_of(min(indices)), task
        if item not in self._open:
            raise ValueError(f"task {task} of prompt group {item[0]} is not open")
        del self._open[item]
        self._done.add(item)

    def drop(self, group: int) -> None:
        """Drop the open and leased tasks of a group."""
        for of_group in [item for item in (*self._open, *self._leased) if item[0] == group]:
            self._open.pop(of_group, None)
            self._leased.pop(of_group, None)

    def _has_needs(self, sample: Sample, task: str) -> bool:
        if sample.state not in (SampleState.GENERATED, SampleState.SCORED):
            return False
        return self._after[task].isdisjoint({*sample.open_tasks, *sample.scoring, *sample.group_tasks})
