"""The published table: greedy pairs, serial 1F1B, bounds, ideal interleaving; and Chimera's known makespan."""

import pytest

from rlhf_planner.schedule.baselines import SERIAL, chimera, ideal_interleaved, interleaved, run_baselines
from rlhf_planner.schedule.bounds import makespan_bound, peak_bound, published_bound
from rlhf_planner.schedule.greedy import greedy
from rlhf_planner.schedule.instance import from_json
from rlhf_planner.schedule.list_scheduling import listed
from rlhf_planner.schedule.published import PUBLISHED, Published
from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.simulate import instance_arrays
from rlhf_planner.schedule.solve import SearchOptions, solve
from rlhf_planner.schedule.tables import steps_by_device

IDEAL_INTERLEAVED = (707, 371, 203, 709, 373, 205, 609, 321, 177, 610, 322, 178)


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"instance-{row.id}")
def test_table(row: Published) -> None:
    instance = row.instance()
    lay, split = instance_arrays(instance), instance_arrays(instance, split=True)
    first = greedy(lay)
    assert (first.makespan, round(first.peak, 6)) == row.greedy
    baselines = run_baselines(lay)
    assert baselines[SERIAL].makespan == row.serial
    assert published_bound(lay) == makespan_bound(lay) == row.bound
    assert published_bound(split) == row.split_bound
    assert abs(ideal_interleaved(instance, 4) - IDEAL_INTERLEAVED[row.id]) < 0.5
    cut = interleaved(instance, 4)
    assert cut is not None
    assert cut.makespan == pytest.approx(ideal_interleaved(instance, 4))
    for timeline in (*baselines.values(), listed(lay, row.peak)[0]):
        checked = check_schedule(instance, steps_by_device(timeline))
        assert checked.makespan == timeline.makespan >= row.bound
        assert max(checked.peaks) == pytest.approx(timeline.peak)
    assert peak_bound(lay, row.best) <= row.peak + 1e-9


def test_short_search_meets_the_bound_of_a_small_instance() -> None:
    """Instance 5: proved optimal in makespan and peak within a fraction of a second of tries."""
    result = solve(PUBLISHED[5].instance(), SearchOptions(seconds=1.5), lambda: 0.0)
    assert result.timeline.makespan == 225
    assert result.at_bound
    assert round(result.timeline.peak, 6) == 15.6
    assert result.peak_at_bound


def test_chimera_makespan_of_four_stages() -> None:
    """Li and Hoefler 2021: bubble ratio (D - 2) / (3N/2 + D - 2) with backward = 2 forward, so 16 for D = N = 4."""
    model = {"stageDevices": [0, 1, 2, 3], "microbatches": 4, "forward": 1, "backward": 2}
    result = chimera(from_json({"devices": 4, "pipelines": [model]}))
    assert result is not None
    assert result.makespan == 16
    assert chimera(from_json({"devices": 4, "pipelines": [{**model, "microbatches": 3}]})) is None


def test_transfers_cost_interleaving_more_than_a_fused_schedule() -> None:
    free, paid = PUBLISHED[1].instance(), PUBLISHED[1].instance(transfer=0.5)
    cut, cut_paid = interleaved(free, 4), interleaved(paid, 4)
    fused, fused_paid = listed(instance_arrays(free), None)[0], listed(instance_arrays(paid), None)[0]
    assert cut is not None
    assert cut_paid is not None
    assert cut_paid.makespan - cut.makespan > fused_paid.makespan - fused.makespan
