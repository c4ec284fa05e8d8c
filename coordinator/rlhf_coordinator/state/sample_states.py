"""The samples of an iteration and the state of each, from which it follows whether all are generated or scored.

Rule: pure, and the base of the ledger, which defines the transitions.
"""

from collections import Counter
from typing import Final

from rlhf_coordinator.state.decoding_table import DecodingTable
from rlhf_coordinator.state.sample import Origin, PackedResponse, Sample, SampleState

ATTEMPTS_PER_COORDINATOR: Final = 1 << 16
"""Number of attempts of a sample that are reserved for each coordinator process."""


class SampleStates:
    """The samples of one iteration; `group_size` consecutive ones share a prompt."""

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
        """Arguments as for `Ledger`. All samples start queued."""
        self.iteration = self.version = iteration
        """`version` is the version of the weights that draw and score its samples: `iteration`, unless it is set
        lower."""
        self._first_attempt = coordinator_epoch * ATTEMPTS_PER_COORDINATOR
        self._counts: Counter[SampleState] = Counter({SampleState.QUEUED: size})
        self._decoding = DecodingTable(size, siblings)
        self.group_size, self._spare, self._greedy_baseline = group_size, spare, greedy_baseline
        self.samples = [self._new(index) for index in range(size)]

    def counts(self) -> dict[str, int]:
        """Return state -> number of samples in it; the numbers sum to the size of the iteration."""
        return {state.value: self._counts[state] for state in SampleState}

    def count(self, *states: SampleState) -> int:
        """Return the number of samples in any of these states."""
        return sum(self._counts[state] for state in states)

    @property
    def unfinished(self) -> int:
        """Number of samples without a complete response that may still get one."""
        return self.count(SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING)

    @property
    def all_generated(self) -> bool:
        """Whether no sample is unfinished."""
        return not self.unfinished

    @property
    def all_scored(self) -> bool:
        """Whether every sample is scored, trained, failed, dropped or cut off, and no prompt is left to cut off."""
        done = (SampleState.SCORED, SampleState.TRAINED, SampleState.FAILED, SampleState.DROPPED, SampleState.CUT)
        return self.count(*done) == len(self.samples) and not self.groups_to_cut

    @property
    def groups_to_cut(self) -> int:
        """Number of prompts still to be cut off."""
        return (self._spare - self.count(SampleState.CUT)) // self.group_size

    def finished_groups(self) -> list[int]:
        """Return the prompts none of whose samples is unfinished or cut off, in ascending order."""
        waiting = {SampleState.QUEUED, SampleState.DECODING, SampleState.MIGRATING, SampleState.CUT}
        groups = len(self.samples) // self.group_size
        return [
            group for group in range(groups) if not any(sample.state in waiting for sample in self.members_of(group))
        ]

    def members_of(self, group: int) -> list[Sample]:
        """Return all samples of a prompt."""
        return self.samples[group * self.group_size : (group + 1) * self.group_size]

    def continued_by(self, index: int, response: PackedResponse) -> bool:
        """Return whether the iteration's weights drew the response, apart from a carried beginning."""
        carried = self.samples[index].carried if 0 <= index < len(self.samples) else PackedResponse()
        return response.continues(carried, self.version)

    @property
    def uncut_samples(self) -> list[Sample]:
        """The samples that were not cut off, by index."""
        return [sample for sample in self.samples if sample.state is not SampleState.CUT]

    @property
    def trainable(self) -> list[Sample]:
        """The samples that were not cut off and are no greedy baselines."""
        return [sample for sample in self.uncut_samples if not sample.greedy]

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
        """Queue new samples until there are `size`."""
        for new in range(len(self.samples), size):
            self.samples.append(self._new(new))
            self._counts[SampleState.QUEUED] += 1
            self._decoding.enqueue(self.samples[new])
