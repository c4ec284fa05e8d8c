"""The hang time-out of training ranks follows from their longest normal gap."""

from rlhf_coordinator.state.hang_detection import LEAST_SECONDS, SLACK, HangDetector

MOST = 900.0


def trained(*moments: float, sent: float = 100.0) -> HangDetector:
    """Return the state after a Train with progress at these moments; the last one is its end."""
    pace = HangDetector()
    for moment in moments[:-1]:
        pace.moved(sent, moment)
    pace.trained(sent, moments[-1])
    return pace


def test_nothing_is_believed_before_a_whole_train_was_seen() -> None:
    pace = HangDetector()
    pace.moved(100.0, 101.0)
    assert pace.limit(300, MOST) == MOST


def test_ranks_may_stand_still_ten_times_as_long_as_they_ever_did() -> None:
    assert trained(101.0, 121.0, 122.0).limit(300, MOST) == SLACK * 20.0
    assert trained(130.0, 131.0).limit(300, MOST) == SLACK * 30.0, "before the first piece too"
    assert trained(101.0, 150.0).limit(300, MOST) == SLACK * 49.0, "and after the last"
    assert trained(101.0, 250.0).limit(300, MOST) == MOST
    pace = trained(101.0, 121.0)
    pace.trained(500.0, 501.0)
    assert pace.limit(300, MOST) == SLACK * 20.0, "the longest of all"


def test_time_between_two_trains_is_none_in_which_ranks_stand_still() -> None:
    pace = trained(101.0, 108.0)
    pace.moved(5000.0, 5001.0)
    pace.trained(5000.0, 5002.0)
    assert pace.limit(300, MOST) == SLACK * 7.0


def test_short_calms_are_no_hang_and_the_field_says_what_is_short() -> None:
    pace = trained(100.5, 101.0)
    assert pace.limit(300, MOST) == LEAST_SECONDS
    assert pace.limit(20, MOST) == 20
    assert pace.limit(0, MOST) == MOST, "Disabled"
    assert pace.limit(300, 30.0) == 30.0, "spec.runPolicy.startTimeoutSeconds is smaller"
