"""Requests for tests, and running an engine until it is done."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from tests.support.models import SPECIAL, VOCABULARY

from rlhf_api.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.torch_engine.engine import TorchEngine

MakeEngine = Callable[..., TorchEngine]
"""Builds an engine: make_engine("llama", deterministic=True, slots=4, temperature=0)."""


def requests(count: int, *, seed: int = 0, longest: int = 40, response: int = 40) -> list[SampleRequest]:
    """Samples with random prompts of 1 to `longest` tokens and random keys."""
    random = np.random.default_rng(seed)
    return [
        SampleRequest(
            SampleKey(0, index, 0),
            random.integers(len(SPECIAL), VOCABULARY, random.integers(1, longest + 1)).astype(np.int32),
            int(random.integers(2**63)),
            response,
        )
        for index in range(count)
    ]


def finish(engine: Engine, samples: Sequence[SampleRequest] = ()) -> dict[int, ResponsePart]:
    """Submits `samples` and steps until the engine holds nothing; responses by sample number, each exactly once."""
    engine.submit(samples)
    done: dict[int, ResponsePart] = {}
    while engine.held:
        for response in engine.step().finished:
            assert response.key.sample not in done
            done[response.key.sample] = response
    return done


def resumed(request: SampleRequest, given: ResponsePart) -> SampleRequest:
    """The request that goes on from withdrawn tokens, under the next attempt."""
    return replace(
        request,
        key=request.key._replace(attempt=given.key.attempt + 1),
        tokens=given.tokens,
        log_probabilities=given.log_probabilities,
        versions=given.versions,
    )


def same_bits(one: ResponsePart, other: ResponsePart) -> bool:
    """Equal tokens, log-probabilities to the last bit, and reason."""
    return (
        one.tokens.tobytes() == other.tokens.tobytes()
        and one.log_probabilities.tobytes() == other.log_probabilities.tobytes()
        and one.finish_reason == other.finish_reason
    )
