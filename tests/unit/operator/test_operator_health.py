"""Alive means that jobs are served and that changes arrive."""

import pytest

from rlhf_operator.health import ailment
from rlhf_operator.workqueue import Snapshot

WELL = Snapshot(depth=3, active=2, oldest_age_seconds=4.0, longest_active_seconds=20.0)


def test_a_busy_operator_is_well() -> None:
    assert ailment(WELL, 1) == ""


@pytest.mark.parametrize(
    ("snapshot", "rounds", "words"),
    [
        (Snapshot(1, 16, 200.0, 20.0), 0, "a job has waited 200 s for its turn"),
        (Snapshot(0, 1, 0.0, 400.0), 0, "a turn has taken 400 s"),
        (WELL, 2, "changes have not arrived by the watch 2 times in a row"),
    ],
)
def test_what_is_wrong_is_told(snapshot: Snapshot, rounds: int, words: str) -> None:
    assert words in ailment(snapshot, rounds)
