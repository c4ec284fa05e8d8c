"""A sample that moves with its KV cache continues as if it had stayed; a cache that does not fit is rejected early."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.model_folders.models import ARCHITECTURES
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_bits

from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest, VersionSpan
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.kv_slices import KvSlice

TOLERANCE = 1e-4
"""Tolerance of log-probabilities in fast mode, where the batch shape may change the last bits of float32."""


def move(source: TorchEngine, key: SampleKey, destination: TorchEngine, cuts: list[int] | None = None) -> SampleKey:
    """Move a sample between two steps; `cuts` are the positions between parts of its cache."""
    stop = source.moves.cached(key)
    assert stop is not None
    edges = sorted({0, stop, *[cut for cut in cuts or [] if cut < stop]})
    parts = [source.moves.export(key, *edge) for edge in itertools.pairwise(edges)]
    cache = joined(parts) if parts else None
    request = source.moves.carried(key)
    moved = replace(request, key=key._replace(attempt=key.attempt + 1))
    assert destination.moves.reserve()
    destination.moves.admit(moved, cache)
    assert len(source.withdraw([key])) == 1
    return moved.key


def joined(parts: list[KvSlice]) -> KvSlice:
    layers = tuple(
        tuple(torch.cat([part.layers[layer][kind] for part in parts], dim=1) for kind in (0, 1))
        for layer in range(len(parts[0].layers))
    )
    return KvSlice(parts[0].start, parts[-1].stop, layers)  # type: ignore[arg-type]


def steps(engine: TorchEngine, count: int) -> dict[int, ResponsePart]:
    done: dict[int, ResponsePart] = {}
    for _ in range(count):
        done |= {response.key.sample: response for response in engine.step().finished}
    return done


def check(result: ResponsePart, expected: ResponsePart, deterministic: bool) -> None:
    assert result.tokens.tolist() == expected.tokens.tolist()
    assert np.abs(result.log_probabilities - expected.log_probabilities).max() < TOLERANCE
    assert not deterministic or same_bits(result, expected)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_there_and_back_across_pool_boundaries_changes_nothing(
    architecture: str, deterministic: bool, make_engine: MakeEngine
) -> None:
    """Prompts have up to 40 tokens and responses 90: positions 64 and 128 are crossed before, at and after a move."""
    samples = requests(6, seed=3, longest=40, response=90)
    undisturbed = finish(make_engine(architecture, deterministic=deterministic), samples)
    home, away = (make_engine(architecture, deterministic=deterministic) for _ in range(2))
    home.submit(samples)
    away.submit(
        [replace(sample, key=SampleKey(0, 50 + number, 0)) for number, sample in enumerate(requests(2, seed=9))]
    )
    done: dict[int, ResponsePart] = {}
    random_moves = random.Random(architecture)
    engines = [home, away]
    turn = 0
    while any(engine.in_flight for engine in engines):
        for engine in engines:
            done |= steps(engine, 1)
        turn += 1
        source, destination = engines if turn % 2 else engines[::-1]
        movable = [
            key for key in sorted(source._state.in_flight) if key.sample < 50 and source.moves.cached(key) is not None
        ]
        if movable and turn % 3 == 0 and destination.in_flight < 8:
            key = random_moves.choice(movable)
            move(source, key, destination, cuts=[random_moves.randrange(1, 130), 64])
    for number, response in undisturbed.items():
        check(response, done[number], deterministic)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.integers(0, 70), paused=st.integers(0, 3), seed=st.integers(0, 99))
def test_any_moment_and_a_pause_give_the_same_bits(
    architecture: str, before: int, paused: int, seed: int, make_engine: MakeEngine
) -> None:
    """Others are decoded while one sample is paused, as during a move."""
    samples = requests(3, seed=seed, response=60)
    undisturbed = finish(make_engine(architecture, deterministic=True), samples)
    home, away = (make_engine(architecture, deterministic=True) for _ in range(2))
    home.submit(samples)
    done = steps(home, before)
    key = samples[1].key
    if home.moves.cached(key) is not None:
        home.moves.pause(key, True)
        length = len(home.moves.carried(key).tokens)
        done |= steps(home, paused)
        assert len(home.moves.carried(key).tokens) == length
        move(home, key, away)
    done |= finish(home) | finish(away)
    assert all(same_bits(response, done[number]) for number, response in undisturbed.items())


def test_a_sample_that_still_replays_its_tokens_goes_on_replaying_elsewhere(make_engine: MakeEngine) -> None:
    sample = requests(1, seed=5, response=60)[0]
    whole = finish(make_engine(deterministic=True), [sample])[0]
    partial = replace(
        sample, tokens=whole.tokens[:50], log_probabilities=whole.log_probabilities[:50], versions=(VersionSpan(0, 50),)
    )
    home, away = make_engine(deterministic=True), make_engine(deterministic=True)
    home.submit([partial])
    steps(home, 1)
    cached = home.moves.cached(sample.key)
    assert cached is not None
    assert len(sample.prompt) <= cached < len(sample.prompt) - 1 + 50
    move(home, sample.key, away)
    assert same_bits(whole, finish(away)[0])


def test_a_sample_without_a_slot_moves_by_its_tokens(make_engine: MakeEngine) -> None:
    samples = requests(3, seed=6)
    home, away = make_engine(slots=1), make_engine()
    home.submit(samples)
    steps(home, 1)
    assert home.moves.cached(samples[2].key) == 0
    move(home, samples[2].key, away)
    done = finish(home) | finish(away)
    undisturbed = finish(make_engine(), samples)
    assert all(done[number].tokens.tolist() == undisturbed[number].tokens.tolist() for number in range(3))


def test_a_full_engine_reserves_nothing_and_a_reserved_slot_is_kept(make_engine: MakeEngine) -> None:
    samples = requests(6, seed=7, response=20)
    engine = make_engine(slots=3)
    engine.submit(samples[:2])
    assert engine.moves.reserve()
    assert not engine.moves.reserve()
    engine.submit(samples[2:4])
    steps(engine, 2)
    assert engine.moves.cached(samples[2].key) == 0
    engine.moves.release()
    steps(engine, 2)
    assert engine.moves.cached(samples[2].key)
    finish(engine)
    assert engine.moves.reserve()


def test_what_does_not_fit_is_refused_and_the_slot_is_free_again(make_engine: MakeEngine) -> None:
    sample = requests(1, seed=8, longest=30)[0]
    home, away = make_engine(slots=1), make_engine(slots=1)
    home.submit([sample])
    steps(home, 5)
    request: SampleRequest = home.moves.carried(sample.key)
    stop = home.moves.cached(sample.key)
    assert stop is not None
    whole = home.moves.export(sample.key, 0, stop)
    wrong = [
        (request, replace(whole, layers=whole.layers[:1])),
        (request, replace(whole, stop=stop + 1)),
        (request, home.moves.export(sample.key, 1, stop)),
        (replace(request, tokens=request.tokens[:-1]), whole),
        (request, replace(whole, layers=tuple((keys.double(), values) for keys, values in whole.layers))),
    ]
    for bad_request, cache in wrong:
        assert away.moves.reserve()
        with pytest.raises(EngineError, match="sample 0 of iteration 0"):
            away.moves.admit(bad_request, cache)
        assert away.in_flight == 0
    assert away.moves.reserve()
    away.moves.admit(request, whole)
    assert finish(away)[0].tokens.tolist() == finish(home)[0].tokens.tolist()


def test_layouts_differ_where_a_cache_could_not_be_read(make_engine: MakeEngine) -> None:
    engines = [make_engine(), make_engine(deterministic=True), make_engine("mistral"), make_engine(response_tokens=40)]
    assert len({engine.moves.layout for engine in engines}) == len(engines)
    assert make_engine().moves.layout == make_engine().moves.layout
    torch.set_num_threads(2)
    assert make_engine(deterministic=True).moves.layout != engines[1].moves.layout
    torch.set_num_threads(1)
    assert make_engine().moves.bytes_per_token == 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, float32
