"""`python -m rlhf_coordinator.training.schedule_search`: find the fused tables of a job from measured times.

It reads one JSON question from standard input and writes one JSON answer to standard output.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_common.schedule import ScheduleTable
from rlhf_planner.schedule.cache_on_disk import solve_cached
from rlhf_planner.schedule.candidate_tables import (
    Costs,
    StageCost,
    Transfers,
    coarse,
    exact_instance,
    forecast,
    search_options,
    search_seconds,
    table_of,
    table_of_rows,
)
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.row_simulation import widest
from rlhf_planner.schedule.solve import SearchOptions, solve


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return for each method its table, predicted seconds and steps, and the way it was found.

    The serial table is included, without the way.
    """
    costs: Costs = {(row["model"], row["stage"]): StageCost(*row["cost"]) for row in question["costs"]}
    transfers: Transfers = {(row["rank"], row["peer"]): row["seconds"] for row in question["transfers"]}
    serial = ScheduleTable.model_validate_json(question["serial"])
    tables = {serial.method: _described(serial, costs, transfers)}
    serial_seconds = tables[serial.method]["predicted"]
    if widest(serial.pipelines) > 1:
        return tables | {method: _of_rows(serial, costs, transfers, method, question) for method in question["methods"]}
    for method in question["methods"]:
        split = method == FUSED_SPLIT
        exact = exact_instance(serial.pipelines, costs, transfers, split, question["activation_bytes"] or None)
        instance = coarse(exact)
        how = search_options(method, search_seconds(exact, split, serial_seconds, question["steps"]))
        start = time.monotonic()
        solved, cached = solve_cached(Path(question["cache"]), instance, how, partial(_solved, instance, how))
        table = table_of(instance, serial.pipelines, solved, method)
        described = _described(table, costs, transfers)
        described |= {"by": "cache" if cached else solved["method"], "atBound": solved["atBound"]}
        tables[method] = described | {"seconds": round(time.monotonic() - start, 3)}
    return tables


def _of_rows(
    serial: ScheduleTable, costs: Costs, transfers: Transfers, method: str, question: dict[str, Any]
) -> dict[str, Any]:
    """Return an entry of `answer`, for models with different tensor sizes."""
    start = time.monotonic()
    table = table_of_rows(serial.pipelines, costs, transfers, method, question["activation_bytes"] or None)
    found = {"by": "list scheduling", "atBound": False, "seconds": round(time.monotonic() - start, 3)}
    return _described(table, costs, transfers) | found


def _solved(instance: Instance, how: SearchOptions) -> dict[str, Any]:
    return solution_json(solve(instance, how, time.monotonic))


def _described(table: ScheduleTable, costs: Costs, transfers: Transfers) -> dict[str, Any]:
    seconds, rows = forecast(table, costs, transfers)
    steps = [
        [[s.pipeline, s.kind, s.stage, s.microbatch, round(s.start, 6), round(s.end, 6)] for s in row] for row in rows
    ]
    return {"table": table.model_dump_json(exclude_defaults=True), "predicted": seconds, "steps": steps}


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))))
