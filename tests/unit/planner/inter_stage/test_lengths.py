"""The length model: expectations, cut responses, prompt lengths, drift, and the prior."""

import math

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
    model = LengthModel(1000).with_batch((int(p), int(2 * p + generator.integers(1, 50))) for p in prompts)
    assert model.correlation > 0.9
    assert model.remaining(0, 95) > 2 * model.remaining(0, 10)
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


def _repeated(visits: int, share: float, seed: int = 3) -> tuple[LengthModel, np.ndarray]:
    """Return a model that saw 128 prompts `visits` times, with 4 responses each, and the prompts' own by_prompt."""
    generator = np.random.default_rng(seed)
    by_prompt = math.sqrt(share) * generator.standard_normal(128)
    model = LengthModel(4096)
    for _ in range(visits):
        scores = np.repeat(by_prompt, 4) + math.sqrt(1 - share) * generator.standard_normal(512)
        lengths = np.exp(4 + scores).astype(int)
        model = model.with_batch(((5, int(n)) for n in lengths), lines=np.repeat(np.arange(1, 129), 4).tolist())
    return model, by_prompt


def test_prompts_that_repeat_are_remembered_when_they_tell_something() -> None:
    model, by_prompt = _repeated(3, 0.6)
    assert model.by_prompt.share == pytest.approx(0.6, abs=0.12)
    zeros, prompts = np.zeros(128, dtype=np.int64), np.full(128, 5)
    expected = model.remaining_each(zeros, prompts, range(1, 129))
    truth = np.exp(4 + by_prompt + 0.2)  # mean of a log-normal whose rest has variance 0.4
    apart = np.abs(np.log(expected) - np.log(truth)).mean()
    blind = np.abs(np.log(model.remaining_each(zeros, prompts)) - np.log(truth)).mean()
    assert apart < 0.5 * blind
    unknown = model.remaining_each(zeros[:1], prompts[:1], [999])
    assert unknown[0] == pytest.approx(model.remaining(0, 5), rel=0.05)


def test_prompts_that_tell_nothing_change_nothing() -> None:
    model, _ = _repeated(3, 0.0)
    assert model.by_prompt.share == 0
    so_far, prompts = np.arange(128), np.full(128, 5)
    assert (model.remaining_each(so_far, prompts, range(1, 129)) == model.remaining_each(so_far, prompts)).all()
    first, second = (model.draw(np.random.default_rng(0), prompts, lines) for lines in (range(1, 129), ()))
    assert (first == second).all()


def test_samples_of_one_prompt_are_drawn_alike_and_all_together_as_before() -> None:
    model, _ = _repeated(3, 0.6)
    lines = np.repeat(np.arange(1000, 3000), 4)  # prompts never seen
    drawn = np.log(model.draw(np.random.default_rng(0), np.full(8000, 5), lines).reshape(2000, 4))
    alone = np.log(model.draw(np.random.default_rng(0), np.full(8000, 5)))
    assert drawn.mean() == pytest.approx(alone.mean(), abs=0.06)
    assert drawn.std() == pytest.approx(alone.std(), rel=0.05)
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] == pytest.approx(0.6, abs=0.1)


def test_what_was_seen_long_ago_of_a_prompt_counts_less() -> None:
    model, _ = _repeated(2, 0.6)
    (before,), _ = model.by_prompt.expected(np.array([7]))
    lengths = np.where(np.arange(512) // 4 == 6, 4000, 50)  # prompt 7 has become the longest of all
    batch = [(5, int(n)) for n in lengths]
    model = model.with_batch(batch, lines=np.repeat(np.arange(1, 129), 4).tolist())
    (after,), _ = model.by_prompt.expected(np.array([7]))
    assert after > before + 0.5


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 64), st.integers(0, 9))
def test_answers_with_prompts_stay_within_the_limit(count: int, names: int, so_far: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = LengthModel.prior(64)
    for _ in range(3):
        lines = generator.integers(1, names + 1, count)
        lengths = np.minimum(64, lines + generator.integers(0, 8, count))
        model = model.with_batch(((3, int(n)) for n in lengths), lines=lines.tolist())
    asked = np.arange(names + 2)
    left = model.remaining_each(np.full(len(asked), so_far), np.full(len(asked), 3), asked)
    assert ((left >= 0) & (left <= 64 - so_far)).all()
    drawn = model.draw(generator, np.full(len(asked), 3), asked)
    assert ((drawn >= 1) & (drawn <= 64)).all()
