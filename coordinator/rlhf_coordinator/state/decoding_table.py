"""The decoding table of an iteration: which samples wait in the queue, who decodes which, and which are on their way.

Rule: pure, and a part of the ledger, which alone uses it: the ledger knows the states of samples, this knows whose
they are. Every lease has a higher attempt than the one before.
"""

from bisect import bisect_left, insort
from collections.abc import Collection

from rlhf_common.samples import Lease
from rlhf_coordinator.state.sample import Sample

_Turn = tuple[int, int, int]
"""(less than zero by its tokens, place among its siblings, index) of a queued sample; the smallest is next."""


class DecodingTable:
    """The queue, and the samples of each worker, of one iteration."""

    def __init__(self, size: int, siblings: int = 1) -> None:
        """`size`: samples of the iteration, all of which are queued. `siblings`: so many in a row are of one prompt,
        and take turns with those of other prompts; 1: the order is that of the samples."""
        self._siblings = siblings
        self._queue: list[_Turn] = sorted((0, index % siblings, index) for index in range(size))
        self._isolated: list[_Turn] = []
        self._decoding: dict[str, set[int]] = {}
        self._places: list[tuple[int, str]] = []
        self._arriving: dict[str, set[int]] = {}

    def queued(self, limit: int) -> list[int]:
        """Return the next samples to lease: those with most tokens first (they end last), then by their turn."""
        return [index for *_, index in self._queue[:limit]]

    def isolated(self) -> list[int]:
        """Return the queued samples that are to be decoded alone, in the same order."""
        return [index for *_, index in self._isolated]

    def decoding_on(self, worker: str) -> Collection[int]:
        """Return the samples that a worker decodes, those on their way out included."""
        return self._decoding.get(worker, ())

    def arriving_on(self, worker: str) -> Collection[int]:
        """Return the samples on their way to a worker with their KV cache."""
        return self._arriving.get(worker, ())

    def take_places(self) -> list[tuple[int, str]]:
        """Return (sample, who decodes it from then on; empty: it is queued again) of every change since this was asked
        last, in order."""
        places, self._places = self._places, []
        return places

    def enqueue(self, sample: Sample) -> None:
        """Put a sample into the queue."""
        self._places.append((sample.index, ""))
        insort(self._queue_of(sample), self._turn(sample))

    def dequeue(self, sample: Sample) -> None:
        """Take a sample out of the queue. Its tokens are those that it was queued with."""
        queue = self._queue_of(sample)
        del queue[bisect_left(queue, self._turn(sample))]

    def _queue_of(self, sample: Sample) -> list[_Turn]:
        return self._isolated if sample.isolated else self._queue

    def _turn(self, sample: Sample) -> _Turn:
        return -len(sample.response), sample.index % self._siblings, sample.index

    def lease(self, sample: Sample, worker: str) -> int:
        """Lease a sample to a worker to decode; return the attempt."""
        sample.attempt += 1
        sample.decoding = Lease(worker, sample.attempt)
        if not sample.decoded_by or sample.decoded_by[-1] != worker:
            sample.decoded_by.append(worker)
        self._places.append((sample.index, worker))
        self._decoding.setdefault(worker, set()).add(sample.index)
        return sample.attempt

    def end_lease(self, sample: Sample) -> None:
        """Nobody decodes the sample any more, and nobody is to."""
        assert sample.decoding is not None
        self._decoding[sample.decoding.worker].discard(sample.index)
        sample.decoding = None
        self.cancel_arrival(sample)

    def promise(self, sample: Sample, destination: str) -> Lease:
        """Promise a sample to another worker; return the lease under which it will have it."""
        sample.attempt += 1
        sample.arriving = Lease(destination, sample.attempt)
        self._arriving.setdefault(destination, set()).add(sample.index)
        return sample.arriving

    def cancel_arrival(self, sample: Sample) -> None:
        """The sample is no longer on its way to anybody."""
        if sample.arriving is not None:
            self._arriving[sample.arriving.worker].discard(sample.index)
            sample.arriving = None

    def arrive(self, sample: Sample) -> None:
        """From here on the sample is the destination's."""
        arriving = sample.arriving
        assert arriving is not None
        self.end_lease(sample)
        sample.decoding = arriving
        sample.decoded_by.append(arriving.worker)
        self._places.append((sample.index, arriving.worker))
        self._decoding.setdefault(arriving.worker, set()).add(sample.index)
