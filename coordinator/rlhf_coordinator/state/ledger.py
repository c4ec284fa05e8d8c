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
Rule: pure; no clock, no I/O; every transition returns what changed. Must never invent a result: a failed task is open.
When the process dies the ledger is rebuilt from the journal: finished responses and scores survive, the rest is queued.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_coordinator.state.sample import (
    ITEM_BYTES,
    Lease,
    Response,
    Sample,
    SampleState,
    first_tokens,
    join_spans,
)
from rlhf_coordinator.state.scoring import Scoring

ATTEMPTS_PER_COORDINATOR: Final = 1 << 16
"""Leases of one sample by one coordinator process: far more than the few that a sample has at most."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What was taken back from a lost or reconnecting worker."""

    queued: tuple[int, ...]
    """Samples back in the queue."""
    tasks: tuple[tuple[int, str], ...]
    """(sample, task) open again."""


class Ledger(Scoring):
    """The samples of one iteration."""

    def __init__(self, iteration: int, size: int, tasks: Sequence[Task], coordinator_epoch: int) -> None:
        """`tasks`: the scoring tasks of the graph, each producing one field."""
        self._base = coordinator_epoch * ATTEMPTS_PER_COORDINATOR
        super().__init__(iteration, size, tasks, self._base)
        self._queue: list[tuple[int, int]] = [(0, index) for index in range(size)]
        self._decoding: dict[str, set[int]] = {}
        self._arriving: dict[str, set[int]] = {}
        self.tokens = 0
        """Response tokens known, over all samples."""
        self.returned = 0
        """Leases to decode that were taken back (worker lost, reconnected, or migrated without KV cache)."""
        self.migrated = 0
        """Samples moved from a live worker to another, or to the queue for another."""

    # ---------------------------------------------------------------- reading

    def queued(self, limit: int) -> list[int]:
        """The next samples to lease: those with most tokens first (they end last), then by index."""
        return [index for _, index in self._queue[:limit]]

    def decodes(self, index: int, attempt: int, worker: str) -> bool:
        """This worker has this sample under this attempt."""
        return 0 <= index < len(self.samples) and self.samples[index].decoding == Lease(worker, attempt)

    def decoding_on(self, worker: str) -> int:
        """Samples this worker decodes, those on their way out included."""
        return len(self._decoding.get(worker, ()))

    def arriving_on(self, worker: str) -> int:
        """Samples on their way to this worker with their KV cache."""
        return len(self._arriving.get(worker, ()))

    def held_by(self, worker: str) -> Collection[int]:
        """Samples this worker decodes, those on their way out included, by index."""
        return sorted(self._decoding.get(worker, ()))

    def bound_for(self, worker: str) -> Collection[int]:
        """Samples on their way to this worker with their KV cache, by index."""
        return sorted(self._arriving.get(worker, ()))

    # ---------------------------------------------------------------- generation

    def assign(self, index: int, worker: str) -> int:
        """Lease a queued sample to a worker to decode; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._dequeue(sample)
        sample.attempt += 1
        sample.decoding = Lease(worker, sample.attempt)
        if not sample.decoded_by or sample.decoded_by[-1] != worker:
            sample.decoded_by.append(worker)
        self._decoding.setdefault(worker, set()).add(index)
        self._move(sample, SampleState.DECODING)
        return sample.attempt

    def progress(self, index: int, attempt: int, worker: str, offset: int, more: Response) -> int:
        """Adds tokens that were decoded; returns how many are new (0 when the message is stale or says nothing new)."""
        sample = self._held(index, attempt, worker)
        known = len(sample.response) if sample else 0
        if sample is None or offset > known or offset + len(more) <= known:
            return 0
        self._extend(sample, offset, more)
        return len(sample.response) - known

    def finish(self, index: int, attempt: int, worker: str, response: Response, reason: str, text: str) -> bool:
        """A whole response; False when stale."""
        sample = self._held(index, attempt, worker)
        if sample is None:
            return False
        self._undecode(sample)
        self._generated(sample, response, reason, text)
        return True

    def reclaim(self, worker: str, held: Mapping[int, tuple[int, Response]] | None = None) -> Reclaimed:
        """Takes back all a worker has: it is lost, or gave back `held` (sample -> attempt, tokens) in a new session.

        Tokens of `held` are kept if the sample is now queued and nobody decoded it under a later attempt since. What
        was on its way to this worker stays its source's; what was on its way out of it goes back to the queue.
        """
        given = dict(held or {})
        queued = sorted(self._decoding.get(worker, ()))
        for index in queued:
            sample = self.samples[index]
            assert sample.decoding is not None
            attempt, response = given.pop(index, (-1, sample.response))
            self._requeue(sample, response if attempt == sample.decoding.attempt else sample.response)
        for index in sorted(self._arriving.get(worker, ())):
            self._disown(self.samples[index])
        for index, (attempt, response) in given.items():
            self._keep_tokens(index, attempt, response)
        return Reclaimed(tuple(queued), self._reclaim_tasks(worker))

    # ---------------------------------------------------------------- migration

    def withdraw(self, index: int) -> tuple[str, int]:
        """Marks a decoding sample as on its way out of its worker; returns (worker, attempt) for the request."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding.worker, sample.decoding.attempt

    def withdrawn(self, index: int, attempt: int, worker: str, response: Response) -> bool:
        """A migrating sample came back with its tokens and is queued for another worker; False when stale."""
        sample = self._leaving(index, attempt, worker)
        if sample is None:
            return False
        self.migrated += 1
        self._requeue(sample, response)
        return True

    def unknown(self, index: int, attempt: int, worker: str) -> bool:
        """A migrating sample's worker does not know it: it is queued with the tokens known; False when stale."""
        sample = self._leaving(index, attempt, worker)
        if sample is not None:
            self._requeue(sample, sample.response)
        return sample is not None

    def migrate(self, index: int, destination: str) -> tuple[Lease, Lease]:
        """Promises a decoding sample to another worker; returns whose it is and whose it is to be."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        if destination == sample.decoding.worker:
            raise ValueError(f"sample {self.iteration}/{index} is decoded on {destination} already")
        sample.attempt += 1
        sample.arriving = Lease(destination, sample.attempt)
        self._arriving.setdefault(destination, set()).add(index)
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding, sample.arriving

    def moved(self, index: int, source: Lease, destination: Lease, response: Response) -> bool:
        """The source says that the destination has it now, with these tokens; False when stale."""
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
        """The source says that it keeps the sample; False when stale: somebody else has it, or it is finished."""
        sample = self._leaving(index, source.attempt, source.worker)
        if sample is None:
            return False
        self._disown(sample)
        sample.immovable = True
        self._move(sample, SampleState.DECODING)
        return True

    # ---------------------------------------------------------------- rebuilding from the journal

    def restore_response(self, index: int, response: Response, reason: str, text: str) -> None:
        """A finished response of an earlier coordinator."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._dequeue(sample)
        self._generated(sample, response, reason, text)

    # ---------------------------------------------------------------- inside

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
        sample = self.samples[index] if 0 <= index < len(self.samples) else None
        mine = self.decodes(index, attempt, worker)
        return sample if mine and sample is not None and sample.state is SampleState.MIGRATING else None

    def _arrive(self, sample: Sample) -> None:
        """From here on it is the destination's."""
        arriving = sample.arriving
        assert arriving is not None
        self._undecode(sample)
        sample.decoding = arriving
        sample.decoded_by.append(arriving.worker)
        self._decoding.setdefault(arriving.worker, set()).add(sample.index)
        self.migrated += 1
        self._move(sample, SampleState.DECODING)

    def _disown(self, sample: Sample) -> None:
        """It is no longer on its way to anybody."""
        if sample.arriving is not None:
            self._arriving[sample.arriving.worker].discard(sample.index)
            sample.arriving = None

    def _queue_key(self, sample: Sample) -> tuple[int, int]:
        return -len(sample.response), sample.index

    def _dequeue(self, sample: Sample) -> None:
        del self._queue[bisect_left(self._queue, self._queue_key(sample))]

    def _undecode(self, sample: Sample) -> None:
        assert sample.decoding is not None
        self._decoding[sample.decoding.worker].discard(sample.index)
        sample.decoding = None
        self._disown(sample)

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
        self._lengthen(sample, response)
        self.returned += 1
        self._move(sample, SampleState.QUEUED)
        insort(self._queue, self._queue_key(sample))

    def _lengthen(self, sample: Sample, response: Response) -> None:
        """What is known never shrinks."""
        if len(response) > len(sample.response):
            self.tokens += len(response) - len(sample.response)
            sample.response = response

    def _keep_tokens(self, index: int, attempt: int, response: Response) -> None:
        if not 0 <= index < len(self.samples):
            return
        sample = self.samples[index]
        last_handed_out = sample.attempt if sample.attempt > self._base else attempt
        fresh = attempt == last_handed_out and attempt <= sample.attempt
        if sample.state is SampleState.QUEUED and fresh and len(response) > len(sample.response):
            self._dequeue(sample)
            self._lengthen(sample, response)
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
