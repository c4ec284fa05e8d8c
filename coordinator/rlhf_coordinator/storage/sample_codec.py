"""Conversion between samples, carried ones included, and the messages of the protocol and the journal.

Rule: plain conversion. Token ids, log-probabilities and scores are packed: int32 and float32, little endian.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from rlhf_api.algorithms import prompt_schedule
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.algorithms.iteration_prompts import PromptSchedule, PromptSchedules
from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_common import reward_metrics
from rlhf_common.samples import Drawing, Episode, SampleKey, VersionSpan
from rlhf_coordinator.state.carried_sample import CarriedSample
from rlhf_coordinator.state.sample import ITEM_BYTES, Origin, PackedResponse, Sample
from rlhf_coordinator.storage.journal_pb2 import Begun, Carried, Record, Schedule

_ITEM_BYTES: Final[Mapping[str, int]] = {"int32": ITEM_BYTES, "float32": ITEM_BYTES}


def packed(dtype: str, data: bytes) -> pb.Array:
    """Return the one-dimensional array message of packed little-endian values."""
    return pb.Array(dtype=dtype, shape=[len(data) // _ITEM_BYTES[dtype]], data=data)


def unpacked(array: pb.Array, dtype: str) -> bytes:
    """Return the packed values of a one-dimensional array. Raises ValueError unless dtype, shape and bytes agree."""
    if array.dtype != dtype or len(array.shape) != 1 or array.shape[0] * _ITEM_BYTES[dtype] != len(array.data):
        got = f"{array.dtype} {list(array.shape)} of {len(array.data)} bytes"
        raise ValueError(f"an array must be {dtype} of one dimension with all its bytes, got {got}")
    return array.data


def key_message(key: SampleKey) -> pb.SampleKey:
    """Return the message of a sample's key."""
    return pb.SampleKey(iteration=key.iteration, sample=key.sample, attempt=key.attempt)


def response_of(tokens: pb.Array, log_probabilities: pb.Array, versions: Iterable[pb.VersionSpan]) -> PackedResponse:
    """Return the response in a message. Raises ValueError when the arrays do not match, or a span is negative."""
    response = PackedResponse(
        unpacked(tokens, "int32") if tokens.dtype else b"",
        unpacked(log_probabilities, "float32") if log_probabilities.dtype else b"",
        # Spans without tokens are left out.
        tuple(VersionSpan(span.version, span.tokens) for span in versions if span.tokens),
    )
    if any(count < 0 for _, count in response.versions):
        raise ValueError(f"spans of weight versions {response.versions[:8]}: none may have less than no token")
    if len(response.log_probabilities) != len(response.tokens):
        raise ValueError(f"{len(response)} tokens but {len(response.log_probabilities) // 4} log-probabilities")
    return response


def span_messages(versions: Sequence[tuple[int, int]]) -> list[pb.VersionSpan]:
    """Return the messages of spans of weight versions."""
    return [pb.VersionSpan(version=version, tokens=tokens) for version, tokens in versions]


def generate_sample(
    key: SampleKey,
    prompt: bytes,
    response: PackedResponse,
    random_key: int,
    max_response_tokens: int,
    drawing: Drawing = Drawing.ROLLOUT,
    record: str = "",
) -> pb.GenerateSample:
    """Return a sample to decode, with its known tokens; `prompt` is packed int32.

    `record`: input for resetting the sample's environment, where the job has one.
    """
    message = pb.GenerateSample(
        key=key_message(key),
        prompt=packed("int32", prompt),
        random_key=random_key,
        max_response_tokens=max_response_tokens,
        drawing=pb.Drawing.ValueType(drawing),
        record=record,
    )
    if len(response):
        message.tokens.CopyFrom(packed("int32", response.tokens))
        message.log_probabilities.CopyFrom(packed("float32", response.log_probabilities))
        message.versions.extend(span_messages(response.versions))
    return message


def prefix_sample(key: SampleKey, tasks: Sequence[str], prompt: bytes, response: bytes) -> pb.PrefixSample:
    """Return the known tokens of an unfinished sample, for early scoring; `prompt` and `response` are packed int32."""
    return pb.PrefixSample(
        key=key_message(key), tasks=tasks, prompt=packed("int32", prompt), response=packed("int32", response)
    )


def score_sample(
    key: SampleKey,
    tasks: Sequence[str],
    prompt: bytes,
    prompt_text: str,
    record: str,
    sample: Sample,
    needs: Iterable[str] = (),
) -> pb.ScoreSample:
    """Return a finished sample for scoring by these tasks; `prompt` is packed int32, `record` its JSON.

    `needs`: fields of other tasks that these tasks need.
    """
    return pb.ScoreSample(
        key=key_message(key),
        tasks=tasks,
        prompt=packed("int32", prompt),
        response=packed("int32", sample.response.tokens),
        prompt_text=prompt_text,
        response_text=sample.text,
        record=record,
        finish_reason=sample.finish_reason,
        fields={name: packed("float32", sample.fields[name]) for name in needs if name in sample.fields},
        episode=None if sample.episode is None else episode_message(sample.episode),
    )


def episode_of(message: pb.FinishedSample, *, wanted: bool = False) -> Episode | None:
    """Return an environment's result for a response; None without one.

    Raises ValueError for invalid numbers, and for a missing result if one is `wanted`.
    """
    episode, name = message.episode, f"sample {message.key.sample}"
    if not message.HasField("episode"):
        if wanted:
            raise ValueError(f"{name} has no episode, but spec.rollout.environment is set; its worker may be too old")
        return None
    wrong = "" if math.isfinite(episode.reward) else f"reward is {episode.reward}"
    if wrong := wrong or reward_metrics.problem(episode.metrics):
        raise ValueError(f"{name}: episode: {wrong}")
    if episode.turns < 1:
        raise ValueError(f"{name}: episode.turns is {episode.turns}, must be 1 at least")
    return Episode(episode.turns, None if episode.abstained else episode.reward, dict(episode.metrics))


def episode_message(episode: Episode) -> pb.Episode:
    """Return the message of an environment's result for a response."""
    reward, abstained = episode.reward or 0.0, episode.reward is None
    return pb.Episode(turns=episode.turns, reward=reward, abstained=abstained, metrics=episode.metrics)


def group_score(iteration: int, sample: Sample, task: str, values: bytes | None) -> pb.ScoredSample:
    """Return the journal form of a group task's result for one sample; `values` is None for an abstention."""
    key, metrics = pb.SampleKey(iteration=iteration, sample=sample.index), sample.reward_metrics.get(task)
    message = pb.ScoredSample(key=key, task=task, abstained=values is None, metrics=metrics)
    if values is not None:
        message.result.CopyFrom(packed("float32", values))
    return message


def train_sample(sample: Sample, place: int, group: int, prompt: bytes, *, masked: bool) -> pb.TrainSample:
    """Return one scored sample for training, at a place of the batch; `prompt` is packed int32.

    A `masked` sample counts as abstained.
    """
    fields = {name: packed("float32", values) for name, values in sample.fields.items()}
    if sample.response.log_probabilities or not sample.response.tokens:  # a response of the prompt file has none
        fields[SAMPLED_FIELD] = packed("float32", sample.response.log_probabilities)
    return pb.TrainSample(
        sample=place,
        group=group,
        prompt=packed("int32", prompt),
        response=packed("int32", sample.response.tokens),
        fields=fields,
        abstained=sample.abstained or masked,
        versions=span_messages(sample.response.versions),
        finish_reason=sample.finish_reason,
    )


def carried_messages(carried: Iterable[CarriedSample]) -> list[Carried]:
    """Return carried samples in the journal's form."""
    return [_carried_message(sample) for sample in carried]


def carried_samples(records: Sequence[Record]) -> tuple[CarriedSample, ...]:
    """Return the carried samples with which the iteration of a segment began."""
    if not records or not records[0].HasField("begun"):
        return ()
    return tuple(_carried_sample(message) for message in records[0].begun.carried)


def waiting_samples(begun: Begun) -> tuple[CarriedSample, ...]:
    """Return the samples that waited for a later iteration when an iteration began."""
    return tuple(_carried_sample(message) for message in begun.waiting)


def schedule_messages(schedules: PromptSchedules, spec: RLHFJobSpec) -> list[Schedule]:
    """Return the schedules of a job with `longRounds: Auto` in the journal's form; empty for others."""
    if spec.rollout.long_rounds != "Auto":
        return []
    return [Schedule(begins=schedule.begins, extra=schedule.extra) for schedule in schedules.all]


def schedules_of(begun: Begun, spec: RLHFJobSpec) -> PromptSchedules | None:
    """Return the schedules with which an iteration began; None where its record has none."""
    batch = prompt_schedule(spec).batch
    written = tuple(PromptSchedule(batch, message.extra, "Deferred", message.begins) for message in begun.schedules)
    return PromptSchedules(written) if written else None


def cut_message(iteration: int, sample: Sample) -> Carried:
    """Return an unfinished sample that an iteration cuts off, in the journal's form, with its key in this iteration."""
    return _carried_message(replace(CarriedSample.from_sample(sample), origin=Origin(iteration, sample.index)))


def _carried_message(sample: CarriedSample) -> Carried:
    response = sample.response
    message = pb.FinishedSample(
        key=key_message(SampleKey(*sample.origin, 0)),
        tokens=packed("int32", response.tokens),
        log_probabilities=packed("float32", response.log_probabilities),
        versions=span_messages(response.versions),
        finish_reason=sample.finish_reason,
        text=sample.text,
        drafted_tokens=sample.drafted_tokens,
        accepted_tokens=sample.accepted_tokens,
        episode=None if sample.episode is None else episode_message(sample.episode),
    )
    return Carried(response=message, decoded_by=sample.decoded_by, restarted=sample.restarted, failed=sample.failed)


def _carried_sample(message: Carried) -> CarriedSample:
    response = message.response
    return CarriedSample(
        Origin(response.key.iteration, response.key.sample),
        response_of(response.tokens, response.log_probabilities, response.versions),
        response.finish_reason,
        response.text,
        episode_of(response),
        tuple(message.decoded_by),
        response.drafted_tokens,
        response.accepted_tokens,
        message.restarted,
        message.failed,
    )
