"""Published instances at the bound, with a peak no higher than the published one.

Budgets are tries and solver effort, and the clock stands still, so a busy machine gives the same result. Other
instances are omitted because they take longer.
"""

import pytest
from tests.support.published_instances import PUBLISHED

from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.solve import SearchOptions, solve
from rlhf_planner.schedule.tables import steps_by_device

pytestmark = pytest.mark.full

BUDGETS = {0: 10, 2: 1, 5: 2, 6: 10, 8: 60}
"""Instance -> nominal seconds; a search ends early when the peak is at its floor."""
AT_FLOOR = (2, 5, 8)
"""Instances whose peak is proven to be the least at this makespan."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", BUDGETS)
def test_the_peak_is_no_higher_than_the_published_one(number: int) -> None:
    row = PUBLISHED[number]
    instance = row.instance()
    result = solve(instance, SearchOptions(BUDGETS[number]), lambda: 0.0)
    checked = check_schedule(instance, steps_by_device(result.timeline))
    assert checked.makespan == row.bound
    assert max(checked.peaks) <= row.peak + 1e-9
    assert result.peak_at_bound == (number in AT_FLOOR)


@pytest.mark.timeout(300)
def test_ten_seconds_are_enough_for_the_hardest_makespan() -> None:
    result = solve(PUBLISHED[10].instance(), SearchOptions(10), lambda: 0.0)
    assert result.timeline.makespan == PUBLISHED[10].bound
    assert result.cut_short == "peak"
