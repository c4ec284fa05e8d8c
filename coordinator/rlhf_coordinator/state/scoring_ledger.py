"""The part of the ledger about finished responses: their scoring, their results, and the batch for training.

Rule: pure. A message under a stale attempt changes nothing, and the return value says so.
"""

from collections.abc import Collection, Iterable, Sequence

from rlhf_api.algorithms import Task
from rlhf_api.algorithms.refill import RefillRule
from rlhf_common.samples import Lease
from rlhf_coordinator.state.batch_refill import BatchRefill
from rlhf_coordinator.state.group_table import GroupTable, GroupTask, Results
from rlhf_coordinator.state.sample import Sample, SampleState
from rlhf_coordinator.state.sample_states import SampleStates
from rlhf_coordinator.state.scoring_table import ScoringTable


class ScoringLedger(SampleStates):
    """The samples of one iteration, once their responses are finished."""

    def __init__(
        self,
        iteration: int,
        size: int,
        tasks: Sequence[Task],
        coordinator_epoch: int,
        siblings: int,
        group_size: int,
        refill: RefillRule,
        spare: int,
        greedy_baseline: bool,
    ) -> None:
        """Arguments as for `Ledger`."""
        super().__init__(iteration, size, coordinator_epoch, siblings, group_size, spare, greedy_baseline)
        self._scoring = ScoringTable(tasks)
        self._groups = GroupTable(tasks, group_size)
        self.refill = BatchRefill(refill, tasks, size // group_size)

    # ---------------------------------------------------------------- reading

    @property
    def retried(self) -> int:
        """Number of failed scoring attempts after which the task was opened again."""
        return self._scoring.retried

    def unscored(self) -> Collection[int]:
        """Return the samples with open tasks of their own, in the order in which they got one."""
        return self._scoring.unscored()

    def open_groups(self) -> Collection[GroupTask]:
        """Return the open (group, task) pairs, in the order in which they opened."""
        return self._groups.open()

    def members(self, group: int) -> list[Sample]:
        """Return the samples of a prompt's group that did not fail."""
        return self._groups.members(group, self.samples)

    def is_of_group(self, task: str) -> bool:
        """Return whether the unit of this task is a prompt's group."""
        return task in self._groups.names

    def scoring_on(self, worker: str, tasks: Collection[str] | None = None) -> int:
        """Return the number of (sample, task) pairs that this worker has leased: all, or those with these names."""
        leased = self._scoring.tasks_on(worker)
        return len(leased) if tasks is None else sum(task in tasks for _, task in leased)

    def tries(self, index: int, task: str) -> int:
        """Return the failures of a task on a sample, or, for a task of a group, the most on one of its samples."""
        members = self.members(self._groups.group_of(index)) if self.is_of_group(task) else [self.samples[index]]
        return max(sample.failures[task] for sample in members)

    def batch(self) -> list[tuple[Sample, bool]]:
        """Return the samples of the batch in their order, and for each whether it is masked out."""
        if not self.refill.rule.rounds:
            return [(sample, sample.failed) for sample in self.uncut_samples]
        return [
            (sample, masked or sample.failed)
            for group, masked in self.refill.batch()
            for sample in self.members_of(group)
        ]

    # ---------------------------------------------------------------- scoring and training

    def assign_scores(self, index: int, tasks: Iterable[str], worker: str) -> int:
        """Lease open tasks of a generated sample to a worker, all under one new attempt; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        return self._scoring.lease(sample, tasks, worker)

    def score(self, index: int, attempt: int, worker: str, task: str, values: bytes | None) -> bool:
        """Store a task's result (float32; None for an abstention); return False when it is stale.

        The last result makes the sample scored.
        """
        if not self._scores(index, attempt, worker, task):
            return False
        self._settle(self.samples[index], self._scoring.score(self.samples[index], task, values))
        return True

    def assign_group(self, group: int, task: str, worker: str) -> dict[int, int]:
        """Lease an open task of a prompt's group to a worker; return sample -> attempt for each of its samples."""
        members = self._groups.lease(group, task, self.samples)
        return {sample.index: self._scoring.lease(sample, (task,), worker) for sample in members}

    def score_in_group(
        self, index: int, attempt: int, worker: str, task: str, values: bytes | None
    ) -> tuple[bool, Results]:
        """Store the result of a group task for one sample.

        Return whether it is current, and the results of all samples of the group with the last one: they take effect
        together.
        """
        if not self._scores(index, attempt, worker, task):
            return False, {}
        results = self._groups.collect(index, task, values)
        for member in results or ():
            assert results is not None
            self._settle(self.samples[member], self._scoring.score(self.samples[member], task, results[member]))
        return True, results or {}

    def fail_score(self, index: int, attempt: int, worker: str, task: str, not_before: float) -> int:
        """Reopen a task that failed on a sample, for a retry from `not_before` on; a task of a group for the whole
        group.

        Return the failed attempts on the sample so far; 0 when the message is stale.
        """
        if not self._scores(index, attempt, worker, task):
            return 0
        if self.is_of_group(task):
            for member in self._groups.give_back(index, task):
                if member != index:
                    self._scoring.release(self.samples[member], task)
        return self._scoring.fail(self.samples[index], task, worker, not_before)

    def train(self) -> None:
        """Mark the scored samples as trained, except greedy baselines.

        Raises ValueError before all samples are scored or left out, and after samples were marked.
        """
        if not self.all_scored or self.count(SampleState.TRAINED):
            raise ValueError(f"iteration {self.iteration}: cannot be trained, its samples are {self.counts()}")
        for sample in self.samples:
            if sample.state is SampleState.SCORED and not sample.greedy:
                self._move(sample, SampleState.TRAINED)

    # ---------------------------------------------------------------- rebuilding from the journal

    def restore_score(self, index: int, task: str, values: bytes | None) -> None:
        """Restore a score of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        self._settle(sample, self._scoring.restore(sample, task, values))

    def restore_group(self, task: str, results: Results) -> None:
        """Restore the results of an earlier coordinator for all samples of a group."""
        for index in results:
            self._require(self.samples[index], SampleState.GENERATED)
        self._groups.restore(task, results.keys())
        for index, values in results.items():
            self._settle(self.samples[index], self._scoring.restore(self.samples[index], task, values))

    # ---------------------------------------------------------------- inside

    def _scores(self, index: int, attempt: int, worker: str, task: str) -> bool:
        return 0 <= index < len(self.samples) and self.samples[index].scoring.get(task) == Lease(worker, attempt)

    def _reclaim_tasks(self, worker: str) -> tuple[tuple[int, str], ...]:
        """Reopen all tasks of a worker; return them."""
        tasks = self._scoring.reclaim(worker, self.samples)
        for group, task in sorted(
            {(self._groups.group_of(index), task) for index, task in tasks if self.is_of_group(task)}
        ):
            self._groups.give_back(self.members(group)[0].index, task)
        return tasks

    def _settle(self, sample: Sample, complete: bool) -> None:
        """Update a sample and its group after a response or a result became known."""
        if complete:
            self._move(sample, SampleState.SCORED)
        self._groups.refresh(sample.index, self.samples)
        if complete:
            self._judge(sample.index)

    def _judge(self, index: int) -> None:
        """Drop the group of a sample if it is complete and no two rewards differ, and let the iteration grow if a round
        is left."""
        group = self._groups.group_of(index)
        members = self.members(group)
        if not self.refill.drops(group, members):
            return
        for sample in members:
            self._move(sample, SampleState.DROPPED)
        self._grow(self.refill.groups * self.group_size)
