"""Acceptance is learned from counts, by drafter, match and position."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_planner.speculation.acceptance import PRIOR_RATE, PRIOR_TRIALS, WINDOW, Acceptance

SHAPE = (2, 4, 6)
OUTCOMES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=30
).map(lambda rows: [(drafter, match, drafted, min(drafted, right)) for drafter, match, drafted, right in rows])


def observed(acceptance: Acceptance, outcomes: list[tuple[int, int, int, int]]) -> Acceptance:
    return acceptance.observed(*np.array(outcomes, np.int64).reshape(-1, 4).T)


@settings(max_examples=60, deadline=None)
@given(OUTCOMES)
def test_counts_are_of_tokens_that_were_judged(outcomes: list[tuple[int, int, int, int]]) -> None:
    learned = observed(Acceptance.unknown(*SHAPE), outcomes)
    judged, right = np.zeros(SHAPE), np.zeros(SHAPE)
    for drafter, match, drafted, accepted in outcomes:
        for position in range(drafted):
            if position <= accepted:
                judged[drafter, match, position] += 1
            if position < accepted:
                right[drafter, match, position] += 1
    assert (learned.judged == judged).all()
    assert (learned.accepted == right).all()
    assert (np.diff(learned.survival, axis=2) <= 0).all()


@settings(max_examples=60, deadline=None)
@given(OUTCOMES, st.data())
def test_one_more_accepted_token_makes_no_token_less_likely(
    outcomes: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    """Applies to its own draft; other drafts resemble the rest of the drafter."""
    short = [at for at, (_, _, drafted, right) in enumerate(outcomes) if right == drafted - 1]
    if not short:
        return
    at = data.draw(st.sampled_from(short))
    drafter, match, drafted, _ = outcomes[at]
    better = [*outcomes[:at], (drafter, match, drafted, drafted), *outcomes[at + 1 :]]
    worse, best = (observed(Acceptance.unknown(*SHAPE), each).survival for each in (outcomes, better))
    assert (best >= worse - 1e-12).all()


def test_a_rate_is_learned_and_forgotten_in_a_window() -> None:
    learned = observed(Acceptance.unknown(*SHAPE), [(0, 1, 1, 1)] * 2000)
    assert learned.judged[0, 1, 0] == WINDOW
    assert learned.rates[0, 1, 0] > 0.98
    changed = observed(learned, [(0, 1, 1, 0)] * 2000)
    assert changed.rates[0, 1, 0] < 0.2
    assert learned.aged().judged[0, 1, 0] == WINDOW / 2


def test_what_is_not_known_takes_after_what_is_near() -> None:
    learned = observed(Acceptance.unknown(*SHAPE), [(0, 1, 3, 3)] * 100)
    assert learned.rates[0, 1, 5] > 0.9
    assert learned.rates[0, 3, 0] > 0.9
    assert learned.rates[1, 1, 0] == 0.5


def test_counts_outlive_a_restart_and_others_are_refused() -> None:
    learned = observed(Acceptance.unknown(*SHAPE), [(0, 1, 3, 2), (1, 0, 6, 6)])
    again = Acceptance.read(learned.written(), learned)
    assert (again.survival == learned.survival).all()
    good = learned.written()
    wrong: list[Any] = [
        None,
        {},
        {"judged": [1], "accepted": [1]},
        good | {"accepted": (learned.judged + 1).tolist()},
        good | {"judged": (learned.judged * float("nan")).tolist()},
        good | {"judged": "text"},
        good | {"judged": [[[10**400]]]},
    ]
    for data in wrong:
        with pytest.raises(ValueError, match="counts of acceptance"):
            Acceptance.read(data, learned)


def test_an_unlucky_beginning_is_counted_once() -> None:
    """A dozen wrong tokens of a drafter that is right in three of ten: it is tried again where a row costs little."""
    learned = observed(Acceptance.unknown(*SHAPE), [(0, 1, 1, 0)] * 12)
    assert learned.rates[0, 1, 0] == pytest.approx(PRIOR_TRIALS * PRIOR_RATE / (12 + PRIOR_TRIALS))
    assert learned.rates[0, 0, 0] == learned.rates[0, 1, 0], "what another match takes after"
