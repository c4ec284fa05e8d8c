"""Chunks of a batch in `spec.training.stream`: their samples as the coordinator numbered them.

Rule: a chunk has the same samples in the same order, whether it arrives alone or in the whole batch.
"""

from collections.abc import Iterable, Sequence

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError


def chunks_of(samples: Iterable[pb.TrainSample]) -> list[list[pb.TrainSample]]:
    """Return the chunks of a whole batch in the order of the sum; empty in a job that does not stream."""
    chunks: dict[int, list[pb.TrainSample]] = {}
    for sample in samples:
        if sample.chunk:
            chunks.setdefault(sample.chunk, []).append(sample)
    return [chunks[number] for number in sorted(chunks)]


def missing(
    chunks: Sequence[Sequence[pb.TrainSample]], there: Sequence[tuple[int, ...]], iteration: int
) -> Sequence[Sequence[pb.TrainSample]]:
    """Return the chunks of a whole batch after those that a rank has. Raises WorkError if the rank has others; it must
    then start again."""
    if list(there) != [numbers_of(chunk) for chunk in chunks[: len(there)]]:
        message = f"the gradients of iteration {iteration} on this rank are of other chunks than its batch has"
        raise WorkError("WrongVersion", message, retryable=True, exit_code=ExitCode.RESTART)
    return chunks[len(there) :]


def numbers_of(samples: Iterable[pb.TrainSample]) -> tuple[int, ...]:
    """Return the numbers of samples in their batch, in ascending order."""
    return tuple(sorted(sample.sample for sample in samples))


def renumbered(samples: Sequence[pb.TrainSample]) -> list[pb.TrainSample]:
    """Return copies with the numbers 0, 1, ... in the order of their numbers in the batch."""
    copies = []
    for number, sample in enumerate(sorted(samples, key=lambda each: each.sample)):
        copy = pb.TrainSample()
        copy.CopyFrom(sample)
        copy.sample = number
        copies.append(copy)
    return copies
