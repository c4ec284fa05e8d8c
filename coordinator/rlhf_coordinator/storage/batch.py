"""An iteration's scored batch as the training ranks fetch it, from the ledger in memory or from the journal's segment.

Rule: both ways go through a Ledger, so a replayed batch is byte for byte the one that was trained on first.
Must never return an incomplete batch.
"""

from collections.abc import Iterable, Iterator, Sequence

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Task
from rlhf_api.channels import CHUNK_BYTES
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.prompts import PromptSet
from rlhf_coordinator.storage.sample_codec import response_of, train_sample, unpacked


def apply_record(ledger: Ledger, record: Record) -> None:
    """Bring a journaled response or score back into a ledger."""
    kind = record.WhichOneof("record")
    if kind == "finished":
        message = record.finished
        response = response_of(message.tokens, message.log_probabilities, message.versions)
        ledger.restore_response(message.key.sample, response, message.finish_reason, message.text)
    elif kind == "scored":
        score = record.scored
        values = None if score.abstained else unpacked(score.result, "float32")
        ledger.restore_score(score.key.sample, score.task, values)


def replayed(iteration: int, size: int, tasks: Sequence[Task], records: Iterable[Record]) -> Ledger:
    """Return the complete ledger of a journaled iteration. Raises JobError when its segment is gone or damaged."""
    ledger = Ledger(iteration, size, tasks, 0)
    for record in records:
        apply_record(ledger, record)
    if not ledger.all_scored:
        message = f"the journal of iteration {iteration} is incomplete ({ledger.counts()}), so it cannot be replayed"
        raise JobError("JournalDamaged", message, field="RLHF_RUN_DIR")
    return ledger


def batch_parts(ledger: Ledger, prompts: PromptSet) -> Iterator[pb.BatchPart]:
    """Yield the batch in sample order, in parts of about CHUNK_BYTES."""
    if not ledger.all_scored:
        raise ValueError(f"iteration {ledger.iteration} is not scored yet: {ledger.counts()}")
    total = len(ledger.samples)
    part, size = pb.BatchPart(total=total), 0
    for sample in ledger.samples:
        message = train_sample(sample, prompts.group(sample.index), prompts.of(ledger.iteration, sample.index).tokens)
        if size and size + message.ByteSize() > CHUNK_BYTES:
            yield part
            part, size = pb.BatchPart(total=total), 0
        part.samples.append(message)
        size += message.ByteSize()
    yield part
