"""The published table: greedy pairs, serial 1F1B, bounds, ideal interleaving; and Chimera's known makespan."""

import itertools

import pytest
from tests.support.published_instances import PUBLISHED, Published

from rlhf_planner.schedule.baselines import SERIAL, chimera, interleaved, phases, run_baselines
from rlhf_planner.schedule.bounds import makespan_bound, peak_bound, published_bound
from rlhf_planner.schedule.greedy import greedy
from rlhf_planner.schedule.instance import Instance, from_json
from rlhf_planner.schedule.list_scheduling import listed
from rlhf_planner.schedule.peak_relaxation import attainable, relaxed_peak_bound
from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.simulate import instance_arrays
from rlhf_planner.schedule.solve import SearchOptions, solve
from rlhf_planner.schedule.tables import steps_by_device

IDEAL_INTERLEAVED = (707, 371, 203, 709, 373, 205, 609, 321, 177, 610, 322, 178)


def ideal_interleaved(instance: Instance, chunks: int) -> float:
    """Return the makespan of interleaved 1F1B without transfers: the sum over models of (M + (S - 1)/v) * (f + b)."""
    total = 0.0
    for group in phases(instance):
        costs = []
        for index in group:
            pipe = instance.pipelines[index]
            slowest = max(f + b for f, b in zip(pipe.forward, pipe.backward, strict=True))
            costs.append((pipe.microbatches + (pipe.stages - 1) / chunks) * slowest)
        total += max(costs)
    return total


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
    steps = check_schedule(cut.arrays.instance, steps_by_device(cut))
    assert steps.makespan == pytest.approx(cut.makespan), "the second model starts after the first"
    assert max(steps.peaks) == pytest.approx(cut.peak)
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
    assert result.cut_short is None


@pytest.mark.full
@pytest.mark.parametrize(("number", "cut"), [(10, "makespan"), (7, "peak")])
def test_the_answer_says_what_the_budget_ended_before(number: int, cut: str) -> None:
    result = solve(PUBLISHED[number].instance(), SearchOptions(seconds=0.3), lambda: 0.0)
    assert result.cut_short == cut
    assert not result.by_clock
    assert result.at_bound == (cut == "peak")


def test_a_machine_of_half_the_speed_finds_the_same_schedule() -> None:
    """Instance 7, whose peak stays unproven; the slow machine is late from the first look at its clock."""
    seconds = 0.1
    late = itertools.chain([0.0], itertools.repeat(2 * seconds))
    fast, slow = (
        solve(PUBLISHED[7].instance(), SearchOptions(seconds=seconds), clock) for clock in (lambda: 0.0, late.__next__)
    )
    assert not slow.by_clock
    assert steps_by_device(slow.timeline) == steps_by_device(fast.timeline)


def test_the_clock_ends_a_search_and_the_answer_says_so() -> None:
    ticks = iter(range(0, 10**6, 8))  # seconds from one look at the clock to the next
    result = solve(PUBLISHED[7].instance(), SearchOptions(seconds=20), lambda: float(next(ticks)))
    assert result.by_clock
    assert result.cut_short == "peak"


def test_the_bound_over_all_devices_sees_more_than_that_of_any_one() -> None:
    row = PUBLISHED[7]
    arrays = instance_arrays(row.instance())
    relaxed = relaxed_peak_bound(arrays, row.bound, row.peak, 1.0, 60.0)
    assert peak_bound(arrays, row.bound) + 1 < relaxed.bound <= 26.4
    assert relaxed_peak_bound(arrays, row.bound, row.peak, 0.1, 60.0).bound == 0  # too little to prove anything


def test_a_bound_is_rounded_up_to_what_activations_add_up_to() -> None:
    arrays = instance_arrays(PUBLISHED[0].instance())  # micro-batches of 1.95 and 2
    assert attainable(arrays, 12.5, 20.0) == pytest.approx(7 * 1.95)
    assert attainable(arrays, 13.65, 20.0) == pytest.approx(7 * 1.95)
    assert attainable(arrays, 12.5, 13.0) == 13.0


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
