"""The sample ledger of one iteration: every sample is in exactly one state. Rule: pure.

The usual way of a sample: queued, decoding, generated, scored, trained. A result under an attempt that is neither
leased nor promised changes nothing, and the return value says so. This module covers decoding, migration, failures and
cuts; `scoring_ledger` covers the steps after a finished response.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_api.algorithms import Task, samples_per_prompt
from rlhf_api.algorithms.refill import RefillRule
from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import Lease
from rlhf_coordinator.state.batch_refill import NO_REFILL
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.sample import PackedResponse, Sample, SampleState
from rlhf_coordinator.state.scoring_ledger import ScoringLedger


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """The revoked leases of a lost or reconnecting worker."""

    queued: tuple[int, ...]
    """Samples that are back in the queue."""
    tasks: tuple[tuple[int, str], ...]
    """(sample, task) pairs that are open again."""


def interleave_prompt_groups(spec: RLHFJobSpec) -> int:
    """Return the number of samples of a prompt that are interleaved with those of other prompts in the queue; 1 where
    the job does not draft from siblings."""
    speculation = spec.generation.speculation
    drafted = speculation.mode != "Disabled" and "Siblings" in speculation.drafters
    return samples_per_prompt(spec) if drafted else 1


class Ledger(ScoringLedger):
    """The samples of one iteration."""

    def __init__(
        self,
        iteration: int,
        size: int,
        tasks: Sequence[Task],
        coordinator_epoch: int,
        siblings: int = 1,
        group_size: int = 1,
        refill: RefillRule = NO_REFILL,
        spare: int = 0,
        greedy_baseline: bool = False,
    ) -> None:
        """`siblings`: see `interleave_prompt_groups`. `group_size`: samples of one prompt.

        `tasks`: the scoring tasks of the graph. `coordinator_epoch`: number of the job's coordinator processes so far.
        `spare`: number of samples to cut off, by whole prompts. `greedy_baseline`: the last sample of each prompt is
        one.
        """
        super().__init__(
            iteration, size, tasks, coordinator_epoch, siblings, group_size, refill, spare, greedy_baseline
        )
        self.tokens = 0
        """Number of known response tokens, over all samples."""
        self.returned = 0
        """Number of decode leases that ended with the sample in the queue again."""
        self.faulted: dict[int, None] = {}
        """Samples that had decode failures or were given up, in the order in which that was first recorded."""
        self.migrated = 0
        """Number of moves of samples: to another worker with the KV cache, or to the queue with their tokens."""
        self.carried: tuple[CarriedSample, ...] = ()
        """Carried samples that became the first samples, in their order."""
        self.streamed: list[int] = []
        """Prompts whose gradients ranks add before the batch is complete, in the order of the sum."""
        self.waiting: tuple[CarriedSample, ...] = ()
        """Samples that wait for a later iteration, in their order: those that earlier ones cut off, or of a window."""

    # ---------------------------------------------------------------- reading

    def queued(self, limit: int) -> list[int]:
        """Return at most `limit` queued samples: those with most tokens first, then by place among siblings and index.

        Samples that must be decoded alone are left out.
        """
        return self._decoding.queued(limit)

    def isolated(self) -> list[int]:
        """Return the queued samples that must be decoded alone, on a worker without other samples."""
        return self._decoding.isolated()

    def holds_isolated(self, worker: str) -> bool:
        """Return whether this worker decodes an isolated sample."""
        return any(self.samples[index].isolated for index in self._decoding.decoding_on(worker))

    def decodes(self, index: int, attempt: int, worker: str) -> bool:
        """Return whether this worker has this sample under this attempt."""
        return 0 <= index < len(self.samples) and self.samples[index].decoding == Lease(worker, attempt)

    def decoding_on(self, worker: str) -> int:
        """Return the number of samples that this worker decodes, including those that leave it."""
        return len(self._decoding.decoding_on(worker))

    def arriving_on(self, worker: str) -> int:
        """Return the number of samples that move to this worker with their KV cache."""
        return len(self._decoding.arriving_on(worker))

    def held_by(self, worker: str) -> Collection[int]:
        """Return the samples that this worker decodes, including those that leave it, by index."""
        return sorted(self._decoding.decoding_on(worker))

    def bound_for(self, worker: str) -> Collection[int]:
        """Return the samples that move to this worker with their KV cache, by index."""
        return sorted(self._decoding.arriving_on(worker))

    def take_places(self) -> list[tuple[int, str]]:
        """Return the changes of place since the last call, in order, as (sample, the worker that decodes it, empty if
        queued).
        """
        return self._decoding.take_places()

    # ---------------------------------------------------------------- generation

    def assign(self, index: int, worker: str) -> int:
        """Lease a queued sample to a worker for decoding; return the attempt."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self._move(sample, SampleState.DECODING)
        return self._decoding.lease(sample, worker)

    def progress(self, index: int, attempt: int, worker: str, offset: int, more: PackedResponse) -> int:
        """Add decoded tokens; return the number of new ones (0 when the message is stale, has none, or skips some)."""
        sample = self._leased_sample(index, attempt, worker)
        length = len(sample.response) if sample else 0
        if sample is None or offset > length or offset + len(more) <= length:
            return 0
        self._lengthen(sample, sample.response.with_tokens(offset, more))
        return len(sample.response) - length

    def finish(self, index: int, attempt: int, worker: str, response: PackedResponse, reason: str, text: str) -> bool:
        """Store a whole response; return False when it is stale."""
        sample = self._leased_sample(index, attempt, worker)
        if sample is None:
            return False
        self._decoding.end_lease(sample)
        self._generated(sample, response, reason, text)
        return True

    def reclaim(self, worker: str, reported: Mapping[int, tuple[int, PackedResponse]] | None = None) -> Reclaimed:
        """Revoke the leases of a worker that is lost, or that brought `reported` (sample -> attempt, tokens) to a new
        session.

        The ledger may keep reported tokens of a queued sample.
        """
        unclaimed = dict(reported or {})
        queued = self.held_by(worker)
        for index in queued:
            sample = self.samples[index]
            assert sample.decoding is not None
            attempt, response = unclaimed.pop(index, (-1, sample.response))
            self._requeue(sample, response if attempt == sample.decoding.attempt else sample.response)
        for index in self.bound_for(worker):
            self._decoding.cancel_arrival(self.samples[index])
        for index, (attempt, response) in unclaimed.items():
            self._keep_tokens(index, attempt, response)
        return Reclaimed(tuple(queued), self._reclaim_tasks(worker))

    # ---------------------------------------------------------------- samples that decoding fails on

    def record_failure(self, worker: str, why: str, retries: int) -> None:
        """Count the end of a worker as a failure of every sample that it decodes; call this before they are reclaimed.

        A single sample counts as the cause.
        """
        decoding = self.held_by(worker)
        for index in decoding:
            self._fault(self.samples[index], worker, why, retries, proven=len(decoding) == 1)

    def failed_on(
        self, index: int, attempt: int, worker: str, response: PackedResponse, why: str, retries: int
    ) -> bool:
        """Count a worker's failure on a sample, and queue it with its tokens.

        Return False when the message is stale.
        """
        sample = self._leased_sample(index, attempt, worker)
        if sample is None:
            return False
        self._lengthen(sample, response)
        self._fault(sample, worker, why, retries, proven=True)
        self._requeue(sample, sample.response)
        return True

    def give_up(self, index: int) -> None:
        """Leave a queued sample out of the iteration, and drop its response."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self.tokens -= len(sample.response)
        sample.response, sample.finish_reason, sample.text = PackedResponse(), "", ""
        sample.given_up = True
        self.faulted[index] = None
        self._move(sample, SampleState.FAILED)
        self._groups.refresh(index, self.samples)
        self._judge(index)

    def cut(self, groups: Iterable[int]) -> list[tuple[int, Lease]]:
        """Leave these prompts out of the iteration; return (sample, lease) of current and future decoders.

        Raises ValueError for more prompts than remain to be cut off.
        """
        decoded: list[tuple[int, Lease]] = []
        for group in groups:
            if not self.groups_to_cut:
                raise ValueError(f"iteration {self.iteration}: prompt {group} cannot be cut off, the batch needs it")
            self._groups.drop(group)
            for sample in self.members_of(group):
                decoded += [(sample.index, lease) for lease in (sample.decoding, sample.arriving) if lease]
                if sample.state is SampleState.QUEUED:
                    self._decoding.dequeue(sample)
                elif sample.decoding is not None:
                    self._decoding.end_lease(sample)
                self._scoring.drop(sample)
                self._move(sample, SampleState.CUT)
        return decoded

    def carry_over(self) -> tuple[CarriedSample, ...]:
        """Return the waiting samples, then the carried form of the samples that were cut off, in their order; final
        once the batch is complete."""
        cut = (CarriedSample.from_sample(sample) for sample in self.samples if sample.state is SampleState.CUT)
        return (*self.waiting, *cut)

    # ---------------------------------------------------------------- migration

    def withdraw(self, index: int) -> tuple[str, int]:
        """Mark a decoding sample as leaving its worker; return (worker, attempt) for the request."""
        sample = self.samples[index]
        self._require(sample, SampleState.DECODING)
        assert sample.decoding is not None
        self._move(sample, SampleState.MIGRATING)
        return sample.decoding.worker, sample.decoding.attempt

    def withdrawn(self, index: int, attempt: int, worker: str, response: PackedResponse) -> bool:
        """Queue a migrating sample that returned with its tokens; return False when the message is stale."""
        sample = self._leaving(index, attempt, worker)
        if sample is None:
            return False
        self.migrated += 1
        self._requeue(sample, response)
        return True

    def unknown(self, index: int, attempt: int, worker: str) -> bool:
        """Queue a migrating sample that its worker does not know, with its known tokens; return False when the message
        is stale."""
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
        """Record the source's message that the destination has the sample, with these tokens; return False when it is
        stale."""
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
        """Record the source's message that it still has the sample, which then is not moved with its KV cache again.

        Return False when the message is stale.
        """
        sample = self._leaving(index, source.attempt, source.worker)
        if sample is None:
            return False
        self._decoding.cancel_arrival(sample)
        sample.immovable = True
        self._move(sample, SampleState.DECODING)
        return True

    # ---------------------------------------------------------------- rebuilding from the journal

    def restore_response(self, index: int, response: PackedResponse, reason: str, text: str) -> None:
        """Store a whole response of a queued sample, without a lease."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self._generated(sample, response, reason, text)

    def restore_tokens(self, index: int, response: PackedResponse) -> None:
        """Store known tokens of a queued sample, if they are more than it has."""
        sample = self.samples[index]
        self._require(sample, SampleState.QUEUED)
        self._decoding.dequeue(sample)
        self._lengthen(sample, response)
        self._decoding.enqueue(sample)

    def resume_partial(self, carried: Sequence[CarriedSample], waiting: Sequence[CarriedSample] = ()) -> None:
        """Make carried samples the first samples of the iteration, which must still be queued.

        `waiting`: samples that wait for a later iteration.
        """
        self.carried, self.waiting = tuple(carried), tuple(waiting)
        for index, resumed in enumerate(self.carried):
            sample = self.samples[index]
            sample.origin, sample.carried, sample.decoded_by = (
                resumed.origin,
                resumed.response,
                list(resumed.decoded_by),
            )
            sample.drafted_tokens, sample.accepted_tokens = resumed.drafted_tokens, resumed.accepted_tokens
            sample.episode = resumed.episode
            if resumed.failed:
                self.give_up(index)
            elif resumed.finish_reason:
                self.restore_response(index, resumed.response, resumed.finish_reason, resumed.text)
            else:
                self.restore_tokens(index, resumed.response)

    # ---------------------------------------------------------------- inside

    def _leased_sample(self, index: int, attempt: int, worker: str) -> Sample | None:
        """Return the sample if this worker decodes it under this attempt, else None.

        A sample that was promised to the worker under this attempt moves there first.
        """
        if not 0 <= index < len(self.samples):
            return None
        sample = self.samples[index]
        if sample.arriving == Lease(worker, attempt):
            self._arrive(sample)
        return sample if self.decodes(index, attempt, worker) else None

    def _leaving(self, index: int, attempt: int, worker: str) -> Sample | None:
        """Return the sample if it is leaving this worker, which has it under this attempt."""
        own = self.decodes(index, attempt, worker)
        return self.samples[index] if own and self.samples[index].state is SampleState.MIGRATING else None

    def _arrive(self, sample: Sample) -> None:
        self._decoding.arrive(sample)
        self.migrated += 1
        self._move(sample, SampleState.DECODING)

    def _fault(self, sample: Sample, worker: str, why: str, retries: int, *, proven: bool) -> None:
        self.faulted[sample.index] = None
        sample.faults = sample.faults.and_another(worker, why, len(sample.response), proven=proven)
        sample.isolated = sample.faults.isolates(retries)

    def _requeue(self, sample: Sample, response: PackedResponse) -> None:
        self._decoding.end_lease(sample)
        self._lengthen(sample, response)
        self.returned += 1
        self._move(sample, SampleState.QUEUED)
        self._decoding.enqueue(sample)

    def _lengthen(self, sample: Sample, response: PackedResponse) -> None:
        """Replace the known response if this one is longer."""
        if len(response) > len(sample.response):
            self.tokens += len(response) - len(sample.response)
            sample.response = response
            sample.faults = sample.faults.after(len(response))
            sample.isolated = sample.isolated and sample.faults.count > 0

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
        self._settle(sample, not (sample.open_tasks or sample.group_tasks))
