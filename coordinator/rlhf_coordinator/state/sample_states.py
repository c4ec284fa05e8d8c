"""The samples of an iteration and the state of each, by which an iteration is known to be generated, or scored.

Rule: pure, and the lowest part of the ledger, which alone changes it: what a state means, and how a sample comes from
one to the next, is said there. The numbers of samples by state always sum to the size of the iteration.
"""

from collections import Counter
from typing import Final

from rlhf_coordinator.state.decoding_table import DecodingTable
from rlhf_coordinator.state.sample import Origin, PackedResponse, Sample, SampleState

ATTEMPTS_PER_COORDINATOR: Final = 1 << 16
"""Leases of one sample by one coordinator process: far more than the few that a sample has at most."""


class SampleStates:
    """The samples of one iteration, of which so many in a row are of one prompt."""

    def __init__(
        self,
        iteration: int,
        size: int,
        coordinator_epoch: int,
        siblings: int,
        group_size: int,
        spare: int,
        greedy_baseline: bool,
    ) -> None:
        """As of a `Ledger`; every sample is queued."""
        self.iteration = self.version = iteration
        """`version`: of the weights that draw and score its samples; one before where training is behind."""
        self._first_attempt = coordinator_epoch * ATTEMPTS_PER_COORDINATOR
        self._counts: Counter[SampleState] = Counter({SampleState.QUEUED: size})
        self._decoding = DecodingTable(size, siblings)
        self.group_size, self._spare, self._greedy_baseline = group_size, spare, greedy_baseline
        self.samples = [self._new(index) for index in range(size)]

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
        done = (SampleState.SCORED, SampleState.TRAINED, SampleState.FAILED, SampleState.DROPPED, SampleState.CUT)
        return self.count(*done) == len(self.samples) and not self.groups_to_cut

    @property
    def groups_to_cut(self) -> int:
        """How many prompts are still to be cut off."""
        return (self._spare - self.count(SampleState.CUT)) // self.group_size

    def finished_groups(self) -> list[int]:
        """Return the prompts whose samples are all generated, or failed, and not cut off."""
        waiting = {SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING, SampleState.CUT}
        groups = len(self.samples) // self.group_size
        return [group for group in range(groups) if not any(one.state in waiting for one in self.members_of(group))]

    def members_of(self, group: int) -> list[Sample]:
        """Return all samples of a prompt."""
        return self.samples[group * self.group_size : (group + 1) * self.group_size]

    def continued_by(self, index: int, response: PackedResponse) -> bool:
        """Return whether a response was drawn by the iteration's weights, but for what its sample was carried with."""
        carried = self.samples[index].carried if 0 <= index < len(self.samples) else PackedResponse()
        return response.continues(carried, self.version)

    @property
    def kept(self) -> list[Sample]:
        """The samples that were not cut off, by index: those of the batch, once it is complete."""
        return [sample for sample in self.samples if sample.state is not SampleState.CUT]

    @property
    def trainable(self) -> list[Sample]:
        """Of the samples that were not cut off those that training is for: all but greedy baselines."""
        return [sample for sample in self.kept if not sample.greedy]

    def _new(self, index: int) -> Sample:
        greedy = self._greedy_baseline and index % self.group_size == self.group_size - 1
        return Sample(index, Origin(self.iteration, index), greedy, attempt=self._first_attempt)

    def _require(self, sample: Sample, state: SampleState) -> None:
        if sample.state is not state:
            raise ValueError(f"sample {self.iteration}/{sample.index} is {sample.state}, not {state}")

    def _move(self, sample: Sample, state: SampleState) -> None:
        self._counts[sample.state] -= 1
        self._counts[state] += 1
        sample.state = state

    def _grow(self, size: int) -> None:
        """Queue new samples until there are so many."""
        for new in range(len(self.samples), size):
            self.samples.append(self._new(new))
            self._counts[SampleState.QUEUED] += 1
            self._decoding.enqueue(self.samples[new])
