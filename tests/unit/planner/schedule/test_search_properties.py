"""For any instance, the answer passes the checker, lies between bound and baselines, and stays within the cap."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from tests.support.random_instances import instances, shortest

from rlhf_planner.schedule.baselines import run_baselines
from rlhf_planner.schedule.instance import Instance, InstanceError, InstancePipeline
from rlhf_planner.schedule.list_scheduling import listed
from rlhf_planner.schedule.peak_relaxation import relaxed_peak_bound
from rlhf_planner.schedule.schedule_check import check_schedule
from rlhf_planner.schedule.simulate import instance_arrays
from rlhf_planner.schedule.solve import SearchOptions, Solution, solve
from rlhf_planner.schedule.table_check import check_table
from rlhf_planner.schedule.tables import schedule_table, steps_by_device

QUICK = settings(
    max_examples=14, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=[Phase.generate]
)

SMALL_SEARCH = """
from rlhf_planner.schedule.instance import Instance, InstancePipeline
from rlhf_planner.schedule.solve import SearchOptions, solve
pipelines = tuple(
    InstancePipeline(name, on, 3, (2.0, 1.0), (3.0, 2.0), (1.0, 1.0), (1.0, 1.0), (0.25,))
    for name, on in (("actor", (0, 1)), ("critic", (1, 0)))
)
solution = solve(Instance(2, pipelines, 4.0), SearchOptions(0.02, True, seed=3), lambda: 0.0)
print(solution.timeline.orders.tolist(), solution.timeline.makespan, solution.method)
"""


def still() -> float:
    """A clock that stands still: only effort ends the search, so that runs are equal on any machine."""
    return 0.0


def search(instance: Instance, seconds: float, split: bool = False) -> Solution | None:
    try:
        return solve(instance, SearchOptions(seconds, split, seed=3), still)
    except InstanceError as error:
        if error.field != "memoryCap":  # said to be infeasible, which the instance alone decides
            raise
        return None


@QUICK
@given(instances())
def test_answers_are_valid_and_between_bound_and_baselines(instance: Instance) -> None:
    for split in (False, True):
        solution = search(instance, 0.02, split)
        if solution is None:
            return
        checked = check_schedule(instance, steps_by_device(solution.timeline))
        assert checked.makespan == pytest.approx(solution.timeline.makespan)
        assert max(checked.peaks) == pytest.approx(solution.timeline.peak)
        assert solution.lower_bound <= solution.timeline.makespan + 1e-6
        assert solution.timeline.makespan <= min(base.makespan for base in solution.baselines.values()) + 1e-9
        assert instance.memory_cap is None or solution.timeline.peak <= instance.memory_cap + 1e-9
        assert solution.peak_bound <= solution.timeline.peak + 1e-9
        assert (solution.cut_short == "makespan") == (not solution.at_bound)
        assert solution.cut_short != "peak" or not solution.peak_at_bound
        check_table(schedule_table(solution.timeline, solution.method))


@pytest.mark.parametrize("cap", [1.0, 1.5, 2.0])
def test_times_without_a_decimal_grid_give_no_bound_above_the_schedule(cap: float) -> None:
    pipeline = InstancePipeline("actor", (0, 1), 3, (1 / 3, 1 / 7), (2 / 3, 2 / 7), (0, 0), (1, 1), (1 / 9,))
    solution = search(Instance(2, (pipeline,), cap), 0.02)
    assert solution is not None
    assert solution.lower_bound <= solution.timeline.makespan + 1e-9


@pytest.mark.full
@settings(QUICK, max_examples=12)
@given(instances(most_devices=4, most_steps=40, whole=True))
def test_no_schedule_holds_less_than_the_bound_over_all_devices(instance: Instance) -> None:
    without = dataclasses.replace(instance, memory_cap=None)
    for split in (False, True):
        for timeline in listed(instance_arrays(without, split), None)[:1]:
            bound = relaxed_peak_bound(timeline.arrays, timeline.makespan, 100 * timeline.peak, 1.0, 60.0)
            assert bound.bound <= timeline.peak + 1e-9


@settings(QUICK, max_examples=10)
@given(instances(most_devices=3, most_steps=14, whole=True))
def test_brute_force_agrees(instance: Instance) -> None:
    assume(instance.steps <= 14)
    least = shortest(instance)
    assume(least is not None)
    solution = search(instance, 2.0)
    if solution is None:
        return
    assert solution.timeline.makespan == least
    assert solution.lower_bound <= solution.timeline.makespan


@settings(QUICK, max_examples=5)
@given(instances(most_devices=4, most_steps=40))
def test_same_seed_same_schedule(instance: Instance) -> None:
    first, second = search(instance, 0.02), search(instance, 0.02)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert (first.timeline.orders == second.timeline.orders).all()


def test_where_ortools_is_not_installed_schedules_are_found_without_proofs() -> None:
    script = f"import sys\nsys.modules['ortools'] = None\n{SMALL_SEARCH}"
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert answer.split()[-2:] == ["24.0", "annealing"]


@pytest.mark.full
def test_where_numba_is_not_installed_the_answer_is_the_same() -> None:
    answers = [
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
        for script in (SMALL_SEARCH, f"import sys\nsys.modules['numba'] = None\n{SMALL_SEARCH}")
    ]
    assert answers[0] == answers[1]
    assert "[[" in answers[0]


@settings(QUICK, max_examples=10)
@given(instances(most_devices=8, most_steps=60))
def test_baselines_are_valid(instance: Instance) -> None:
    without = dataclasses.replace(instance, memory_cap=None)
    for timeline in run_baselines(instance_arrays(without)).values():
        check_schedule(without, steps_by_device(timeline))
        check_table(schedule_table(timeline, "baseline"))
