"""Fused tables of models with different tensor sizes: shorter than serial ones, within memory, as simulated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_common.schedule import Pipeline, ScheduleTable
from rlhf_planner.schedule.candidate_tables import Costs, StageCost, forecast, table_of_rows
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, opposite, placed
from rlhf_planner.schedule.row_simulation import Order, simulate_rows
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.simulate import DeadlockError
from rlhf_planner.schedule.table_check import TableError, check_table


def costs_of(pipelines: tuple[Pipeline, ...], actor: float = 2.0) -> Costs:
    """Return seconds for an actor `times` as large as the critic, divided equally over the computations of its
    ranks."""
    return {
        (p.model, stage): StageCost(each, 2 * each, each, each, 1000.0)
        for p in pipelines
        for each in ((actor if p.model == "actor" else 1.0) / (len(p.stage_ranks) * p.width),)
        for stage in range(len(p.stage_ranks))
    }


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("tensor", "critic", "pipeline"), [(2, 1, 2), (2, 1, 4), (4, 1, 2), (4, 1, 4), (1, 2, 4), (1, 4, 8), (4, 2, 2)]
)
def test_fused_tables_are_shorter_than_serial_ones_and_no_shorter_than_the_work(
    tensor: int, critic: int, pipeline: int
) -> None:
    pipelines = placed({"actor": tensor, "critic": critic}, tensor * pipeline, 16, alternate=True)
    costs = costs_of(pipelines)
    work = 16 * 3 * 3.0 / (tensor * pipeline // min(tensor, critic))
    serial, fused, split = (
        forecast(table, costs, {})[0]
        for table in (
            serial_table(pipelines),
            *(table_of_rows(pipelines, costs, {}, method) for method in (FUSED, FUSED_SPLIT)),
        )
    )
    assert work <= split + 1e-9
    assert split < fused < serial


def most_stored(table: ScheduleTable) -> int:
    """Return the most micro-batches that a row stores at a time."""
    most = 0
    for row in table.rows:
        now = 0
        for action in row:
            now += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, now)
    return most


def test_a_table_keeps_within_the_memory_or_there_is_none() -> None:
    pipelines = placed({"actor": 2, "critic": 1}, 8, 16, alternate=True)
    costs = costs_of(pipelines)
    free = most_stored(table_of_rows(pipelines, costs, {}, FUSED_SPLIT))
    tight = most_stored(table_of_rows(pipelines, costs, {}, FUSED_SPLIT, 1000.0 * (free - 1)))
    assert tight < free
    with pytest.raises(ValueError, match="no schedule fused keeps within the 1000 bytes"):
        table_of_rows(pipelines, costs, {}, FUSED, 1000.0)


def test_a_transfer_delays_who_waits_for_it() -> None:
    pipelines = placed({"actor": 2, "critic": 1}, 4, 4)
    table, costs = serial_table(pipelines), costs_of(pipelines)
    there = {(row, row + 1): 0.5 for row in range(3)}
    assert forecast(table, costs, there)[0] > forecast(table, costs, {})[0] + 1.0


@given(st.integers(1, 4), st.integers(1, 8), st.lists(st.floats(0.1, 2.0), min_size=8, max_size=8))
@settings(max_examples=25, deadline=None)
def test_rows_that_hold_stages_alone_are_simulated_as_by_the_search(
    stages: int, microbatches: int, times: list[float]
) -> None:
    pipelines = opposite(("actor", "critic"), stages, microbatches)
    costs = {
        (model, stage): StageCost(times[stage], times[7 - stage] + place, 1.0, 1.0, 1.0)
        for place, model in enumerate(("actor", "critic"))
        for stage in range(stages)
    }
    transfers = {(row, row + 1): 0.05 for row in range(stages - 1)}
    table = serial_table(pipelines)
    seconds, rows = forecast(table, costs, transfers)
    orders: list[Order] = [[(s.kind, s.pipeline, s.stage, s.microbatch) for s in row] for row in rows]
    found = simulate_rows(
        pipelines,
        orders,
        lambda kind, p, s: (
            costs[pipelines[p].model, s].forward if kind == "F" else costs[pipelines[p].model, s].backward
        ),
        lambda *_: 0.05,
    )
    assert max(end for _, end in found.values()) == pytest.approx(seconds)
    for row in rows:
        for step in row:
            assert found[step.kind, step.pipeline, step.stage, step.microbatch] == pytest.approx((step.start, step.end))


def test_rows_that_wait_for_one_another_are_named() -> None:
    pipelines = placed({"actor": 2, "critic": 1}, 2, 1)
    orders: list[Order] = [
        [("F", 0, 0, 0), ("F", 1, 0, 0), ("B", 0, 0, 0), ("B", 1, 0, 0)],
        [("F", 1, 1, 0), ("B", 1, 1, 0), ("F", 0, 0, 0), ("B", 0, 0, 0)],
    ]
    with pytest.raises(DeadlockError, match="row 0 waits for ever before F of micro-batch 0 on stage 0 of pipeline 0"):
        simulate_rows(pipelines, orders, lambda *_: 1.0, lambda *_: 0.0)


def test_the_check_takes_a_stage_for_run_when_all_its_rows_have_come() -> None:
    table = serial_table(placed({"actor": 2, "critic": 1}, 4, 2))
    check_table(table)
    late = [*table.rows[1]]
    place = next(i for i, action in enumerate(late) if action.pipeline == 1)
    moved = (*late[place:], *late[:place])
    with pytest.raises(TableError, match="its input never comes"):
        check_table(table.model_copy(update={"rows": (table.rows[0], moved, *table.rows[2:])}))
    action = table.rows[0][0]
    other = next(a for a in table.rows[0] if a.peer is not None)
    crossed = tuple(a.model_copy(update={"peer": (a.peer or 0) + 1}) if a == other else a for a in table.rows[0])
    with pytest.raises(TableError, match="has another place in its stage than rank 0"):
        check_table(table.model_copy(update={"rows": (crossed, *table.rows[1:])}))
    assert action.peer is None


def test_stages_that_begin_elsewhere_than_at_their_width_are_refused() -> None:
    wrong = Pipeline(name="actor", model="actor", stage_ranks=(1, 3), microbatches=2, width=2)
    with pytest.raises(ValueError, match=r"pipelines\[0\]\.width: 2 is not valid; stages at \(1, 3\) must begin"):
        serial_table([wrong])
