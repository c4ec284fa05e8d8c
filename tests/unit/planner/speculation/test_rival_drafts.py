"""The choice among several drafters' drafts is learned from places where they compete."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_planner.speculation.acceptance import WINDOW
from rlhf_planner.speculation.rival_drafts import PairwiseCounts, RivalDrafts

DRAFTERS, MATCHES = 3, 4
MATCH = st.integers(0, MATCHES - 1)
DUELS = st.lists(st.tuples(st.just(0), MATCH, st.integers(1, 2), MATCH, st.integers(-5, 5)), max_size=40)


def seen(rows: list[tuple[int, int, int, int, int]]) -> RivalDrafts:
    return RivalDrafts.unknown(DRAFTERS, MATCHES).observed(PairwiseCounts(*np.array(rows, np.int64).reshape(-1, 5).T))


def won(rivals: RivalDrafts, matches: tuple[int, ...], expected: tuple[float, ...], lengths: tuple[int, ...]) -> int:
    column = [np.array(each)[:, None] for each in (matches, lengths, expected)]
    return int(rivals.winner(np.arange(len(matches)), column[0], column[1], column[2])[0])


def test_before_anything_was_seen_the_most_expected_tokens_win() -> None:
    nothing = RivalDrafts.unknown(DRAFTERS, MATCHES)
    assert won(nothing, (0, 1, 2), (1.0, 2.0, 1.5), (4, 4, 4)) == 1
    assert won(nothing, (0, 1), (1.0, 1.0), (4, 4)) == 0, "of equals the first"


def test_who_was_right_for_longer_at_the_same_places_wins_whatever_is_expected_of_each_alone() -> None:
    """Measured: drafts of siblings had 1.5 right tokens over all places, and 1.4 where the sample's own text had a
    draft too.

    The own text's draft had 1.7 right tokens there, and 0.8 over all places.
    """
    rivals = seen([(0, 3, 1, 1, -1)] * 12 + [(0, 3, 1, 1, 0)] * 20)
    assert won(rivals, (3, 1), (1.5, 0.8), (4, 4)) == 1
    assert won(rivals, (3, 0), (1.5, 0.8), (4, 4)) == 0, "of another pair nothing was seen"


def test_a_drafter_without_a_draft_never_wins() -> None:
    rivals = seen([(0, 0, 1, 0, -5)] * 50)
    assert won(rivals, (0, 0), (1.0, 0.0), (4, 0)) == 0
    assert won(rivals, (0, 0), (0.0, -1.0), (0, 4)) == 1


@settings(max_examples=60, deadline=None)
@given(DUELS, st.integers(0, MATCHES - 1), st.integers(0, MATCHES - 1), st.floats(-3, 3))
def test_a_pair_is_the_same_from_both_sides(
    rows: list[tuple[int, int, int, int, int]], first: int, second: int, ahead: float
) -> None:
    rivals = seen(rows)
    turned = [(b, m, a, n, -lead) for a, n, b, m, lead in rows]
    again = seen(turned)
    assert (rivals.places == again.places).all()
    assert (rivals.ahead == again.ahead).all()
    assert won(rivals, (first, second), (ahead, 0.0), (2, 2)) == won(again, (first, second), (ahead, 0.0), (2, 2))


def test_what_was_seen_is_damped_and_counts_less_of_another_policy() -> None:
    rivals = seen([(0, 0, 1, 0, -1)] * 2000)
    assert rivals.places.max() == WINDOW
    changed = rivals.observed(PairwiseCounts(*np.array([(0, 0, 1, 0, 1)] * 1000, np.int64).T))
    assert won(changed, (0, 0), (1.0, 1.0), (4, 4)) == 0
    assert rivals.aged().places.max() == WINDOW / 2
