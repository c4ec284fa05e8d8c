"""What the length model says: expectations, cut responses, prompt lengths, drift, and the prior."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_planner.inter_stage.lengths import WINDOW, LengthModel

PAIRS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 64)), max_size=200)


@settings(deadline=None, max_examples=40)
@given(st.lists(PAIRS, max_size=4), st.integers(0, 64), st.integers(0, 100), st.integers(0, 5))
def test_answers_stay_within_the_limit(
    batches: list[list[tuple[int, int]]], so_far: int, prompt: int, seed: int
) -> None:
    model = LengthModel.prior(64)
    for pairs in batches:
        model = model.with_batch(pairs)
    assert 0 <= model.remaining(so_far, prompt) <= 64 - so_far
    drawn = model.draw(np.random.default_rng(seed), [prompt] * 20)
    assert ((drawn >= 1) & (drawn <= 64)).all()
    assert 0 <= model.drift <= 1


def test_what_remains_is_the_mean_of_those_that_went_on() -> None:
    model = LengthModel(100).with_batch([(5, 10), (5, 20), (5, 40), (5, 60)])
    assert model.remaining(0, 5) == pytest.approx(32.5)
    assert model.remaining(20, 5) == pytest.approx(30)  # of 40 and 60
    assert model.remaining(59, 5) == pytest.approx(1)
    assert model.remaining(80, 5) == pytest.approx(10)  # nothing was ever so long: half of what the limit leaves


def test_responses_cut_at_a_lower_limit_are_known_to_be_at_least_that_long() -> None:
    # Two end at 10, two are cut at 20; later, with a limit of 40, of two that pass 20 both end at 30.
    model = LengthModel(40).with_batch([(5, 10), (5, 10), (5, 20), (5, 20)], limit=20)
    assert model.remaining(20, 5) == pytest.approx(20)  # up to the limit
    model = model.with_batch([(5, 10), (5, 10), (5, 30), (5, 30)])
    assert model.remaining(20, 5) == pytest.approx(10)
    assert model.remaining(0, 5) == pytest.approx(20)  # half 10, half 30


def test_long_prompts_get_their_own_distribution_when_they_tell_something() -> None:
    generator = np.random.default_rng(0)
    prompts = generator.integers(1, 100, 1000)
    told = LengthModel(1000).with_batch((int(p), int(2 * p + generator.integers(1, 50))) for p in prompts)
    assert told.correlation > 0.9
    assert told.remaining(0, 95) > 2 * told.remaining(0, 10)
    nothing = LengthModel(1000).with_batch((int(p), int(generator.integers(1, 50))) for p in prompts)
    assert nothing.remaining(0, 95) == nothing.remaining(0, 10)


def test_drift_is_noticed_and_the_window_begins_anew() -> None:
    generator = np.random.default_rng(0)

    def batch(mean: float) -> list[tuple[int, int]]:
        return [(5, int(value)) for value in 1 + generator.exponential(mean, 256)]

    model = LengthModel(1000)
    for _ in range(WINDOW + 2):
        model = model.with_batch(batch(50))
        assert not model.drifted
    assert len(model.window) == WINDOW
    model = model.with_batch(batch(150))
    assert model.drifted
    assert model.drift > 0.3
    assert len(model.window) == 1
    assert model.remaining(0, 5) > 120


def test_samples_of_one_prompt_are_alike_and_that_is_no_drift() -> None:
    generator = np.random.default_rng(1)
    model = LengthModel(1000)
    for _ in range(WINDOW):
        means = np.repeat(generator.exponential(50, 64), 8)
        model = model.with_batch((5, int(value)) for value in 1 + generator.normal(means, means / 10).clip(0))
        assert not model.drifted


def test_before_the_first_iteration_lengths_are_long_tailed() -> None:
    drawn = LengthModel.prior(1024).draw(np.random.default_rng(0), [10] * 10_000)
    assert np.median(drawn) == pytest.approx(128, rel=0.05)
    assert np.quantile(drawn, 0.985) > 6 * np.median(drawn)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        LengthModel.prior(0)


def test_draws_follow_what_was_seen() -> None:
    model = LengthModel(64).with_batch([(5, 3)] * 75 + [(5, 30)] * 25)
    drawn = model.draw(np.random.default_rng(1), [5] * 4000)
    assert set(drawn.tolist()) == {3, 30}
    assert (drawn == 30).mean() == pytest.approx(0.25, abs=0.03)
