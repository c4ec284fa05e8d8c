"""Draft lengths per sample: the best of all choices, found without trying all."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_planner.speculation.draft_lengths import best_of_supply, best_slots, lengths_of

RATE = st.floats(0.0, 1.0)
DRAFTS = st.lists(st.lists(RATE, min_size=0, max_size=3), min_size=1, max_size=4)
COSTS = st.lists(st.floats(0.1, 10.0), min_size=13, max_size=13)
POSITIONS = 3


def survival_of(drafts: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    survival = np.zeros((len(drafts), POSITIONS))
    for row, rates in enumerate(drafts):
        survival[row, : len(rates)] = np.cumprod(rates)
    return survival, np.array([len(rates) for rates in drafts])


@settings(max_examples=150, deadline=None)
@given(DRAFTS, COSTS, st.floats(0.0, 3.0))
def test_the_choice_is_the_best_of_all_lengths_of_all_samples(
    drafts: list[list[float]], costs: list[float], drafting: float
) -> None:
    """Also if longer passes are faster, because measured costs may have any shape."""
    survival, offered = survival_of(drafts)
    there = np.arange(POSITIONS) < offered[:, None]
    best = best_slots(len(drafts), -np.sort(-survival[there]), np.array(costs), drafting, plain := costs[0])
    lengths = lengths_of(survival, offered, best.slots)
    assert lengths.sum() == best.slots
    assert (lengths <= offered).all()
    taken = sum(survival[row, : int(length)].sum() for row, length in enumerate(lengths))
    seconds = plain if best.slots == 0 else drafting + costs[best.slots]
    brute = len(drafts) / plain
    for choice in product(*(range(len(rates) + 1) for rates in drafts)):
        if sum(choice):
            tokens = len(drafts) + sum(survival[row, :length].sum() for row, length in enumerate(choice))
            brute = max(brute, tokens / (drafting + costs[sum(choice)]))
    assert np.isclose((len(drafts) + taken) / seconds, brute)
    assert np.isclose(best.tokens / best.seconds, brute)


@settings(max_examples=100, deadline=None)
@given(DRAFTS, COSTS, st.floats(0.0, 3.0))
def test_drafts_that_are_certain_to_come_are_chosen_among_as_those_at_hand(
    drafts: list[list[float]], costs: list[float], drafting: float
) -> None:
    survival, offered = survival_of(drafts)
    there = np.arange(POSITIONS) < offered[:, None]
    seconds = np.array(costs)
    at_hand = best_slots(len(drafts), -np.sort(-survival[there]), seconds, drafting, costs[0])
    expected = best_of_supply(len(drafts), survival, there.astype(float), seconds, drafting)
    assert np.isclose(expected.tokens / expected.seconds, at_hand.tokens / at_hand.seconds)


@settings(max_examples=100, deadline=None)
@given(DRAFTS, COSTS, st.integers(0, 3), st.floats(1.0, 2.0))
def test_drafts_that_are_right_more_often_never_give_less(
    drafts: list[list[float]], costs: list[float], which: int, more: float
) -> None:
    survival, offered = survival_of(drafts)
    better = [[min(1.0, rate * more) if row == which else rate for rate in rates] for row, rates in enumerate(drafts)]
    there = np.arange(POSITIONS) < offered[:, None]
    rates = []
    for value in (survival, survival_of(better)[0]):
        best = best_slots(len(drafts), -np.sort(-value[there]), np.array(costs), 0.0, costs[0])
        rates.append(best.tokens / best.seconds)
    assert rates[1] >= rates[0] * (1 - 1e-12)
