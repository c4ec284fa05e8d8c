"""An iteration with and without critic training beside the next decoding: worked examples and bounds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.published_instances import PUBLISHED, Published

from rlhf_planner.critic_overlap import OverlapTimes, alone, overlapped, unchanged
from rlhf_planner.schedule.baselines import serial
from rlhf_planner.schedule.simulate import instance_arrays

SECONDS = st.floats(0.0, 100.0)


def test_a_critic_shorter_than_decoding_is_hidden_whole() -> None:
    times = OverlapTimes(together=10.0, policy=6.0, critics=4.0, publishing=1.0, finished=(5.0, 8.0, 12.0), apart=0.5)
    assert unchanged(times) == pytest.approx(10 + 1 + 12)
    assert overlapped(times) == pytest.approx(6 + 1 + 12)


def test_what_critics_score_waits_for_them() -> None:
    times = OverlapTimes(10.0, 6.0, 4.0, 1.0, finished=(1.0, 2.0, 3.0), apart=2.0, latency=0.5)
    assert unchanged(times) == pytest.approx(10 + 1 + 6)  # three scores, each 2 s after the one before
    assert overlapped(times) == pytest.approx(6 + 1 + 5.5 + 2 + 2)  # none before 4 s of training, 1 s of publishing


def test_beside_a_short_generation_a_fused_table_is_faster() -> None:
    times = OverlapTimes(together=7.0, policy=6.0, critics=5.0, publishing=0.0, finished=(2.0,), apart=0.0)
    assert unchanged(times) == pytest.approx(7 + 2)
    assert overlapped(times) == pytest.approx(6 + 5)


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8), SECONDS, SECONDS)
def test_it_gains_at_most_what_the_critics_add_to_training(
    policy: float, added: float, critics: float, publishing: float, finished: list[float], apart: float, latency: float
) -> None:
    times = OverlapTimes(policy + added, policy, critics, publishing, tuple(finished), apart, latency)
    gain = unchanged(times) - overlapped(times)
    assert gain <= added + 1e-6
    assert gain >= added - critics - publishing - 1e-6
    if min(finished) >= critics + publishing:
        assert gain == pytest.approx(added, abs=1e-6)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda version: str(version.id))
def test_policy_and_critics_alone_are_the_two_halves_of_the_serial_schedule(published: Published) -> None:
    instance = published.instance()
    critics = range(1, len(instance.pipelines))
    assert alone(instance, {0}) + alone(instance, critics) == pytest.approx(serial(instance_arrays(instance)).makespan)


def test_scores_that_need_no_critic_are_made_while_critics_train() -> None:
    times = OverlapTimes(10.0, 6.0, 9.0, 1.0, finished=(1.0, 2.0, 3.0), apart=2.0, latency=0.5, late_share=0.25)
    assert overlapped(times) == pytest.approx(6 + 1 + 10 + 3 * 0.5)  # before them 1.5 s each, then 0.5 s
    assert unchanged(times) == pytest.approx(10 + 1 + 6)


@given(SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=8), SECONDS, st.floats(0.0, 1.0))
def test_the_less_needs_critics_the_less_is_late(
    critics: float, publishing: float, finished: list[float], apart: float, share: float
) -> None:
    times = OverlapTimes(10.0, 5.0, critics, publishing, tuple(finished), apart, 0.0, share)
    one_score = apart  # after a pause the first one is within the latency
    assert overlapped(times) <= overlapped(replace(times, late_share=1.0)) + one_score + 1e-6
