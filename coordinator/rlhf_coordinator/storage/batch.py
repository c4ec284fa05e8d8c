"""An iteration's scored batch as the training ranks fetch it, from the ledger in memory or from the journal's segment.

Rule: both ways go through a Ledger, so a replayed batch is byte for byte the one that was trained on first.
Must never hand out an incomplete batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlhf_api import control_pb2 as pb
from rlhf_api.algorithms import Task
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.channels import CHUNK_BYTES
from rlhf_api.samples import VersionSpan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import ITEM_BYTES, PackedResponse, Sample
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.prompts import PromptSet

_ITEM: Final = {"int32": ITEM_BYTES, "float32": ITEM_BYTES}


def packed(dtype: str, data: bytes) -> pb.Array:
    """One-dimensional array message of packed little-endian values."""
    return pb.Array(dtype=dtype, shape=[len(data) // _ITEM[dtype]], data=data)


def unpacked(array: pb.Array, dtype: str) -> bytes:
    """The packed values of a one-dimensional array; raises ValueError unless dtype, shape and bytes agree."""
    if array.dtype != dtype or len(array.shape) != 1 or array.shape[0] * _ITEM[dtype] != len(array.data):
        got = f"{array.dtype} {list(array.shape)} of {len(array.data)} bytes"
        raise ValueError(f"an array must be {dtype} of one dimension with all its bytes, got {got}")
    return array.data


def response_of(tokens: pb.Array, log_probabilities: pb.Array, versions: Iterable[pb.VersionSpan]) -> PackedResponse:
    """A response from its wire form; raises ValueError when the arrays do not fit one another."""
    response = PackedResponse(
        unpacked(tokens, "int32") if tokens.dtype else b"",
        unpacked(log_probabilities, "float32") if log_probabilities.dtype else b"",
        # One of no token says nothing; a sample that moved before its first token may come with one.
        tuple(VersionSpan(span.version, span.tokens) for span in versions if span.tokens),
    )
    if any(count < 0 for _, count in response.versions):
        raise ValueError(f"spans of weight versions {response.versions[:8]}: none may have less than no token")
    if len(response.log_probabilities) != len(response.tokens):
        raise ValueError(f"{len(response)} tokens but {len(response.log_probabilities) // 4} log-probabilities")
    return response


def spans_of(versions: Sequence[VersionSpan]) -> list[pb.VersionSpan]:
    """Version spans in their wire form."""
    return [pb.VersionSpan(version=version, tokens=tokens) for version, tokens in versions]


def apply_record(ledger: Ledger, record: Record) -> None:
    """Brings a journaled response or score back into a ledger."""
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
    """The complete ledger of a journaled iteration; raises JobError when its segment is gone or damaged."""
    ledger = Ledger(iteration, size, tasks, 0)
    for record in records:
        apply_record(ledger, record)
    if not ledger.all_scored:
        message = f"the journal of iteration {iteration} is incomplete ({ledger.counts()}), so it cannot be replayed"
        raise JobError("JournalDamaged", message, field="RLHF_RUN_DIR")
    return ledger


def train_sample(sample: Sample, group: int, prompt: bytes) -> pb.TrainSample:
    """One sample as training gets it."""
    fields = {name: packed("float32", values) for name, values in sample.fields.items()}
    fields[SAMPLED_FIELD] = packed("float32", sample.response.log_probabilities)
    return pb.TrainSample(
        sample=sample.index,
        group=group,
        prompt=packed("int32", prompt),
        response=packed("int32", sample.response.tokens),
        fields=fields,
        abstained=sample.abstained,
        versions=spans_of(sample.response.versions),
    )


def batch_parts(ledger: Ledger, prompts: PromptSet) -> Iterator[pb.BatchPart]:
    """The batch in sample order, in parts of about CHUNK_BYTES."""
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
