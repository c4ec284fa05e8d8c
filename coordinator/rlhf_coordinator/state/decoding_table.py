"""The decoding table of an iteration: the queue of samples, the samples of each worker, and the samples in transit.

Rule: pure, and a part of the ledger.
"""

from bisect import bisect_left, insort
from collections.abc import Collection

from rlhf_common.samples import Lease
from rlhf_coordinator.state.sample import Sample

_Turn = tuple[int, int, int]
"""Sort key of a queued sample: (negative number of tokens, place among its siblings, index)."""


class DecodingTable:
    """The queue, and the samples of each worker, of one iteration."""

    def __init__(self, size: int, siblings: int = 1) -> None:
        """`size`: samples of the iteration, which are all queued. `siblings`: consecutive samples of one prompt.

        Siblings are interleaved with the samples of other prompts; 1 keeps the order.
        """
        self._siblings = siblings
        self._queue: list[_Turn] = sorted((0, index % siblings, index) for index in range(size))
        self._isolated: list[_Turn] = []
        self._decoding: dict[str, set[int]] = {}
        self._places: list[tuple[int, str]] = []
        self._arriving: dict[str, set[int]] = {}

    def queued(self, limit: int) -> list[int]:
        """Return at most `limit` queued samples: those with most tokens first, then by place among siblings and index.

        Samples that must be decoded alone are left out.
        """
        return [index for *_, index in self._queue[:limit]]

    def isolated(self) -> list[int]:
        """Return the queued samples that must be decoded alone, in the order of `queued`."""
        return [index for *_, index in self._isolated]

    def decoding_on(self, worker: str) -> Collection[int]:
        """Return the samples that a worker has leased for decoding, including those that leave it."""
        return self._decoding.get(worker, ())

    def arriving_on(self, worker: str) -> Collection[int]:
        """Return the samples that move to a worker with their KV cache."""
        return self._arriving.get(worker, ())

    def take_places(self) -> list[tuple[int, str]]:
        """Return the changes of place since the last call, in order, as (sample, the worker that decodes it, empty if
        queued).
        """
        places, self._places = self._places, []
        return places

    def enqueue(self, sample: Sample) -> None:
        """Put a sample into the queue."""
        self._places.append((sample.index, ""))
        insort(self._queue_of(sample), self._turn(sample))

    def dequeue(self, sample: Sample) -> None:
        """Remove a sample from the queue. Its tokens and `isolated` must be the same as when it was queued."""
        queue = self._queue_of(sample)
        del queue[bisect_left(queue, self._turn(sample))]

    def _queue_of(self, sample: Sample) -> list[_Turn]:
        return self._isolated if sample.isolated else self._queue

    def _turn(self, sample: Sample) -> _Turn:
        return -len(sample.response), sample.index % self._siblings, sample.index

    def lease(self, sample: Sample, worker: str) -> int:
        """Lease a sample to a worker for decoding; return the attempt."""
        sample.attempt += 1
        sample.decoding = Lease(worker, sample.attempt)
        if not sample.decoded_by or sample.decoded_by[-1] != worker:
            sample.decoded_by.append(worker)
        self._places.append((sample.index, worker))
        self._decoding.setdefault(worker, set()).add(sample.index)
        return sample.attempt

    def end_lease(self, sample: Sample) -> None:
        """End the lease of a sample, and a promise to another worker."""
        assert sample.decoding is not None
        self._decoding[sample.decoding.worker].discard(sample.index)
        sample.decoding = None
        self.cancel_arrival(sample)

    def promise(self, sample: Sample, destination: str) -> Lease:
        """Promise a sample to another worker; return its future lease there."""
        sample.attempt += 1
        sample.arriving = Lease(destination, sample.attempt)
        self._arriving.setdefault(destination, set()).add(sample.index)
        return sample.arriving

    def cancel_arrival(self, sample: Sample) -> None:
        """Cancel the promise of a sample to another worker."""
        if sample.arriving is not None:
            self._arriving[sample.arriving.worker].discard(sample.index)
            sample.arriving = None

    def arrive(self, sample: Sample) -> None:
        """Transfer the lease of a sample to the worker to which it was promised."""
        arriving = sample.arriving
        assert arriving is not None
        self.end_lease(sample)
        sample.decoding = arriving
        sample.decoded_by.append(arriving.worker)
        self._places.append((sample.index, arriving.worker))
        self._decoding.setdefault(arriving.worker, set()).add(sample.index)
