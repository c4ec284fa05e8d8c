"""Requests for tests, and helpers that run an engine until it is done."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from tests.support.model_folders.models import SPECIAL, VOCABULARY

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.torch_engine.engine import TorchEngine

ROUNDING = 1e-4
"""Tolerance of log-probabilities: another width may change the last bits of float32."""
MakeEngine = Callable[..., TorchEngine]
"""Builds an engine: make_engine("llama", deterministic=True, slots=4, temperature=0)."""


def requests(count: int, *, seed: int = 0, longest: int = 40, response: int = 40) -> list[SampleRequest]:
    """Return samples with random prompts of 1 to `longest` tokens and random keys."""
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
    """Submit `samples` and step until the engine is empty; return responses by sample number, each exactly once."""
    engine.submit(samples)
    done: dict[int, ResponsePart] = {}
    while engine.in_flight:
        for response in engine.step().finished:
            assert response.key.sample not in done
            done[response.key.sample] = response
    return done


def resumed(request: SampleRequest, part: ResponsePart) -> SampleRequest:
    """Return the request that continues from withdrawn tokens, with the next attempt."""
    return replace(
        request,
        key=request.key._replace(attempt=part.key.attempt + 1),
        tokens=part.tokens,
        log_probabilities=part.log_probabilities,
        versions=part.versions,
    )


def same_bits(part: ResponsePart, other: ResponsePart) -> bool:
    """Return whether tokens, log-probabilities to the last bit, and reason are equal."""
    return (
        part.tokens.tobytes() == other.tokens.tobytes()
        and part.log_probabilities.tobytes() == other.log_probabilities.tobytes()
        and part.finish_reason == other.finish_reason
    )


def same_tokens(done: Mapping[int, ResponsePart], wanted: Mapping[int, ResponsePart]) -> None:
    """Assert that responses are equal, with log-probabilities up to rounding."""
    assert done.keys() == wanted.keys()
    for number, response in done.items():
        other = wanted[number]
        assert response.tokens.tolist() == other.tokens.tolist()
        assert response.versions == other.versions
        assert response.finish_reason == other.finish_reason
        assert np.abs(response.log_probabilities - other.log_probabilities).max(initial=0) < ROUNDING


def disturb(
    engine: TorchEngine,
    other: TorchEngine,
    moves: random.Random,
    by_number: dict[int, SampleRequest],
    done: dict[int, ResponsePart],
) -> None:
    """Pause one sample of an engine for a step, or move it to the other engine, by its tokens or with its cache."""
    key = moves.choice(sorted(engine._state.in_flight))
    match moves.randrange(3):
        case 0:
            engine.moves.pause(key, True)
            for response in engine.step().finished:
                done[response.key.sample] = response
            engine.moves.pause(key, False)
        case 1:
            other.submit([resumed(by_number[part.key.sample], part) for part in engine.withdraw([key])])
        case 2 if (stop := engine.moves.cached(key)) and other.moves.reserve():
            request = engine.moves.carried(key)
            moved = replace(request, key=key._replace(attempt=key.attempt + 1))
            other.moves.admit(moved, engine.moves.export(key, 0, stop))
            engine.withdraw([key])
