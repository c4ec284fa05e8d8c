"""The scoring table of an iteration: which tasks of which finished samples are open, leased, or done.

Rule: pure, and a part of the ledger.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlhf_api.algorithms import Scope, Task
from rlhf_api.algorithms.graph import RewardPart
from rlhf_common.samples import Lease
from rlhf_coordinator.state.sample import Sample


class ScoringTable:
    """The tasks that score the samples of one iteration.

    A sample is complete when it has no open or leased task, and no missing task of its group.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        """`tasks`: the scoring tasks of the graph, each producing one field."""
        self._field_of: Mapping[str, str] = {task.name: task.produces[0] for task in tasks}
        self._own = frozenset(task.name for task in tasks if task.scope is Scope.SAMPLE)
        self._parts: Mapping[str, RewardPart] = {task.name: task.part for task in tasks if task.part}
        self._unscored: dict[int, None] = {}
        self._leased: dict[str, set[tuple[int, str]]] = {}
        self.retried = 0
        """Number of failed scoring attempts whose task was opened again."""

    def unscored(self) -> Collection[int]:
        """Return the samples with open tasks of their own, in the order in which they got one."""
        return self._unscored.keys()

    def tasks_on(self, worker: str) -> Collection[tuple[int, str]]:
        """Return the leased tasks of a worker: (sample, task)."""
        return self._leased.get(worker, ())

    def open_all(self, sample: Sample) -> None:
        """Open all own tasks of a finished response, and mark those of its group as missing."""
        sample.open_tasks = set(self._own)
        sample.group_tasks = set(self._field_of) - self._own
        if sample.open_tasks:
            self._unscored[sample.index] = None

    def lease(self, sample: Sample, tasks: Iterable[str], worker: str) -> int:
        """Lease open tasks of a sample to a worker, all under one new attempt; return the attempt."""
        sample.attempt += 1
        for task in tasks:
            if task in self._own:
                sample.open_tasks.remove(task)
            sample.scoring[task] = Lease(worker, sample.attempt)
            self._leased.setdefault(worker, set()).add((sample.index, task))
        if not sample.open_tasks:
            self._unscored.pop(sample.index, None)
        return sample.attempt

    def score(self, sample: Sample, task: str, values: bytes | None) -> bool:
        """Store the result of a leased task (float32; None for an abstention). Return whether the sample is
        complete."""
        self._end_lease(sample, task)
        return self._store(sample, task, values)

    def restore(self, sample: Sample, task: str, values: bytes | None) -> bool:
        """Restore the result of an open task from the journal. Return whether the sample is complete."""
        if task in self._own:
            sample.open_tasks.remove(task)
            if not sample.open_tasks:
                self._unscored.pop(sample.index, None)
        return self._store(sample, task, values)

    def fail(self, sample: Sample, task: str, worker: str, not_before: float) -> int:
        """End the lease of a task that failed on a worker, and return its failed attempts on the sample.

        The sample's failed tasks are not retried before `not_before`.
        """
        self._end_lease(sample, task)
        self._open(sample, task)
        sample.failures[task] += 1
        sample.failed_on[task] = worker
        sample.not_before = not_before
        self.retried += 1
        return sample.failures[task]

    def reclaim(self, worker: str, samples: Sequence[Sample]) -> tuple[tuple[int, str], ...]:
        """End all leases of a worker, and reopen own tasks of samples; return the leased tasks, sorted.

        `samples`: all samples of the iteration, by index.
        """
        tasks = tuple(sorted(self.tasks_on(worker)))
        for index, task in tasks:
            self._end_lease(samples[index], task)
            self._open(samples[index], task)
        return tasks

    def _end_lease(self, sample: Sample, task: str) -> None:
        self._leased[sample.scoring.pop(task).worker].discard((sample.index, task))

    def release(self, sample: Sample, task: str) -> None:
        """End the lease of a task, without a result."""
        self._end_lease(sample, task)

    def drop(self, sample: Sample) -> None:
        """Drop all open and leased tasks of a sample."""
        for task in tuple(sample.scoring):
            self._end_lease(sample, task)
        sample.open_tasks, sample.group_tasks = set(), set()
        self._unscored.pop(sample.index, None)

    def _open(self, sample: Sample, task: str) -> None:
        if task in self._own:
            sample.open_tasks.add(task)
            self._unscored[sample.index] = None

    def _store(self, sample: Sample, task: str, values: bytes | None) -> bool:
        if values is not None:
            sample.fields[self._field_of[task]] = values
        elif task not in self._parts:
            sample.abstained = True
        sample.group_tasks.discard(task)
        complete = not sample.open_tasks and not sample.scoring and not sample.group_tasks
        if complete and self._parts:
            self._combine(sample)
        return complete

    def _combine(self, sample: Sample) -> None:
        """Combine the rewards of a complete sample; it abstains if a combination gives no number."""
        rewards_by_part: dict[RewardPart, dict[str, float]] = {}
        for task, part in self._parts.items():
            of_field = rewards_by_part.setdefault(replace(part, name=""), {})
            if (values := sample.fields.get(self._field_of[task])) is not None:
                of_field[part.name] = float(np.frombuffer(values, "<f4")[0])
        for part, rewards in rewards_by_part.items():
            number = part.combination.combine(rewards)
            if number is None:
                sample.abstained = True
            else:
                sample.fields[part.of] = np.array([number], "<f4").tobytes()
