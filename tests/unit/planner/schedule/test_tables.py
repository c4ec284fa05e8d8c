"""Executable tables: complete, matched, deadlock-free with blocking transfers; damage is found and named."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.published_instances import PUBLISHED

from rlhf_common.schedule import Action, ScheduleTable
from rlhf_planner.schedule.baselines import back_to_back, interleaved
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.list_scheduling import listed
from rlhf_planner.schedule.report import devices_from_json, devices_json
from rlhf_planner.schedule.schedule_check import ScheduleError, check_schedule
from rlhf_planner.schedule.simulate import Timeline, instance_arrays
from rlhf_planner.schedule.table_check import TableError, check_table
from rlhf_planner.schedule.tables import schedule_table, steps_by_device


def fused(split: bool = False) -> tuple[Instance, Timeline]:
    instance = PUBLISHED[2].instance(transfer=0.5)
    return instance, listed(instance_arrays(instance, split), None)[0]


@pytest.mark.parametrize("split", [False, True])
def test_table_runs_to_the_end_and_reads_back(split: bool) -> None:
    _, timeline = fused(split)
    table = schedule_table(timeline, "list scheduling")
    check_table(table)
    assert ScheduleTable.model_validate_json(table.model_dump_json()) == table
    assert [p.model for p in table.pipelines] == ["actor", "critic", "critic"]
    kinds = {action.kind for row in table.rows for action in row}
    assert kinds == ({"F", "I", "W"} if split else {"F", "B"}) | {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}


def test_tables_of_baselines_run_too() -> None:
    instance, timeline = fused()
    check_table(schedule_table(back_to_back(timeline.arrays), "back-to-back-1f1b"))
    cut = interleaved(instance, 2)
    assert cut is not None
    check_table(schedule_table(cut, "interleaved"))


def test_sends_and_receives_of_a_pair_of_ranks_match_in_order() -> None:
    _, timeline = fused()
    rows = schedule_table(timeline, "fused").rows
    for a in range(len(rows)):
        for b in range(len(rows)):
            sent = [x for x in rows[a] if x.kind.startswith("SEND") and x.peer == b]
            got = [x for x in rows[b] if x.kind.startswith("RECV") and x.peer == a]
            assert [(x.kind[5:], x.pipeline, x.microbatch) for x in sent] == [
                (x.kind[5:], x.pipeline, x.microbatch) for x in got
            ]


def damaged(table: ScheduleTable, rank: int, row: list[Action]) -> ScheduleTable:
    rows = list(table.rows)
    rows[rank] = tuple(row)
    return table.model_copy(update={"rows": tuple(rows)})


def test_damaged_tables_are_refused() -> None:
    _, timeline = fused()
    table = schedule_table(timeline, "fused")
    row = list(table.rows[3])
    first_backward = next(i for i, action in enumerate(row) if action.kind == "B")
    with pytest.raises(TableError, match="needs F and B"):
        check_table(damaged(table, 3, [a for i, a in enumerate(row) if i != first_backward]))
    with pytest.raises(TableError, match="appears twice"):
        check_table(damaged(table, 3, [row[0], *row]))
    with pytest.raises(TableError, match="is not a stage of rank"):
        check_table(damaged(table, 3, [row[0].model_copy(update={"stage": 6}), *row[1:]]))
    receive = next(i for i, action in enumerate(row) if action.kind == "RECV_B")
    late = [*row[:receive], *row[receive + 1 :], row[receive]]
    with pytest.raises(TableError, match="can never run"):
        check_table(damaged(table, 3, late))


def test_the_schedule_checker_finds_each_kind_of_damage() -> None:
    instance, timeline = fused()
    good = devices_json(timeline)
    check_schedule(instance, devices_from_json({"devices": json.loads(json.dumps(good))}))
    checks = {
        "before the end of": lambda rows: rows[7][0].update(start=0.0, end=rows[7][0]["end"] - rows[7][0]["start"]),
        "is missing": lambda rows: rows[0].pop(),
        "appears twice": lambda rows: rows[0].append(
            {**rows[0][0], "start": rows[0][-1]["end"], "end": rows[0][-1]["end"] + 5}
        ),
        "belongs on device": lambda rows: rows[0].__setitem__(0, {**rows[0][0], "stage": 1}),
        "it lasts": lambda rows: rows[0][-1].update(end=rows[0][-1]["end"] + 1),
        "busy until": lambda rows: rows[0][1].update(start=0.0, end=rows[0][1]["end"] - rows[0][1]["start"]),
        "is not one of": lambda rows: rows[0][0].update(microbatch=99),
    }
    damages: dict[str, Callable[[Any], object]] = checks
    for message, damage in damages.items():
        rows = json.loads(json.dumps(good))
        # device 7 starts with the small model's first forward; take one that waits for another device
        if message == "before the end of":
            rows[0][0:0] = []
            waits = next(s for s in rows[7] if s["kind"] == "B")
            rows[7] = [waits, *[s for s in rows[7] if s is not waits]]
            waits.update(start=-0.0, end=waits["end"] - waits["start"])
            for s in rows[7][1:]:
                s["start"], s["end"] = s["start"] + 1000, s["end"] + 1000
        else:
            damage(rows)
        with pytest.raises(ScheduleError, match=message):
            check_schedule(instance, devices_from_json({"devices": rows}))


def test_the_cap_is_checked() -> None:
    instance, timeline = fused()
    with pytest.raises(ScheduleError, match="above memoryCap"):
        check_schedule(instance.with_cap(timeline.peak - 0.1), steps_by_device(timeline))
