"""Decodes samples on one engine, with the time it took: what benchmarks of drafts compare ways by."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from rlhf_common.samples import SampleRequest
from rlhf_workers.generation.engine import Engine

Responses = dict[int, list[int]]
"""Sample -> tokens."""


class DecodingTime(NamedTuple):
    """What decoding the samples took."""

    seconds: float
    cpu_seconds: float


def decode(
    engine: Engine, samples: Sequence[SampleRequest], wanted: Responses | None
) -> tuple[Responses, DecodingTime]:
    """Return the responses, and what they took; SystemExit when they are not those that are wanted."""
    responses: Responses = {}
    began, cpu = time.perf_counter(), time.process_time()
    engine.submit(samples)
    while engine.held:
        for response in engine.step().finished:
            responses[response.key.sample] = response.tokens.tolist()
    taken = DecodingTime(time.perf_counter() - began, time.process_time() - cpu)
    if wanted is not None and responses != wanted:
        raise SystemExit("drafts changed a token")
    return responses, taken
