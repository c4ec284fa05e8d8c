"""Gain of decoding beside training, from given times."""

import pytest

from rlhf_planner.rollout_overlap import RolloutTimes, overlapped, rollout_times, unchanged


@pytest.mark.parametrize(("rollout", "training", "enabled"), [(8.0, 3.0, 9.0), (3.0, 8.0, 9.0), (4.0, 0.0, 5.0)])
def test_the_longer_of_both_counts_and_publishing_waits_for_it(rollout: float, training: float, enabled: float) -> None:
    times = RolloutTimes(rollout, training, 1.0)
    assert (unchanged(times), overlapped(times)) == (rollout + training + 1.0, enabled)


def test_times_are_medians_of_lines_that_are_whole() -> None:
    whole = {"seconds/generation_and_inference": 4.0, "training/train/seconds": 2.0, "seconds/publish": 0.5}
    slow = dict.fromkeys(whole, 100.0)
    assert rollout_times([whole, slow, whole, {"iteration": 3}, whole | {"seconds/publish": "x"}]) == RolloutTimes(
        4.0, 2.0, 0.5
    )
    assert rollout_times([{"iteration": 0}]) is None
