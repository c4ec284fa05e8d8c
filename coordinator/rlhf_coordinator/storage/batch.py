"""An iteration's scored batch for the training ranks, from the ledger in memory or from the journal's segment.

Rule: both ways use a Ledger.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rlhf_api.algorithms import Task
from rlhf_api.algorithms.refill import RefillRule, UsedUp
from rlhf_common import control_pb2 as pb
from rlhf_common.channels import CHUNK_BYTES
from rlhf_common.samples import FinishReason
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.state.batch_refill import NO_REFILL
from rlhf_coordinator.state.carried_sample import origin_in
from rlhf_coordinator.state.evaluation_state import FIRST_SAMPLE
from rlhf_coordinator.state.gradient_chunks import chunk_numbers
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import Origin, PackedResponse, Sample
from rlhf_coordinator.storage.journal_pb2 import Record
from rlhf_coordinator.storage.prompts import PromptSet
from rlhf_coordinator.storage.sample_codec import (
    carried_samples,
    episode_of,
    response_of,
    train_sample,
    unpacked,
    waiting_samples,
)

FINISHED: Final[FinishReason] = "stop"
"""Finish reason of a response of the prompt file, which ends with a token at which generation stops."""


def of_evaluation(record: Record) -> int | None:
    """Return the weight version whose evaluation a record belongs to; None for any other record."""
    kind = record.WhichOneof("record")
    if kind not in ("finished", "scored", "failed"):
        return None
    key: pb.SampleKey = getattr(record, kind).key
    return key.iteration if key.sample >= FIRST_SAMPLE else None


def finished_responses(records: Iterable[Record]) -> Iterator[pb.FinishedSample]:
    """Yield the responses of a batch in a segment of the journal.

    Responses of evaluations are left out.
    """
    for record in records:
        if record.WhichOneof("record") == "finished" and of_evaluation(record) is None:
            yield record.finished


def responses_with_origins(
    records: Sequence[Record], samples_per_prompt: int
) -> Iterator[tuple[pb.FinishedSample, Origin, bool]]:
    """Yield (response, its origin, whether its prompt was cut off) for the responses of a batch in a segment."""
    carried = carried_samples(records)
    cut = {group for record in records for group in record.cut.groups}
    for message in finished_responses(records):
        index = message.key.sample
        yield message, origin_in(carried, message.key.iteration, index), index // samples_per_prompt in cut


def apply_record(ledger: Ledger, record: Record) -> None:
    """Restore a journaled record about samples of the batch into a ledger; ignore records of an evaluation."""
    if of_evaluation(record) is None:
        restore_record(ledger, record)


def restore_record(ledger: Ledger, record: Record, first: int = 0) -> None:
    """Restore a record into its ledger, whose sample 0 has the number `first` in records of single samples."""
    kind = record.WhichOneof("record")
    if kind == "finished":
        message = record.finished
        response = response_of(message.tokens, message.log_probabilities, message.versions)
        ledger.restore_response(message.key.sample - first, response, message.finish_reason, message.text)
        sample = ledger.samples[message.key.sample - first]
        sample.decoded_by = list(record.decoded_by)
        sample.drafted_tokens, sample.accepted_tokens = message.drafted_tokens, message.accepted_tokens
        sample.episode = episode_of(message)
    elif kind == "scored":
        score = record.scored
        values = None if score.abstained else unpacked(score.result, "float32")
        ledger.restore_score(score.key.sample - first, score.task, values)
        _restore_metrics(ledger, score, first)
    elif kind == "scored_group":
        scores = record.scored_group.samples
        results = {score.key.sample: None if score.abstained else unpacked(score.result, "float32") for score in scores}
        ledger.restore_group(scores[0].task, results)
        for entry in scores:
            _restore_metrics(ledger, entry)
    elif kind == "failed":
        ledger.give_up(record.failed.key.sample - first)
    elif kind == "begun":
        ledger.version = ledger.iteration - record.begun.versions_behind
        ledger.resume_partial(carried_samples([record]), waiting_samples(record.begun))
    elif kind == "cut":
        for cut_sample in record.cut.known:
            message = cut_sample.response
            response = response_of(message.tokens, message.log_probabilities, message.versions)
            ledger.restore_tokens(message.key.sample, response)
            ledger.samples[message.key.sample].decoded_by = list(cut_sample.decoded_by)
        ledger.cut(record.cut.groups)
    elif kind == "streamed":
        ledger.streamed.extend(record.streamed.groups)


def refill_rule(records: Sequence[Record], otherwise: RefillRule = NO_REFILL) -> RefillRule:
    """Return the rule by which a journaled iteration grows; `otherwise` if its records do not start with a Begun."""
    if not records or not records[0].HasField("begun"):
        return otherwise
    written = records[0].begun.refill
    return RefillRule(written.rounds, UsedUp(written.used_up or UsedUp.MASK))


def take_given(ledger: Ledger, prompts: PromptSet) -> Ledger:
    """Store the responses that the prompt file contains in a new iteration's ledger; return the ledger."""
    for sample in ledger.samples:
        response = prompts.response(ledger.iteration, sample.index)
        if response is not None:
            ledger.restore_response(sample.index, PackedResponse(response.tokens), FINISHED, response.text)
    return ledger


def _restore_metrics(ledger: Ledger, score: pb.ScoredSample, first: int = 0) -> None:
    if score.metrics:
        ledger.samples[score.key.sample - first].reward_metrics[score.task] = dict(score.metrics)


def replayed(
    iteration: int,
    size: int,
    tasks: Sequence[Task],
    records: Sequence[Record],
    prompts: PromptSet,
    group_size: int = 1,
    spare: int = 0,
    greedy_baseline: bool = False,
) -> Ledger:
    """Return the complete ledger of a journaled iteration. Raises JobError when the records are incomplete.

    `group_size`: samples of one prompt; `spare`: samples of `size` beyond the batch.
    """
    rule = refill_rule(records)
    new_ledger = Ledger(
        iteration, size, tasks, 0, group_size=group_size, refill=rule, spare=spare, greedy_baseline=greedy_baseline
    )
    ledger = take_given(new_ledger, prompts)
    for record in records:
        apply_record(ledger, record)
    if not ledger.all_scored:
        message = f"the journal of iteration {iteration} is incomplete ({ledger.counts()}), so it cannot be replayed"
        raise JobError("JournalDamaged", message, field="RLHF_RUN_DIR")
    return ledger


def batch_parts(ledger: Ledger, prompts: PromptSet, per_chunk: int = 0) -> Iterator[pb.BatchPart]:
    """Yield the batch in its order, in parts of about CHUNK_BYTES, with its samples renumbered without gaps.

    `per_chunk`: prompts per chunk of a streaming job; 0 for other jobs. Raises ValueError unless all samples are scored
    or left out.
    """
    if not ledger.all_scored:
        raise ValueError(f"iteration {ledger.iteration} is not scored yet: {ledger.counts()}")
    batch = [(place, sample, masked) for place, (sample, masked) in enumerate(ledger.batch())]
    return _parts(batch, ledger, prompts, per_chunk)


def chunk_parts(ledger: Ledger, prompts: PromptSet, per_chunk: int, chunk: int) -> Iterator[pb.BatchPart]:
    """Yield the samples of one chunk, counted from 1, as `batch_parts` does.

    Raises ValueError unless the chunk is journaled.
    """
    groups = ledger.streamed[(chunk - 1) * per_chunk : chunk * per_chunk]
    if chunk < 1 or len(groups) < per_chunk:
        raise ValueError(f"iteration {ledger.iteration} has {len(ledger.streamed)} prompts in chunks, none in {chunk}")
    chosen = [(sample.index, sample, sample.failed) for group in groups for sample in ledger.members_of(group)]
    return _parts(chosen, ledger, prompts, per_chunk)


def _parts(
    batch: Sequence[tuple[int, Sample, bool]], ledger: Ledger, prompts: PromptSet, per_chunk: int
) -> Iterator[pb.BatchPart]:
    """Yield samples, given as (place in the batch, sample, whether it is masked out), in parts."""
    chunks = chunk_numbers(ledger.streamed, len(ledger.samples) // ledger.group_size, per_chunk)
    total = len(batch)
    part, size = pb.BatchPart(total=total), 0
    for place, sample, masked in batch:
        prompt = prompts.prompt(*sample.origin).tokens
        message = train_sample(sample, place, prompts.group(place), prompt, masked=masked)
        message.chunk = chunks[place // ledger.group_size] if per_chunk else 0
        if size and size + message.ByteSize() > CHUNK_BYTES:
            yield part
            part, size = pb.BatchPart(total=total), 0
        part.samples.append(message)
        size += message.ByteSize()
    yield part
