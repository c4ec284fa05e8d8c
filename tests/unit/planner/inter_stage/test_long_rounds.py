"""Simulated periods of long rounds, against figures by hand and against what must hold for any lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.plans.simulated_periods import LIMIT, WORKERS, learned, period_setup, stage_costs

from rlhf_planner.inter_stage.choose import FusionChoice
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.long_rounds import choose_rounds
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.inter_stage.simulated_rounds import simulate_round

UNFUSED = FusionChoice(0, WORKERS, "Auto", 0.0, 0.0, (), "")


def played(lengths: list[list[int]], batch: int, **more: Any) -> tuple[float, tuple[int, ...]]:
    setup = replace(period_setup(batch, **more), samples_per_prompt=len(lengths[0]))
    layout = replace(setup.layout, prompts=[16] * sum(map(len, lengths)), overlap=False)
    tokens = np.array(lengths, dtype=np.int64)
    model = LengthModel.prior(LIMIT)
    answer = simulate_round(tokens, setup, layout, stage_costs(0.0), UNFUSED, model)
    return answer.seconds, answer.cut


@pytest.mark.parametrize(
    ("prompts", "lines", "words"), [((), (), "at least one prompt"), ((16, 16), (1,), "1 lines do not belong to 2")]
)
def test_a_period_without_prompts_or_with_other_lines_is_an_error(
    prompts: tuple[int, ...], lines: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        replace(period_setup(2), prompts=prompts, lines=lines)


@pytest.mark.parametrize(("cut_by", "seconds"), [("Clock", 0.40), ("Counts", 0.40)])
def test_a_short_round_ends_when_enough_prompts_are_finished(cut_by: Any, seconds: float) -> None:
    took, cut = played([[10, 40], [20, 20], [30, 900]], 2, cut_by=cut_by)
    assert cut == (2,)
    assert took == pytest.approx(seconds, rel=0.01), "40 steps of 10 ms"


def test_a_cut_by_counts_waits_until_the_others_are_longer() -> None:
    """One row a worker: the second worker begins the third prompt after the second, and cuts it after 20 tokens."""
    setup = replace(period_setup(2, cut_by="Counts"), samples_per_prompt=1)
    layout = IterationSetup(2, 1, [16] * 3, overlap=False)
    costs, lengths = stage_costs(0.0, rows=1), np.array([[20], [20], [900]], dtype=np.int64)
    clock = simulate_round(lengths, replace(setup, cut_by="Clock"), layout, costs, UNFUSED, LengthModel.prior(LIMIT))
    counts = simulate_round(lengths, setup, layout, costs, UNFUSED, LengthModel.prior(LIMIT))
    assert (clock.cut, counts.cut) == ((2,), (2,))
    assert clock.seconds == pytest.approx(0.2, rel=0.01)
    assert counts.seconds == pytest.approx(0.4, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 200), min_size=2, max_size=2), min_size=3, max_size=8), st.data())
def test_a_round_cuts_the_surplus_and_takes_no_longer_than_all_of_it(lengths: list[list[int]], data: Any) -> None:
    batch = data.draw(st.integers(1, len(lengths)))
    setup = replace(period_setup(batch, cut_by=data.draw(st.sampled_from(["Clock", "Counts"]))), samples_per_prompt=2)
    layout = replace(setup.layout, prompts=[16] * 2 * len(lengths))
    tokens, costs, model = np.array(lengths, dtype=np.int64), stage_costs(), LengthModel.prior(LIMIT)
    answer = simulate_round(tokens, setup, layout, costs, UNFUSED, model)
    whole = simulate(tokens.ravel(), layout, costs, model=model)
    assert len(answer.cut) == len(lengths) - batch
    assert 0 < answer.seconds <= whole.seconds * (1 + 1e-9)
    if batch == len(lengths):
        assert answer.seconds == pytest.approx(whole.seconds)
    if setup.cut_by == "Counts":
        longest = [(max(row), number) for number, row in enumerate(lengths)]
        assert set(answer.cut) == {number for _, number in sorted(longest)[batch:]}


def test_long_rounds_are_chosen_for_a_long_tail() -> None:
    choice = choose_rounds(learned(12, 0.6, 60, 1.1), period_setup(12), stage_costs(), 100, seed=1)
    none, *ways = choice.ways
    assert choice.extra in [way.extra for way in ways]
    best = max(ways, key=lambda way: way.gain)
    assert (choice.extra, best.gain > 0.15) == (best.extra, True)
    assert (none.extra, none.period, none.gain, none.error) == (0, 1, 0.0, 0.0)
    assert best.samples_per_second > none.samples_per_second
    assert "samples/s" in choice.reason
    assert "prompts explain" in choice.reason


def test_short_limits_have_no_tail_to_gain_from() -> None:
    """Most responses reach the limit, so that surplus prompts only cost rows."""
    choice = choose_rounds(learned(24, 0.3, 256, 0.5, limit=64), period_setup(24), stage_costs(), 100, seed=1)
    assert choice.extra == 0
    assert "not above the margin" in choice.reason


def test_training_that_takes_most_of_an_iteration_leaves_too_little_to_gain() -> None:
    model, setup = learned(8, 0.6, 60, 1.1), period_setup(8, workers=1)
    gains = [
        max(way.gain for way in choose_rounds(model, replace(setup, training=seconds), stage_costs(), 100, 1).ways)
        for seconds in (0.0, 400.0)
    ]
    assert gains[0] > 0.1 > 0.03 > gains[1]
    beside = replace(setup, training=20.0, overlapped=True)
    assert choose_rounds(model, beside, stage_costs(), 100, 1).extra == 0, "decoding is hidden behind training"


def test_the_same_seed_gives_the_same_choice() -> None:
    model, setup, costs = learned(8, 0.4, 60, 1.0), period_setup(8, workers=1), stage_costs()
    assert choose_rounds(model, setup, costs, 100, 3) == choose_rounds(model, setup, costs, 100, 3)


def test_only_periods_that_fit_are_considered() -> None:
    model = learned(8, 0.4, 60, 1.0)
    choice = choose_rounds(model, period_setup(8, workers=1), stage_costs(), 3, 1)
    assert [way.extra for way in choice.ways] == [0, 4]
    none = choose_rounds(model, period_setup(8, workers=1), stage_costs(), 2, 1)
    assert (none.extra, len(none.ways)) == (0, 1)
    assert "no period of a batch of 8 prompts" in none.reason
