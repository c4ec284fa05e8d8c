"""Drafting is chosen where it is faster, in known worlds, also while they change."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.coordinator.simulated_speculation import MATCHES, Ints, World, run

from rlhf_planner.speculation.controller import (
    FIRST_PLAIN,
    GROWTH,
    PROBE_SHARE,
    DraftController,
    MeasuredStep,
    Outcomes,
    Plan,
)

LONGEST = 8
ROWS = 64 * (LONGEST + 1)
PLAIN: Ints = np.arange(ROWS + 1)
TILES: Ints = -(-np.arange(ROWS + 1) // 16) * 16
NOTHING = Outcomes(*[np.zeros(0, np.int64)] * 4)


def line(fixed: float, by_row: float, widths: Ints = PLAIN) -> Callable[[int], float]:
    return lambda rows: fixed + by_row * float(widths[rows])


def new(widths: Ints = PLAIN, drafters: int = 1) -> DraftController:
    return DraftController.new(drafters, MATCHES, LONGEST, widths)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from((1, 3, 8, 64)),
    st.floats(0.0, 0.95),
    st.floats(0.2e-4, 5e-4),
    st.floats(0.0, 1e-4),
    st.sampled_from((PLAIN, TILES)),
    st.floats(0.3, 1.0),
)
def test_a_world_that_stays_is_never_decoded_slower_than_without_drafts(
    rows: int, acceptance: float, by_row: float, drafting: float, widths: Ints, available: float
) -> None:
    """Except for the cost of probes."""
    world = World(line(2e-3, by_row, widths), (acceptance,), (drafting,), available=available)
    learned, _ = run(new(widths), world, rows, 60)
    _, auto = run(learned, world, rows, 150, seed=1)
    _, none = run(learned, world, rows, 10, seed=1, fixed=0)
    assert auto.rate >= 0.985 * none.rate


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("widths", [PLAIN, TILES], ids=["plain", "tiles"])
@pytest.mark.parametrize(("rows", "acceptance"), [(1, 0.9), (4, 0.6), (16, 0.6), (16, 0.9), (64, 0.3), (64, 0.9)])
def test_as_fast_as_the_best_fixed_length(rows: int, acceptance: float, widths: Ints) -> None:
    world = World(line(5e-3, 1e-4, widths), (acceptance,), (5e-6,))
    learned, _ = run(new(widths), world, rows, 200)
    _, auto = run(learned, world, rows, 150, seed=1)
    best = max(run(learned, world, rows, 40, seed=1, fixed=length)[1].rate for length in range(LONGEST + 1))
    assert auto.rate >= 0.97 * best


def test_drafts_end_where_they_stop_being_right_and_come_back() -> None:
    good, bad = (World(line(5e-3, 3e-4), (rate,), (2e-4,), noise=0.05) for rate in (0.9, 0.02))
    controller, ran = run(new(), good, 8, 150)
    assert np.mean(ran.slots[-20:]) > 8
    controller, ran = run(controller, bad, 8, 200)
    assert np.mean(ran.slots[-20:]) < 1
    controller, ran = run(controller, good, 8, 600)
    assert np.mean(ran.slots[-20:]) > 8


def test_the_better_of_two_drafters_is_asked_and_one_that_costs_more_than_it_gives_is_not() -> None:
    world = World(line(5e-3, 1e-4), (0.9, 0.3), (1e-5, 2e-3))
    controller, _ = run(new(drafters=2), world, 4, 100)
    assert controller.plan(4, 4 * 64).drafters == (0,)


def test_probing_what_never_pays_costs_less_than_a_hundredth() -> None:
    world = World(line(1e-3, 5e-4), (0.0,), (1e-3,))
    learned, _ = run(new(), world, 16, 100)
    _, auto = run(learned, world, 16, 800, seed=1)
    _, none = run(learned, world, 16, 10, seed=1, fixed=0)
    assert 0 < auto.asked < 80
    assert auto.rate >= (1 - 2 * PROBE_SHARE) * none.rate


def test_a_pass_is_not_much_wider_than_any_that_was_measured() -> None:
    controller, widest = new(), 0
    world = World(line(5e-3, 1e-9), (1.0,), (0.0,))
    for seed in range(30):
        controller, ran = run(controller, world, 4, 1, seed=seed)
        width = 4 + ran.slots[0]
        assert width <= max(4, GROWTH * widest, widest + 1)
        widest = max(widest, width)
    assert widest == 4 * (1 + LONGEST)


def test_nothing_is_drafted_before_a_few_plain_steps_were_measured() -> None:
    unmeasured, controller = Plan((), 0, 0, "Unmeasured", 0.0), new()
    for _ in range(FIRST_PLAIN):
        assert controller.plan(4, 256) == unmeasured
        controller = controller.observe(unmeasured, MeasuredStep(4, 256, 0, 4, 0.0, 5e-3), NOTHING)
    assert controller.plan(4, 256).drafters == (0,)


def test_a_cold_first_step_does_not_make_plain_steps_look_slow() -> None:
    """Measured with 64 samples of a policy whose step takes 1.7 ms: its first step took half as long again."""
    world = World(line(0.84e-3, 1.37e-5), (0.6,), (5e-6,))
    unmeasured = Plan((), 0, 0, "Unmeasured", 0.0)
    cold = new().observe(unmeasured, MeasuredStep(64, 64 * 64, 0, 64, 0.0, 1.5 * world.pass_seconds(64)), NOTHING)
    _, auto = run(cold, world, 64, 150)
    _, none = run(cold, world, 64, 10, fixed=0)
    assert auto.rate >= 0.97 * none.rate


def test_choosing_that_is_slow_where_it_is_seldom_does_not_end_drafts() -> None:
    """Measured with 32 samples and steps of 10 ms: choosing took more than twice as long in the first step after plain
    ones.

    Drafts with a gain of 3% were then never made.
    """
    world = World(line(10e-3, 5e-5), (0.3,), (1e-6,), choosing=0.6e-3, cold=1.4e-3)
    held_up = replace(new(), overhead=3e-3)  # by what else the machine did when drafters were first asked
    learned, _ = run(held_up, world, 32, 800)
    _, auto = run(learned, world, 32, 150, seed=1)
    best = max(run(learned, world, 32, 40, seed=1, fixed=length)[1].rate for length in range(LONGEST + 1))
    assert auto.rate >= 0.97 * best


def test_the_same_steps_give_the_same_choices() -> None:
    world = World(line(5e-3, 1e-4), (0.7, 0.4), (1e-5, 1e-5), noise=0.1)
    first, second = (run(new(drafters=2), world, 4, 60, seed=3) for _ in range(2))
    assert first[1].slots == second[1].slots
    assert first[0].plan(4, 256) == second[0].plan(4, 256)
