"""Converts samples to protobuf messages and back.

Rule: a malformed array or finish reason of a sample to score is refused by name.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack, unpack
from rlhf_common.samples import (
    FINISH_REASONS,
    Drawing,
    Episode,
    FinishReason,
    FloatArray,
    ResponsePart,
    SampleKey,
    SampleRequest,
    ScoringSample,
    TokenArray,
    VersionSpan,
)
from rlhf_workers.failures import WorkError


def key_of(key: pb.SampleKey) -> SampleKey:
    """Return the hashable key of a message."""
    return SampleKey(key.iteration, key.sample, key.attempt)


def key_message(key: SampleKey) -> pb.SampleKey:
    """Undo `key_of`."""
    return pb.SampleKey(iteration=key.iteration, sample=key.sample, attempt=key.attempt)


def request_of(sample: pb.GenerateSample) -> SampleRequest:
    """Return the request for an engine; ValueError for malformed arrays or an unknown drawing."""
    has_tokens = bool(sample.tokens.dtype)
    return SampleRequest(
        key_of(sample.key),
        unpack(sample.prompt).astype(np.int32),
        sample.random_key,
        sample.max_response_tokens,
        unpack(sample.tokens).astype(np.int32) if has_tokens else np.empty(0, np.int32),
        unpack(sample.log_probabilities).astype(np.float32) if has_tokens else np.empty(0, np.float32),
        _spans_of(sample.versions),
        Drawing(sample.drawing),
        sample.record,
    )


def request_message(request: SampleRequest) -> pb.GenerateSample:
    """Undo `request_of`."""
    return pb.GenerateSample(
        key=key_message(request.key),
        prompt=pack(request.prompt),
        tokens=pack(request.tokens),
        log_probabilities=pack(request.log_probabilities),
        versions=_span_messages(request.versions),
        random_key=request.random_key,
        max_response_tokens=request.max_response_tokens,
        drawing=pb.Drawing.ValueType(request.drawing),
        record=request.record,
    )


def resumed_request(request: SampleRequest, progress: pb.SampleProgress) -> SampleRequest:
    """Return `request` with the response tokens of `progress`, which begin at offset 0.

    Raises ValueError for malformed arrays.
    """
    resumed = pb.GenerateSample(key=progress.key, prompt=pb.Array(dtype="int32", shape=[0]), versions=progress.versions)
    resumed.tokens.CopyFrom(progress.tokens)
    resumed.log_probabilities.CopyFrom(progress.log_probabilities)
    for array in (resumed.tokens, resumed.log_probabilities):
        unpack(array)
    response = request_of(resumed)
    return replace(
        request, tokens=response.tokens, log_probabilities=response.log_probabilities, versions=response.versions
    )


def progress_message(response: ResponsePart | SampleRequest) -> pb.SampleProgress:
    """Return the tokens of a response from its offset, or all response tokens of a request."""
    return pb.SampleProgress(
        key=key_message(response.key),
        offset=response.offset if isinstance(response, ResponsePart) else 0,
        tokens=pack(response.tokens),
        log_probabilities=pack(response.log_probabilities),
        versions=_span_messages(response.versions),
    )


def finished_message(
    response: ResponsePart, text: str, queue_seconds: float = 0.0, drafted: tuple[int, int] = (0, 0)
) -> pb.FinishedSample:
    """Return the message of a complete response with its text.

    `queue_seconds`: the wait for its first new token (0: not measured). `drafted`: (drafted, accepted) tokens.
    """
    episode = response.episode
    return pb.FinishedSample(
        key=key_message(response.key),
        tokens=pack(response.tokens),
        log_probabilities=pack(response.log_probabilities),
        versions=_span_messages(response.versions),
        finish_reason=response.finish_reason,
        text=text,
        queue_seconds=queue_seconds,
        drafted_tokens=drafted[0],
        accepted_tokens=drafted[1],
        episode=None if episode is None else _episode_message(episode),
    )


def scoring_sample_of(message: pb.ScoreSample) -> ScoringSample:
    """Return the sample of a Score command; WorkError SampleInvalid names a malformed field."""
    return ScoringSample(
        key=key_of(message.key),
        prompt=tokens_of(message, "prompt"),
        response=tokens_of(message, "response"),
        prompt_text=message.prompt_text,
        response_text=message.response_text,
        record=message.record,
        finish_reason=_finish_reason(message),
        fields={name: _field_of(message, name) for name in message.fields},
        episode=_episode_of(message.episode) if message.HasField("episode") else None,
    )


def _episode_message(episode: Episode) -> pb.Episode:
    reward, abstained = episode.reward or 0.0, episode.reward is None
    return pb.Episode(turns=episode.turns, reward=reward, abstained=abstained, metrics=episode.metrics)


def _episode_of(message: pb.Episode) -> Episode:
    return Episode(message.turns, None if message.abstained else message.reward, dict(message.metrics))


def _field_of(message: pb.ScoreSample, name: str) -> FloatArray:
    try:
        array: npt.NDArray[Any] = unpack(message.fields[name])
    except ValueError as error:
        raise _invalid(message, name, str(error)) from error
    if array.ndim != 1 or array.dtype != np.float32 or not np.isfinite(array).all():
        raise _invalid(message, name, f"is {array.dtype} {list(array.shape)}, needs finite numbers, float32 [n]")
    return array


def _finish_reason(message: pb.ScoreSample) -> FinishReason:
    reason = message.finish_reason
    if reason not in FINISH_REASONS:
        raise _invalid(message, "finish_reason", f"is {reason[:20]!r}, must be one of {', '.join(FINISH_REASONS[1:])}")
    return reason


def tokens_of(message: pb.ScoreSample | pb.PrefixSample, name: Literal["prompt", "response"]) -> TokenArray:
    """Return a field of a sample as int32 [n >= 1]; WorkError SampleInvalid names a malformed field."""
    try:
        array: npt.NDArray[Any] = unpack(message.prompt if name == "prompt" else message.response)
    except ValueError as error:
        raise _invalid(message, name, str(error)) from error
    if array.ndim != 1 or not len(array) or array.dtype != np.int32 or int(array.min()) < 0:
        raise _invalid(message, name, f"is {array.dtype} {list(array.shape)}, needs token ids, int32 [n >= 1]")
    return array


def _invalid(message: pb.ScoreSample | pb.PrefixSample, name: str, problem: str) -> WorkError:
    key = message.key
    return WorkError("SampleInvalid", f"sample {key.sample} of iteration {key.iteration}: {name} {problem}")


def _spans_of(spans: Iterable[pb.VersionSpan]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(span.version, span.tokens) for span in spans)


def _span_messages(spans: Iterable[VersionSpan]) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(version=span.version, tokens=span.tokens) for span in spans]
