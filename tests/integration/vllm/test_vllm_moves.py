"""Samples that move between two real vLLM engines with their caches.

At any length and any moment their tokens are those of an undisturbed engine, and no computed cache entry is computed
again.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import finish, requests, resumed
from tests.support.workers.generation_roles import generation_job
from tests.support.workers.migration_stage import TOP_K, write_long_policy

from rlhf_api.job import RLHFJobSpec
from rlhf_common.samples import ResponsePart, SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineError, kv_moves_of
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.vllm_engine.core import CoreStep
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.generation.vllm_engine.kv_moves import VllmKvMoves
from rlhf_workers.models.kv_slices import KvSlice
from rlhf_workers.models.loading import load_tokenizer

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

BLOCK = 32
SLOTS = 6
LONGEST = 140
TOLERANCE = 1e-4
"""Tolerance of log-probabilities in float32: another batch may change the last bits."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_long_policy(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def engines(policy: Path) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield built(policy), built(policy)
    torch.set_num_threads(before)


@pytest.fixture
def pair(engines: tuple[VllmEngine, VllmEngine]) -> Iterator[tuple[VllmEngine, VllmEngine]]:
    """Yield engines that are empty when a test begins, and check that they are empty after it."""
    yield engines
    for engine in engines:
        engine.withdraw()
        for _ in range(SLOTS):
            moves_of(engine).release()


def built(policy: Path, **generation: Any) -> VllmEngine:
    spec = spec_of(policy, engine="vllm", **generation)
    engine = build_engine(spec, load_tokenizer(str(policy), ""), torch.device("cpu"))
    assert isinstance(engine, VllmEngine)
    return engine


def spec_of(policy: Path, **generation: Any) -> RLHFJobSpec:
    plain = {"mode": "Disabled"}  # one token per step: the tests count them
    spec = generation_job(policy, deterministic=False, maxBatchSize=SLOTS, speculation=plain, **generation).spec
    sizes = {"max_prompt_tokens": LONGEST, "max_response_tokens": LONGEST, "top_k": TOP_K}
    return spec.model_copy(update={"rollout": spec.rollout.model_copy(update=sizes)})


def moves_of(engine: VllmEngine) -> VllmKvMoves:
    assert engine.moves is not None
    return engine.moves


def exported(engine: VllmEngine, key: SampleKey, cuts: list[int]) -> KvSlice | None:
    """Return the whole cache, in parts with these edges."""
    stop = moves_of(engine).cached(key)
    assert stop is not None
    edges = sorted({0, stop, *[cut for cut in cuts if cut < stop]})
    parts = [moves_of(engine).export(key, *edge) for edge in itertools.pairwise(edges)]
    if not parts:
        return None
    layers = [
        (torch.cat([part.layers[at][0] for part in parts], dim=1), torch.cat([part.layers[at][1] for part in parts], 1))
        for at in range(len(parts[0].layers))
    ]
    return KvSlice(0, stop, tuple(layers))


def move(source: VllmEngine, key: SampleKey, destination: VllmEngine, cuts: list[int]) -> SampleKey:
    """Move a sample between two steps."""
    cache = exported(source, key, cuts)
    moved = replace(moves_of(source).carried(key), key=key._replace(attempt=key.attempt + 1))
    assert moves_of(destination).reserve()
    moves_of(destination).admit(moved, cache)
    assert len(source.withdraw([key])) == 1
    return moved.key


@contextmanager
def scheduled(engine: VllmEngine) -> Iterator[list[int]]:
    """Yield the tokens of each sample in each step that went through the model, according to vLLM."""
    counts: list[int] = []
    step = engine._core.step

    def recorded() -> CoreStep:
        done = step()
        counts.extend(done.scheduled.values())
        return done

    engine._core.step = recorded  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        engine._core.step = step  # type: ignore[method-assign]


def forget_prefixes(*engines: VllmEngine) -> None:
    """Clear the prefix cache, because entries of an earlier test would hide what is computed."""
    for engine in engines:
        assert engine._core._core.reset_prefix_cache()


def check(part: ResponsePart, other: ResponsePart) -> None:
    assert part.tokens.tolist() == other.tokens.tolist()
    assert np.abs(part.log_probabilities - other.log_probabilities).max() < TOLERANCE
    assert part.finish_reason == other.finish_reason


def of_length(number: int, prompt: int, response: int) -> SampleRequest:
    tokens = np.random.default_rng(number).integers(3, 50, prompt).astype(np.int32)
    return SampleRequest(SampleKey(0, number, 0), tokens, 7919 * number + 1, response)


LENGTHS = [
    (prompt, tokens)
    for prompt, positions in itertools.product((1, 32, 33), (31, 32, 33, 64))
    if 1 <= (tokens := positions - prompt + 1) <= LONGEST
]
"""(prompt, generated) tokens whose positions end before, on and after a block's edge."""


def test_a_cache_of_any_length_is_read_back_and_not_one_token_is_computed_again(
    pair: tuple[VllmEngine, VllmEngine],
) -> None:
    home, away = pair
    for number, (prompt, tokens) in enumerate(LENGTHS):
        sample = of_length(number, prompt, tokens + 6)
        undisturbed = finish(home, [sample])[number]
        forget_prefixes(home, away)
        home.submit([sample])
        for _ in range(tokens):
            home.step()
        assert moves_of(home).cached(sample.key) == prompt + tokens - 1
        before = exported(home, sample.key, [])
        moved = move(home, sample.key, away, cuts=[7, 40])
        with scheduled(away) as counts:
            report = away.step()
            assert (report.prefilled, report.rows, report.decoded) == (0, 1, 1)
            after = moves_of(away).export(moved, 0, prompt + tokens - 1)
            assert before is not None
            assert all(
                torch.equal(array, other)
                for layer, same in zip(before.layers, after.layers, strict=True)
                for array, other in zip(layer, same, strict=True)
            )
            check(finish(away)[number], undisturbed)
        assert counts == [1] * 6


def test_any_moment_any_batch_and_any_number_of_moves_give_the_same_tokens(pair: tuple[VllmEngine, VllmEngine]) -> None:
    samples = requests(8, seed=3, longest=70, response=100)
    undisturbed = finish(pair[0], samples[:SLOTS]) | finish(pair[0], samples[SLOTS:])
    moments = random.Random(5)
    home, away = pair
    home.submit(samples[:5])
    away.submit(samples[5:])
    done: dict[int, ResponsePart] = {}
    moved, turn = 0, 0
    while home.in_flight or away.in_flight:
        for engine in pair:
            done |= steps(engine, 1)
        turn += 1
        source, destination = moments.sample(pair, 2)
        if turn % 4 == 0 and source.in_flight and destination.in_flight < SLOTS:
            key = moments.choice(sorted(source._by_key))
            move(source, key, destination, cuts=[moments.randrange(1, 170), BLOCK])
            moved += 1
    assert moved > 15
    for number, response in undisturbed.items():
        check(response, done[number])


def test_a_paused_sample_keeps_its_place_and_a_step_of_paused_ones_alone_does_nothing(
    pair: tuple[VllmEngine, VllmEngine],
) -> None:
    home, _ = pair
    samples = requests(3, seed=4, longest=40, response=50)
    undisturbed = finish(home, samples)
    home.submit(samples)
    for _ in range(9):
        home.step()
    moves, key = moves_of(home), samples[1].key
    moves.pause(key, True)
    length = len(moves.carried(key).tokens)
    for _ in range(5):
        home.step()
    assert len(moves.carried(key).tokens) == length
    assert len(moves.carried(samples[0].key).tokens) == length + 5
    for sample in samples:
        moves.pause(sample.key, True)
    with scheduled(home) as counts:
        report = home.step()
    assert (counts, report.decoded, report.prefilled, report.passes) == ([], 0, 0, 0)
    for sample in samples:
        moves.pause(sample.key, False)
    assert not home._core._core.reset_prefix_cache()  # refused, because the samples use the blocks
    with scheduled(home) as counts:
        done = finish(home)
    assert set(counts) == {1}
    for number, response in undisturbed.items():
        check(response, done[number])


def test_a_paused_sample_that_waits_is_not_taken_up(pair: tuple[VllmEngine, VllmEngine]) -> None:
    home, away = pair
    samples = requests(SLOTS + 1, seed=6, longest=30, response=20)
    undisturbed = finish(home, samples)
    home.submit(samples)
    home.step()
    last = samples[-1].key
    assert moves_of(home).cached(last) == 0
    moves_of(home).pause(last, True)
    done: dict[int, ResponsePart] = {}
    while len(done) < SLOTS:
        done |= steps(home, 1)
    with scheduled(home) as counts:
        assert not home.step().decoded
    assert not counts
    move(home, last, away, cuts=[])
    done |= finish(away)
    for number, response in undisturbed.items():
        check(response, done[number])


def test_a_sample_moves_on_before_its_cache_was_loaded(pair: tuple[VllmEngine, VllmEngine]) -> None:
    home, away = pair
    sample = of_length(77, 40, 60)
    undisturbed = finish(home, [sample])[77]
    forget_prefixes(home, away)
    home.submit([sample])
    for _ in range(21):
        home.step()
    there = move(home, sample.key, away, cuts=[])
    assert moves_of(away).cached(there) == 60
    move(away, there, home, cuts=[33])
    with scheduled(home) as counts:
        check(finish(home)[77], undisturbed)
    assert set(counts) == {1}


def test_new_weights_leave_a_cache_that_waits_and_one_that_is_in_blocks(
    pair: tuple[VllmEngine, VllmEngine], policy: Path
) -> None:
    home, away = pair
    sample = of_length(78, 40, 60)
    home.submit([sample])
    for _ in range(21):
        home.step()
    cache = exported(home, sample.key, [])
    request = moves_of(home).carried(sample.key)
    tensors = load_file(policy / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in tensors.items()}
    assert moves_of(away).reserve()
    moves_of(away).admit(request, cache)
    for engine in pair:
        engine.load_weights(changed, 1)
    assert moves_of(home).cached(sample.key) == moves_of(away).cached(sample.key) == 60
    with scheduled(home) as at_home, scheduled(away) as abroad:
        check(finish(home)[78], finish(away)[78])
    assert set(at_home) == set(abroad) == {1}
    for engine in pair:
        engine.load_weights(tensors, 0)


def test_what_does_not_fit_is_refused_and_the_place_is_free_again(pair: tuple[VllmEngine, VllmEngine]) -> None:
    home, away = pair
    sample = of_length(79, 40, 60)
    home.submit([sample])
    for _ in range(5):
        home.step()
    request, whole = moves_of(home).carried(sample.key), exported(home, sample.key, [])
    assert whole is not None
    double = tuple((keys.double(), values) for keys, values in whole.layers)
    for bad, cache in [
        (request, replace(whole, layers=whole.layers[:1])),
        (request, replace(whole, stop=whole.stop + 1)),
        (request, replace(whole, start=1)),
        (request, replace(whole, layers=double)),
        (replace(request, tokens=request.tokens[:-1]), whole),
    ]:
        assert moves_of(away).reserve()
        with pytest.raises(EngineError, match="sample 79 of iteration 0"):
            moves_of(away).admit(bad, cache)
        assert away.in_flight == 0
    assert [moves_of(away).reserve() for _ in range(SLOTS + 1)] == [True] * SLOTS + [False]
    moves_of(away).release()
    assert moves_of(away).reserve()


def test_layouts_are_alike_between_workers_of_a_job_and_differ_from_other_sizes(
    pair: tuple[VllmEngine, VllmEngine],
) -> None:
    home, away = pair
    assert moves_of(home).layout == moves_of(away).layout
    assert moves_of(home).bytes_per_token == 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, size, float32


def test_a_cache_of_the_torch_engine_has_the_same_numbers_and_is_refused_all_the_same(
    pair: tuple[VllmEngine, VllmEngine], policy: Path
) -> None:
    """This test alone compares the two implementations of positions, for one model."""
    home, _ = pair
    torch_engine = build_engine(spec_of(policy, engine="torch"), load_tokenizer(str(policy), ""), torch.device("cpu"))
    torch_moves = kv_moves_of(torch_engine)
    assert torch_moves is not None
    assert torch_moves.shapes == moves_of(home).shapes
    assert torch_moves.layout != moves_of(home).layout
    sample = of_length(81, 20, 60)
    for engine in (home, torch_engine):
        engine.submit([sample])
        for _ in range(30):
            engine.step()
    ours, theirs = moves_of(home).export(sample.key, 0, 49), torch_moves.export(sample.key, 0, 49)
    for layer, same in zip(ours.layers, theirs.layers, strict=True):
        for array, other in zip(layer, same, strict=True):
            assert torch.allclose(array, other, atol=TOLERANCE)
    # It can move between both by its tokens.
    (part,) = torch_engine.withdraw([sample.key])
    undisturbed = finish(home)[81]
    check(finish(home, [resumed(sample, part)])[81], undisturbed)


def test_a_cache_goes_to_a_worker_of_two_executor_processes_and_back(
    pair: tuple[VllmEngine, VllmEngine], policy: Path
) -> None:
    """Each of the two has half of the heads."""
    home, _ = pair
    wide = built(policy, parallelism={"tensor": 2})
    try:
        assert moves_of(wide).layout == moves_of(home).layout
        sample = of_length(80, 33, 60)
        undisturbed = finish(home, [sample])[80]
        forget_prefixes(home)
        home.submit([sample])
        for _ in range(32):
            home.step()
        before = exported(home, sample.key, [])
        there = move(home, sample.key, wide, cuts=[7, 40])
        with scheduled(wide) as counts:
            wide.step()
            after = moves_of(wide).export(there, 0, 64)
            wide.step()
        assert before is not None
        assert torch.equal(before.layers[3][0], after.layers[3][0])
        assert torch.equal(before.layers[0][1], after.layers[0][1])
        move(wide, there, home, cuts=[9])
        with scheduled(home) as counts_at_home:
            check(finish(home)[80], undisturbed)
        assert set(counts) | set(counts_at_home) == {1}
    finally:
        wide._core.close()


def test_a_worker_without_blocks_takes_no_sample_and_one_whose_blocks_went_keeps_its_cache(
    pair: tuple[VllmEngine, VllmEngine], policy: Path
) -> None:
    """Twenty blocks: two samples of the longest length, and no third one."""
    home, _ = pair
    tight = built(policy, engineArgs={"num_gpu_blocks_override": 21})
    samples = [of_length(90 + number, 100, 140) for number in range(4)]
    undisturbed = finish(home, samples)
    home.submit(samples[:1])
    for _ in range(30):
        home.step()
    assert [moves_of(tight).reserve() for _ in range(3)] == [True, True, False]
    moves_of(tight).release()
    cache, request = exported(home, samples[0].key, []), moves_of(home).carried(samples[0].key)
    tight.submit(samples[1:])
    done = steps(tight, 70)  # they have eighteen blocks now; the fourth needs five
    moves_of(tight).admit(request, cache)
    assert not moves_of(tight).reserve()
    done |= steps(tight, 5)
    assert moves_of(tight).cached(request.key) == 129
    assert moves_of(tight).carried(request.key).tokens.tolist() == request.tokens.tolist()
    home.withdraw()
    done |= finish(tight)
    for number, response in undisturbed.items():
        check(response, done[number])


def test_a_model_whose_caches_are_no_whole_sequences_moves_by_tokens(tmp_path: Path) -> None:
    engine = built(write_policy(tmp_path / "policy", "mistral", head_dim=32))
    assert engine.moves is None
    assert engine._core.caches is not None
    assert "SlidingWindowSpec" in engine._core.caches.refusal


def steps(engine: VllmEngine, count: int) -> dict[int, ResponsePart]:
    done: dict[int, ResponsePart] = {}
    for _ in range(count):
        done |= {response.key.sample: response for response in engine.step().finished}
    return done
