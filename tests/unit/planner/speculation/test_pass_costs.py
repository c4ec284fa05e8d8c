"""Costs of passes and drafting are learned from steps: lines, padded shapes, and unobserved widths."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_planner.speculation.pass_costs import DraftCosts, PassCosts

PLAIN = np.arange(600)
TILES = -(-PLAIN // 16) * 16


@settings(max_examples=5, deadline=None)
@given(st.floats(1e-3, 1e-1), st.floats(1e-6, 1e-3), st.integers(0, 2**16))
def test_a_line_is_found_between_and_beyond_what_was_seen(fixed: float, by_row: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = PassCosts.unknown(PLAIN)
    for rows in random.integers(1, 200, 300):
        costs = costs.observed(int(rows), 64 * int(rows), False, fixed + by_row * rows)
    found = costs.seconds(1, 298, 64)
    expected = fixed + by_row * np.arange(1, 300)
    off = np.abs(found / expected - 1)
    assert (off[:180] < 0.02).all()
    assert (off < 0.1).all()


def test_rows_of_one_padded_width_cost_the_same() -> None:
    costs = PassCosts.unknown(TILES)
    for rows in (4, 20, 36) * 30:
        costs = costs.observed(rows, 64 * rows, rows > 16, 1e-3 + 1e-4 * int(TILES[rows]))
    found = costs.seconds(4, 40, 0)
    assert np.ptp(found[1:13]) == 0
    assert np.isclose(found[0], 2.6e-3, rtol=0.05)
    assert np.isclose(found[13], 4.2e-3, rtol=0.1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.floats(1e-5, 1.0)), min_size=1, max_size=60))
def test_costs_of_any_steps_are_positive_and_never_fall(steps: list[tuple[int, bool, float]]) -> None:
    costs = PassCosts.unknown(PLAIN)
    for rows, verifying, seconds in steps:
        costs = costs.observed(rows, rows * 100, verifying, seconds)
    found = costs.seconds(1, 500, 100)
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-12 * found[:-1]).all()


def test_one_slow_step_among_many_changes_little() -> None:
    costs = PassCosts.unknown(PLAIN)
    for index in range(200):
        costs = costs.observed(8, 800, False, 5.0 if index == 100 else 1e-2)
    assert costs.seconds(8, 0, 800)[0] < 1.1e-2


def test_drafting_costs_by_request_and_length() -> None:
    costs = DraftCosts.unknown(2)
    assert costs.seconds(0, 100, 8) == 0
    for requests in (1, 4, 16, 64) * 10:
        costs = costs.observed(0, requests, 8, 1e-4 + 1e-5 * requests * 8)
    assert np.isclose(costs.seconds(0, 32, 8), 1e-4 + 1e-5 * 256, rtol=0.05)
    assert costs.seconds(1, 32, 8) == 0
