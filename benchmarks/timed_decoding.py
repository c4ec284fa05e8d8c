"""Decodes samples on one engine and measures the time, for benchmarks of drafts."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_common.samples import SampleRequest
from rlhf_workers.generation.engine import Engine

Responses = dict[int, list[int]]
"""Sample -> tokens."""


class DecodingTime(NamedTuple):
    """Time of decoding the samples."""

    seconds: float
    cpu_seconds: float


def decode(
    engine: Engine, samples: Sequence[SampleRequest], wanted: Responses | None
) -> tuple[Responses, DecodingTime]:
    """Return the responses and the time. Raises SystemExit unless the responses are `wanted`."""
    responses: Responses = {}
    began, cpu = time.perf_counter(), time.process_time()
    engine.submit(samples)
    while engine.in_flight:
        for response in engine.step().finished:
            responses[response.key.sample] = response.tokens.tolist()
    taken = DecodingTime(time.perf_counter() - began, time.process_time() - cpu)
    if wanted is not None and responses != wanted:
        raise SystemExit("drafts changed a token")
    return responses, taken
