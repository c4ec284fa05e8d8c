"""The sample ledger of one iteration: every sample is in exactly one state, and nothing is lost or counted twice.

  queued -> decoding@worker -> generated -> scored -> trained
              |   ^  `-> migrating -> queued (with its tokens)
              `---'  worker lost: back to queued with the tokens it reported

Fencing: every hand-out of a sample (to decode, or to score one of its tasks) gets a higher epoch, and what a worker
says under another epoch than that of its own hand-out is ignored. Epochs of a coordinator start at its own epoch times
2^16, so hand-outs of an earlier coordinator never match. Tokens may be kept from whoever held them last, because they
depend on (random_key, position) alone.
Rule: pure; no clock, no I/O; every transition returns what changed. Must never invent a result: a failed task is open.
When the process dies the ledger is rebuilt from the journal: finished responses and scores survive, the rest is queued.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_operator.coordinator.sample import (
    ITEM_BYTES,
    Handout,
    Response,
    Sample,
    SampleState,
    first_tokens,
    join_spans,
)

EPOCHS_PER_COORDINATOR: Final = 1 << 16
"""Hand-outs of one sample by one coordinator process; a sample is handed out a few times at most."""


@dataclass(frozen=True, slots=True)
class Released:
    """What a lost or reconnecting worker gave back."""

    queued: tuple[int, ...]
    """Samples back in the queue."""
    tasks: tuple[tuple[int, str], ...]
    """(sample, task) open again."""


class Ledger:
    """The samples of one iteration."""

    def __init__(self, iteration: int, size: int, tasks: Sequence[Task], coordinator_epoch: int) -> None:
        """`tasks`: the scoring tasks of the graph, each producing one field."""
        self.iteration = iteration
        self._base = coordinator_epoch * EPOCHS_PER_COORDINATOR
        self._produces = {task.name: task.produces[0] for task in tasks}
        self.samples = [Sample(index, epoch=self._base) for index in range(size)]
        self._counts: Counter[SampleState] = Counter({SampleState.QUEUED: size})
        self._queue: list[tuple[int, int]] = [(0, index) for index in range(size)]
        self._unscored: dict[int, None] = {}
        self._decoding: dict[str, set[int]] = {}
        self._scoring: dict[str, set[tuple[int, str]]] = {}
        self.tokens = 0
        """Response tokens known, over all samples."""
        self.returned = 0
        """Hand-outs to decode that were taken back (worker lost, reconnected, or migrated)."""
        self.retried = 0
        """Scoring tries that failed and were or will be repeated."""
        self.migrated = 0
        """Samples moved from a live worker to another."""

    # ---------------------------------------------------------------- reading

    def counts(self) -> dict[str, int]:
        """State -> samples in it; sums to the size."""
        return {state.value: self._counts[state] for state in SampleState}

    def count(self, *states: SampleState) -> int:
        """Samples in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def all_generated(self) -> bool:
        """No sample is waiting for tokens."""
        return not self.count(SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)

    @property
    def all_scored(self) -> bool:
        """Every sample has every field it needs; the only state in which training may start."""
        return self.count(SampleState.SCORED, SampleState.TRAINED) == len(self.samples)

    def queued(self, limit: int) -> list[int]:
        """The next samples to hand out: those with most tokens first (they end last), then by index."""
        return [index for _, index in self._queue[:limit]]

    def unscored(self) -> Collection[int]:
        """Samples with open tasks, in the order they finished."""
        return self._unscored.keys()

    def decoding_on(self, worker: str) -> int:
        """Samples this worker decodes."""
        return len(self._decoding.get(worker, ()))

    def scoring_on(self, worker: str) -> int:
        """Tasks this worker does."""
        return len(self._scoring.get(worker, ()))

    # ---------------------------------------------------------------- generation

    def assign(self, index: int, worker: str) -> int:
        """Hands a queued sample to a worker to decode; returns the epoch of the hand-out."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._dequeue(sample)
        sample.epoch += 1
        sample.decoding = Handout(worker, sample.epoch)
        if not sample.decoded_by or sample.decoded_by[-1] != worker:
            sample.decoded_by.append(worker)
        self._decoding.setdefault(worker, set()).add(index)
        self._move(sample, SampleState.DECODING)
        return sample.epoch

    def progress(self, index: int, epoch: int, worker: str, offset: int, more: Response) -> int:
        """Adds tokens that were decoded; returns how many are new (0 when the message is stale or says nothing new)."""
        sample = self._held(index, epoch, worker)
        known = len(sample.response) if sample else 0
        if sample is None or offset > known or offset + len(more) <= known:
            return 0
        self._extend(sample, offset, more)
        return len(sample.response) - known

    def finish(self, index: int, epoch: int, worker: str, response: Response, reason: str, text: str) -> bool:
        """A whole response; False when stale."""
        sample = self._held(index, epoch, worker)
        if sample is None:
            return False
        self._undecode(sample)
        self._generated(sample, response, reason, text)
        return True

    def withdraw(self, index: int) -> tuple[str, int]:
        """Marks a decoding sample as on its way out of its worker; returns (worker, epoch) for the request."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding.worker, sample.decoding.epoch

    def withdrawn(self, index: int, epoch: int, worker: str, response: Response) -> bool:
        """A migrating sample came back with its tokens and is queued for another worker; False when stale."""
        sample = self._held(index, epoch, worker)
        if sample is None or sample.state is not SampleState.MIGRATING:
            return False
        self.migrated += 1
        self._requeue(sample, response)
        return True

    def release(self, worker: str, held: Mapping[int, tuple[int, Response]] | None = None) -> Released:
        """Takes back all a worker has: it is lost, or gave back `held` (sample -> epoch, tokens) in a new session.

        Tokens of `held` are kept if the sample is now queued and nobody decoded it under a later epoch since.
        """
        given = dict(held or {})
        queued = sorted(self._decoding.get(worker, ()))
        for index in queued:
            sample = self.samples[index]
            assert sample.decoding is not None
            epoch, response = given.pop(index, (-1, sample.response))
            self._requeue(sample, response if epoch == sample.decoding.epoch else sample.response)
        for index, (epoch, response) in given.items():
            self._keep_tokens(index, epoch, response)
        return Released(tuple(queued), self._release_tasks(worker))

    # ---------------------------------------------------------------- scoring

    def assign_scores(self, index: int, tasks: Iterable[str], worker: str) -> int:
        """Hands open tasks of a generated sample to a worker, all under one new epoch, which is returned."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        sample.epoch += 1
        for task in tasks:
            sample.open_tasks.remove(task)
            sample.scoring[task] = Handout(worker, sample.epoch)
            self._scoring.setdefault(worker, set()).add((index, task))
        if not sample.open_tasks:
            del self._unscored[index]
        return sample.epoch

    def score(self, index: int, epoch: int, worker: str, task: str, values: bytes | None) -> bool:
        """A task's result (float32; None: abstained); False when stale. The last one makes the sample scored."""
        if not self._scores(index, epoch, worker, task):
            return False
        self._close_task(self.samples[index], task)
        self._scored(self.samples[index], task, values)
        return True

    def fail_score(self, index: int, epoch: int, worker: str, task: str, not_before: float) -> int:
        """A task failed on a sample and is open again, to be tried from `not_before` on.

        Returns its failed tries so far; 0 when the message is stale.
        """
        if not self._scores(index, epoch, worker, task):
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

    # ---------------------------------------------------------------- rebuilding from the journal

    def restore_response(self, index: int, response: Response, reason: str, text: str) -> None:
        """A finished response of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._dequeue(sample)
        self._generated(sample, response, reason, text)

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

    def _held(self, index: int, epoch: int, worker: str) -> Sample | None:
        if not 0 <= index < len(self.samples):
            return None
        sample = self.samples[index]
        return sample if sample.decoding == Handout(worker, epoch) else None

    def _scores(self, index: int, epoch: int, worker: str, task: str) -> bool:
        return 0 <= index < len(self.samples) and self.samples[index].scoring.get(task) == Handout(worker, epoch)

    def _queue_key(self, sample: Sample) -> tuple[int, int]:
        return -len(sample.response), sample.index

    def _dequeue(self, sample: Sample) -> None:
        del self._queue[bisect_left(self._queue, self._queue_key(sample))]

    def _undecode(self, sample: Sample) -> None:
        assert sample.decoding is not None
        self._decoding[sample.decoding.worker].discard(sample.index)
        sample.decoding = None

    def _extend(self, sample: Sample, offset: int, more: Response) -> None:
        known = sample.response
        cut = offset * ITEM_BYTES
        self.tokens += offset + len(more) - len(known)
        sample.response = Response(
            known.tokens[:cut] + more.tokens,
            known.log_probabilities[:cut] + more.log_probabilities,
            join_spans(first_tokens(known.versions, offset), more.versions),
        )

    def _requeue(self, sample: Sample, response: Response) -> None:
        self._undecode(sample)
        if len(response) > len(sample.response):
            self.tokens += len(response) - len(sample.response)
            sample.response = response
        self.returned += 1
        self._move(sample, SampleState.QUEUED)
        insort(self._queue, self._queue_key(sample))

    def _keep_tokens(self, index: int, epoch: int, response: Response) -> None:
        if not 0 <= index < len(self.samples):
            return
        sample = self.samples[index]
        last_handed_out = sample.epoch if sample.epoch > self._base else epoch
        fresh = epoch == last_handed_out and epoch <= sample.epoch
        if sample.state is SampleState.QUEUED and fresh and len(response) > len(sample.response):
            self._dequeue(sample)
            self.tokens += len(response) - len(sample.response)
            sample.response = response
            insort(self._queue, self._queue_key(sample))

    def _generated(self, sample: Sample, response: Response, reason: str, text: str) -> None:
        self.tokens += len(response) - len(sample.response)
        sample.response = response
        sample.finish_reason = reason
        sample.text = text
        sample.open_tasks = set(self._produces)
        self._move(sample, SampleState.GENERATED)
        if sample.open_tasks:
            self._unscored[sample.index] = None
        else:
            self._move(sample, SampleState.SCORED)

    def _release_tasks(self, worker: str) -> tuple[tuple[int, str], ...]:
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
