"""A sample's tokens depend on the sample, not on its batch, the order, the worker, or interruptions."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.workers.engine_driving import MakeEngine, finish, requests, resumed, same_bits

from rlhf_common.samples import ResponsePart, SampleRequest, VersionSpan
from rlhf_workers.generation.torch_engine.engine import TorchEngine

Same = Callable[[ResponsePart, ResponsePart], bool]
LENIENT = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def same_tokens(result: ResponsePart, expected: ResponsePart) -> bool:
    """Return whether the tokens are equal, as fast mode promises on tiny float32 models."""
    return result.tokens.tolist() == expected.tokens.tolist() and result.finish_reason == expected.finish_reason


MODES = pytest.mark.parametrize(("deterministic", "same"), [(False, same_tokens), (True, same_bits)])


def interrupted(
    samples: list[SampleRequest], make: Callable[[], TorchEngine], moves: random.Random
) -> dict[int, ResponsePart]:
    """Decode `samples` on two engines; move random ones to the other engine at random steps."""
    engines = [make(), make()]
    by_number = {sample.key.sample: sample for sample in samples}
    engines[0].submit(samples)
    done: dict[int, ResponsePart] = {}
    left = 8  # a deterministic engine replays a resumed sample's tokens: endless moves would be endless work
    while any(engine.in_flight for engine in engines):
        for engine, other in (engines, engines[::-1]):
            for response in engine.step().finished:
                assert response.key.sample not in done
                done[response.key.sample] = response
            if left and moves.random() < 0.15:
                left -= 1
                chosen = [key for key in sorted(engine._state.in_flight) if moves.random() < 0.4]
                given_back = engine.withdraw(chosen)
                other.submit([resumed(by_number[part.key.sample], part) for part in given_back])
    return done


@pytest.mark.full(quick=1)
@MODES
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_batch_composition_and_order_do_not_matter(
    architecture: str, deterministic: bool, same: Same, make_engine: MakeEngine
) -> None:
    samples = requests(20, longest=48, response=40)
    whole = finish(make_engine(architecture, deterministic=deterministic, slots=20), samples)
    shuffled = random.Random(1).sample(samples, len(samples))
    for slots, order in ((1, samples[:6]), (5, shuffled), (20, shuffled[:17])):
        done = finish(make_engine(architecture, deterministic=deterministic, slots=slots), order)
        assert all(same(response, whole[number]) for number, response in done.items())


@pytest.mark.full(quick=1)
@MODES
@LENIENT
@given(seed=st.integers(0, 2**32 - 1))
def test_withdrawn_and_resumed_elsewhere_equals_undisturbed(
    deterministic: bool, same: Same, make_engine: MakeEngine, seed: int
) -> None:
    samples = requests(8, seed=seed, response=40)
    whole = finish(make_engine(deterministic=deterministic), samples)
    moved = interrupted(samples, lambda: make_engine(deterministic=deterministic), random.Random(seed))
    assert moved.keys() == whole.keys()
    assert all(same(moved[number], whole[number]) for number in whole)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("threads", [1, 2])
def test_deterministic_bits_hold_with_so_many_threads(threads: int, make_engine: MakeEngine) -> None:
    torch.set_num_threads(threads)
    samples = requests(18, longest=48, response=16 if threads == 1 else 4)  # threads that wait for a busy core are dear
    whole = finish(make_engine(deterministic=True, slots=18), samples)
    moved = interrupted(samples, lambda: make_engine(deterministic=True, slots=10), random.Random(threads))
    assert all(same_bits(moved[number], whole[number]) for number in whole)


def test_samples_sent_one_by_one_while_others_decode(make_engine: MakeEngine) -> None:
    samples = requests(12, response=30)
    whole = finish(make_engine(deterministic=True), samples)
    engine = make_engine(deterministic=True, slots=4)
    done: dict[int, ResponsePart] = {}
    for sample in samples:
        engine.submit([sample])
        done |= {response.key.sample: response for response in engine.step().finished}
    done |= finish(engine)
    assert all(same_bits(done[number], whole[number]) for number in whole)


def test_tokens_of_a_resumed_sample_are_forced_not_sampled(make_engine: MakeEngine) -> None:
    sample = requests(1, response=20)[0]
    for deterministic in (False, True):
        foreign = ResponsePart(
            sample.key,
            0,
            np.array([10, 11, 12], np.int32),
            np.array([-1.0, -2.0, -3.0], np.float32),
            (VersionSpan(4, 2), VersionSpan(5, 1)),
        )
        engine = make_engine(deterministic=deterministic, version=6)
        done = finish(engine, [resumed(sample, foreign)])[sample.key.sample]
        assert done.tokens[:3].tolist() == [10, 11, 12]
        assert done.log_probabilities[:3].tolist() == [-1.0, -2.0, -3.0]
        assert done.versions == ((4, 2), (5, 1), (6, len(done.tokens) - 3))
        assert len(done.tokens) <= 20
