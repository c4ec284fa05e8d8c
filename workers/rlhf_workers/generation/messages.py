"""Samples of the engine as messages of the wire, and back.

Rule: plain conversion; nothing is decided and nothing is kept here.
"""

import numpy as np

from rlhf_api import control_pb2 as pb
from rlhf_api.arrays import pack, unpack
from rlhf_workers.generation.protocol import Request, Response, SampleKey, VersionRun


def request_of(sample: pb.GenerateSample) -> Request:
    """What an engine is asked to decode; ValueError where arrays are malformed."""
    known = bool(sample.tokens.dtype)
    return Request(
        engine_key(sample.key),
        unpack(sample.prompt).astype(np.int32),
        sample.random_key,
        sample.max_response_tokens,
        unpack(sample.tokens).astype(np.int32) if known else np.empty(0, np.int32),
        unpack(sample.log_probabilities).astype(np.float32) if known else np.empty(0, np.float32),
        _runs(sample.versions),
    )


def sample_of(request: Request) -> pb.GenerateSample:
    """Undoes `request_of`."""
    return pb.GenerateSample(
        key=wire_key(request.key),
        prompt=pack(request.prompt),
        tokens=pack(request.tokens),
        log_probabilities=pack(request.log_probabilities),
        versions=_spans(request.versions),
        random_key=request.random_key,
        max_response_tokens=request.max_response_tokens,
    )


def progress_of(response: Response | Request) -> pb.SampleProgress:
    """Tokens of a response from its offset on; of a request all of them."""
    return pb.SampleProgress(
        key=wire_key(response.key),
        offset=response.offset if isinstance(response, Response) else 0,
        tokens=pack(response.tokens),
        log_probabilities=pack(response.log_probabilities),
        versions=_spans(response.versions),
    )


def finished_of(response: Response, text: str) -> pb.FinishedSample:
    """A whole response and its text."""
    return pb.FinishedSample(
        key=wire_key(response.key),
        tokens=pack(response.tokens),
        log_probabilities=pack(response.log_probabilities),
        versions=_spans(response.versions),
        finish_reason=response.finish_reason,
        text=text,
    )


def engine_key(key: pb.SampleKey) -> SampleKey:
    """A hashable key."""
    return SampleKey(key.iteration, key.sample, key.attempt)


def wire_key(key: SampleKey) -> pb.SampleKey:
    """Undoes `engine_key`."""
    return pb.SampleKey(iteration=key.iteration, sample=key.sample, attempt=key.attempt)


def _runs(spans: "list[pb.VersionSpan]") -> tuple[VersionRun, ...]:
    return tuple(VersionRun(span.version, span.tokens) for span in spans)


def _spans(runs: tuple[VersionRun, ...]) -> list[pb.VersionSpan]:
    return [pb.VersionSpan(version=run.version, tokens=run.tokens) for run in runs]
