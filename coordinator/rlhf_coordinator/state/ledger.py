"""The sample ledger of one iteration: every sample is in exactly one state, and nothing is lost or counted twice.

  queued -> decoding@worker -> generated -> scored -> trained
              |   ^  `-> migrating -> queued (with its tokens), or decoding@destination (with its KV cache)
              `---'  worker lost: back to queued with the tokens it reported

Fencing: every lease of a sample (to decode it, or to score some of its tasks) has a higher attempt than the one before.
What a worker says of a sample under another attempt than that of its lease is ignored. Attempts of a coordinator start
at its epoch times 2^16, so leases of an earlier coordinator never match. Tokens may be kept from whoever held them
last, because they depend on (random_key, position) alone.
A sample that migrates with its KV cache is its source's until the source answers, or the destination says anything of
it under the attempt it was promised: that is the one moment at which it becomes the destination's.

The ledger owns the states and refuses what is out of order; who decodes is in its decoding table, who scores in its
scoring table.
Rule: pure; no clock, no I/O. What a worker says under a stale attempt changes nothing, and the answer says so; an order
that no state allows raises ValueError. Must never invent a result: a failed task is open.
When the process dies the ledger is rebuilt from the journal: finished responses and scores survive, the rest is queued.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_api.samples import Lease
from rlhf_coordinator.state.decoding_table import DecodingTable
from rlhf_coordinator.state.sample import PackedResponse, Sample, SampleState
from rlhf_coordinator.state.scoring_table import ScoringTable

ATTEMPTS_PER_COORDINATOR: Final = 1 << 16
"""Leases of one sample by one coordinator process: far more than the few that a sample has at most."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What was taken back from a lost or reconnecting worker."""

    queued: tuple[int, ...]
    """Samples back in the queue."""
    tasks: tuple[tuple[int, str], ...]
    """(sample, task) open again."""


class Ledger:
    """The samples of one iteration."""

    def __init__(self, iteration: int, size: int, tasks: Sequence[Task], coordinator_epoch: int) -> None:
        """`tasks`: the scoring tasks of the graph, each producing one field. `coordinator_epoch`: counts the processes
        of the job's coordinator."""
        self.iteration = iteration
        self._first_attempt = coordinator_epoch * ATTEMPTS_PER_COORDINATOR
        self.samples = [Sample(index, attempt=self._first_attempt) for index in range(size)]
        self._counts: Counter[SampleState] = Counter({SampleState.QUEUED: size})
        self._decoding = DecodingTable(size)
        self._scoring = ScoringTable(tasks)
        self.tokens = 0
        """Response tokens known, over all samples."""
        self.returned = 0
        """Leases to decode that were taken back (worker lost, reconnected, or migrated without KV cache)."""
        self.migrated = 0
        """Samples moved from a live worker to another, or to the queue for another."""

    # ---------------------------------------------------------------- reading

    def counts(self) -> dict[str, int]:
        """Return state -> samples in it; the numbers sum to the size of the batch."""
        return {state.value: self._counts[state] for state in SampleState}

    def count(self, *states: SampleState) -> int:
        """Return how many samples are in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def unfinished(self) -> int:
        """How many samples have no complete response."""
        return self.count(SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)

    @property
    def all_generated(self) -> bool:
        """Whether every response is complete."""
        return not self.unfinished

    @property
    def all_scored(self) -> bool:
        """Whether every sample has every field that it needs; training starts in no other state."""
        return self.count(SampleState.SCORED, SampleState.TRAINED) == len(self.samples)

    @property
    def retried(self) -> int:
        """How many scoring tries failed and were or will be repeated."""
        return self._scoring.retried

    def queued(self, limit: int) -> list[int]:
        """Return the next samples to lease: those with most tokens first (they end last), then by index."""
        return self._decoding.queued(limit)

    def decodes(self, index: int, attempt: int, worker: str) -> bool:
        """Return whether this worker has this sample under this attempt."""
        return 0 <= index < len(self.samples) and self.samples[index].decoding == Lease(worker, attempt)

    def decoding_on(self, worker: str) -> int:
        """Return how many samples this worker decodes, those on their way out included."""
        return len(self._decoding.decoding_on(worker))

    def arriving_on(self, worker: str) -> int:
        """Return how many samples are on their way to this worker with their KV cache."""
        return len(self._decoding.arriving_on(worker))

    def held_by(self, worker: str) -> Collection[int]:
        """Return the samples that this worker decodes, those on their way out included, by index."""
        return sorted(self._decoding.decoding_on(worker))

    def bound_for(self, worker: str) -> Collection[int]:
        """Return the samples on their way to this worker with their KV cache, by index."""
        return sorted(self._decoding.arriving_on(worker))

    def unscored(self) -> Collection[int]:
        """Return the samples with open tasks, in the order in which they finished."""
        return self._scoring.unscored()

    def scoring_on(self, worker: str, tasks: Collection[str] | None = None) -> int:
        """Return how many tasks this worker does: all, or those of these names."""
        leased = self._scoring.tasks_on(worker)
        return len(leased) if tasks is None else sum(task in tasks for _, task in leased)

    # ---------------------------------------------------------------- generation

    def assign(self, index: int, worker: str) -> int:
        """Lease a queued sample to a worker to decode; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self._move(sample, SampleState.DECODING)
        return self._decoding.lease(sample, worker)

    def progress(self, index: int, attempt: int, worker: str, offset: int, more: PackedResponse) -> int:
        """Add tokens that were decoded; return how many are new (0 when the message is stale or says nothing new)."""
        sample = self._held(index, attempt, worker)
        known = len(sample.response) if sample else 0
        if sample is None or offset > known or offset + len(more) <= known:
            return 0
        self._lengthen(sample, sample.response.with_tokens(offset, more))
        return len(sample.response) - known

    def finish(self, index: int, attempt: int, worker: str, response: PackedResponse, reason: str, text: str) -> bool:
        """Take in a whole response; return False when it is stale."""
        sample = self._held(index, attempt, worker)
        if sample is None:
            return False
        self._decoding.end_lease(sample)
        self._generated(sample, response, reason, text)
        return True

    def reclaim(self, worker: str, held: Mapping[int, tuple[int, PackedResponse]] | None = None) -> Reclaimed:
        """Take back all that a worker has: it is lost, or brought `held` (sample -> attempt, tokens) to a new session.

        Tokens of `held` are kept if the sample is now queued and nobody decoded it under a later attempt since. What
        was on its way to this worker stays its source's; what was on its way out of it goes back to the queue.
        """
        given = dict(held or {})
        queued = self.held_by(worker)
        for index in queued:
            sample = self.samples[index]
            assert sample.decoding is not None
            attempt, response = given.pop(index, (-1, sample.response))
            self._requeue(sample, response if attempt == sample.decoding.attempt else sample.response)
        for index in self.bound_for(worker):
            self._decoding.cancel_arrival(self.samples[index])
        for index, (attempt, response) in given.items():
            self._keep_tokens(index, attempt, response)
        return Reclaimed(tuple(queued), self._scoring.reclaim(worker, self.samples))

    # ---------------------------------------------------------------- scoring and training

    def assign_scores(self, index: int, tasks: Iterable[str], worker: str) -> int:
        """Lease open tasks of a generated sample to a worker, all under one new attempt; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        return self._scoring.lease(sample, tasks, worker)

    def score(self, index: int, attempt: int, worker: str, task: str, values: bytes | None) -> bool:
        """Take in a task's result (float32; None: abstained); return False when it is stale. The last result makes the
        sample scored."""
        if not self._scores(index, attempt, worker, task):
            return False
        if self._scoring.score(self.samples[index], task, values):
            self._move(self.samples[index], SampleState.SCORED)
        return True

    def fail_score(self, index: int, attempt: int, worker: str, task: str, not_before: float) -> int:
        """A task failed on a sample and is open again, to be tried from `not_before` on.

        Return its failed tries so far; 0 when the message is stale.
        """
        if not self._scores(index, attempt, worker, task):
            return 0
        return self._scoring.fail(self.samples[index], task, worker, not_before)

    def train(self) -> None:
        """The whole batch was trained on; only once, and only when all of it is scored."""
        if self.count(SampleState.SCORED) != len(self.samples):
            raise ValueError(f"iteration {self.iteration}: cannot be trained, its samples are {self.counts()}")
        for sample in self.samples:
            self._move(sample, SampleState.TRAINED)

    # ---------------------------------------------------------------- migration

    def withdraw(self, index: int) -> tuple[str, int]:
        """Mark a decoding sample as on its way out of its worker; return (worker, attempt) for the request."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding.worker, sample.decoding.attempt

    def withdrawn(self, index: int, attempt: int, worker: str, response: PackedResponse) -> bool:
        """Queue a migrating sample that came back with its tokens for another worker; return False when it is stale."""
        sample = self._leaving(index, attempt, worker)
        if sample is None:
            return False
        self.migrated += 1
        self._requeue(sample, response)
        return True

    def unknown(self, index: int, attempt: int, worker: str) -> bool:
        """Queue a migrating sample that its worker does not know, with the tokens known; return False when stale."""
        sample = self._leaving(index, attempt, worker)
        if sample is not None:
            self._requeue(sample, sample.response)
        return sample is not None

    def migrate(self, index: int, destination: str) -> tuple[Lease, Lease]:
        """Promise a decoding sample to another worker; return the source's lease and the destination's."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        if destination == sample.decoding.worker:
            raise ValueError(f"sample {self.iteration}/{index} is decoded on {destination} already")
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding, self._decoding.promise(sample, destination)

    def moved(self, index: int, source: Lease, destination: Lease, response: PackedResponse) -> bool:
        """The source says that the destination has it now, with these tokens; return False when that is stale."""
        sample = self._leaving(index, source.attempt, source.worker)
        if sample is not None and sample.arriving is None:
            self._requeue(sample, response)  # the destination was lost meanwhile
            return True
        if sample is not None:
            self._arrive(sample)
        if self.samples[index].decoding != destination:
            return False
        self._lengthen(self.samples[index], response)
        return True

    def stayed(self, index: int, source: Lease) -> bool:
        """The source says that it keeps the sample; return False when that is stale: somebody else has it, or it is
        finished."""
        sample = self._leaving(index, source.attempt, source.worker)
        if sample is None:
            return False
        self._decoding.cancel_arrival(sample)
        sample.immovable = True
        self._move(sample, SampleState.DECODING)
        return True

    # ---------------------------------------------------------------- rebuilding from the journal

    def restore_response(self, index: int, response: PackedResponse, reason: str, text: str) -> None:
        """Take in a finished response of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self._generated(sample, response, reason, text)

    def restore_score(self, index: int, task: str, values: bytes | None) -> None:
        """Take in a score of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.GENERATED)
        if self._scoring.restore(sample, task, values):
            self._move(sample, SampleState.SCORED)

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

    def _held(self, index: int, attempt: int, worker: str) -> Sample | None:
        """The sample if this worker has it under this attempt; hearing of it from where it was to go moves it there."""
        if not 0 <= index < len(self.samples):
            return None
        sample = self.samples[index]
        if sample.arriving == Lease(worker, attempt):
            self._arrive(sample)
        return sample if self.decodes(index, attempt, worker) else None

    def _leaving(self, index: int, attempt: int, worker: str) -> Sample | None:
        """The sample if it is on its way out of this worker, where it was under this attempt."""
        own = self.decodes(index, attempt, worker)
        return self.samples[index] if own and self.samples[index].state is SampleState.MIGRATING else None

    def _arrive(self, sample: Sample) -> None:
        self._decoding.arrive(sample)
        self.migrated += 1
        self._move(sample, SampleState.DECODING)

    def _requeue(self, sample: Sample, response: PackedResponse) -> None:
        self._decoding.end_lease(sample)
        self._lengthen(sample, response)
        self.returned += 1
        self._move(sample, SampleState.QUEUED)
        self._decoding.enqueue(sample)

    def _lengthen(self, sample: Sample, response: PackedResponse) -> None:
        """What is known never shrinks."""
        if len(response) > len(sample.response):
            self.tokens += len(response) - len(sample.response)
            sample.response = response

    def _keep_tokens(self, index: int, attempt: int, response: PackedResponse) -> None:
        if not 0 <= index < len(self.samples):
            return
        sample = self.samples[index]
        last = sample.attempt if sample.attempt > self._first_attempt else attempt
        fresh = attempt == last and attempt <= sample.attempt
        if sample.state is SampleState.QUEUED and fresh and len(response) > len(sample.response):
            self._decoding.dequeue(sample)
            self._lengthen(sample, response)
            self._decoding.enqueue(sample)

    def _generated(self, sample: Sample, response: PackedResponse, reason: str, text: str) -> None:
        self.tokens += len(response) - len(sample.response)
        sample.response = response
        sample.finish_reason = reason
        sample.text = text
        self._move(sample, SampleState.GENERATED)
        self._scoring.open_all(sample)
        if not sample.open_tasks:
            self._move(sample, SampleState.SCORED)
