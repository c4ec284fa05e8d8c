"""The scoring half of the sample ledger: open tasks, who does which, what came of them.

Rule: as of `ledger`, of which this is a part: pure; every lease has a higher attempt; a failed task is open again.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from rlhf_api.algorithms import Task
from rlhf_coordinator.state.sample import Lease, Sample, SampleState


class Scoring:
    """Samples by state, and the tasks that score them."""

    def __init__(self, iteration: int, size: int, tasks: Sequence[Task], first_attempt: int) -> None:
        """`tasks`: the scoring tasks of the graph, each producing one field."""
        self.iteration = iteration
        self._produces = {task.name: task.produces[0] for task in tasks}
        self.samples = [Sample(index, attempt=first_attempt) for index in range(size)]
        self._counts: Counter[SampleState] = Counter({SampleState.QUEUED: size})
        self._unscored: dict[int, None] = {}
        self._scoring: dict[str, set[tuple[int, str]]] = {}
        self.retried = 0
        """Scoring tries that failed and were or will be repeated."""

    # ---------------------------------------------------------------- reading

    def counts(self) -> dict[str, int]:
        """State -> samples in it; sums to the size."""
        return {state.value: self._counts[state] for state in SampleState}

    def count(self, *states: SampleState) -> int:
        """Samples in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def unfinished(self) -> int:
        """Samples whose response is not complete."""
        return self.count(SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)

    @property
    def all_generated(self) -> bool:
        """No sample is waiting for tokens."""
        return not self.unfinished

    @property
    def all_scored(self) -> bool:
        """Every sample has every field it needs; the only state in which training may start."""
        return self.count(SampleState.SCORED, SampleState.TRAINED) == len(self.samples)

    def unscored(self) -> Collection[int]:
        """Samples with open tasks, in the order they finished."""
        return self._unscored.keys()

    def scoring_on(self, worker: str, tasks: Collection[str] | None = None) -> int:
        """Tasks this worker does: all, or those of these names."""
        doing = self._scoring.get(worker, ())
        return len(doing) if tasks is None else sum(task in tasks for _, task in doing)

    # ---------------------------------------------------------------- changing

    def assign_scores(self, index: int, tasks: Iterable[str], worker: str) -> int:
        """Lease open tasks of a generated sample to a worker, all under one new attempt; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        sample.attempt += 1
        for task in tasks:
            sample.open_tasks.remove(task)
            sample.scoring[task] = Lease(worker, sample.attempt)
            self._scoring.setdefault(worker, set()).add((index, task))
        if not sample.open_tasks:
            del self._unscored[index]
        return sample.attempt

    def score(self, index: int, attempt: int, worker: str, task: str, values: bytes | None) -> bool:
        """A task's result (float32; None: abstained); False when stale. The last one makes the sample scored."""
        if not self._scores(index, attempt, worker, task):
            return False
        self._close_task(self.samples[index], task)
        self._scored(self.samples[index], task, values)
        return True

    def fail_score(self, index: int, attempt: int, worker: str, task: str, not_before: float) -> int:
        """A task failed on a sample and is open again, to be tried from `not_before` on.

        Returns its failed tries so far; 0 when the message is stale.
        """
        if not self._scores(index, attempt, worker, task):
            return 0
        sample = self.samples[index]
        self._close_task(sample, task)
        self._open_task(sample, task)
        sample.failures[task] += 1
        sample.failed_on[task] = worker
        sample.not_before = not_before
        self.retried += 1
        return sample.failures[task]

    def train(self) -> None:
        """The whole batch was trained on; only once, and only when all of it is scored."""
        if self.count(SampleState.SCORED) != len(self.samples):
            raise ValueError(f"iteration {self.iteration}: cannot be trained, its samples are {self.counts()}")
        for sample in self.samples:
            self._move(sample, SampleState.TRAINED)

    def restore_score(self, index: int, task: str, values: bytes | None) -> None:
        """A score of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        sample.open_tasks.remove(task)
        if not sample.open_tasks:
            self._unscored.pop(index, None)
        self._scored(sample, task, values)

    # ---------------------------------------------------------------- inside

    def _require(self, sample: Sample, state: SampleState) -> None:
        if sample.state is not state:
            raise ValueError(f"sample {self.iteration}/{sample.index} is {sample.state}, not {state}")

    def _move(self, sample: Sample, state: SampleState) -> None:
        self._counts[sample.state] -= 1
        self._counts[state] += 1
        sample.state = state

    def _scores(self, index: int, attempt: int, worker: str, task: str) -> bool:
        return 0 <= index < len(self.samples) and self.samples[index].scoring.get(task) == Lease(worker, attempt)

    def _reclaim_tasks(self, worker: str) -> tuple[tuple[int, str], ...]:
        tasks = tuple(sorted(self._scoring.get(worker, ())))
        for index, task in tasks:
            self._close_task(self.samples[index], task)
            self._open_task(self.samples[index], task)
        return tasks

    def _close_task(self, sample: Sample, task: str) -> None:
        self._scoring[sample.scoring.pop(task).worker].discard((sample.index, task))

    def _open_task(self, sample: Sample, task: str) -> None:
        sample.open_tasks.add(task)
        self._unscored[sample.index] = None

    def _scored(self, sample: Sample, task: str, values: bytes | None) -> None:
        if values is None:
            sample.abstained = True
        else:
            sample.fields[self._produces[task]] = values
        if not sample.open_tasks and not sample.scoring:
            self._move(sample, SampleState.SCORED)
