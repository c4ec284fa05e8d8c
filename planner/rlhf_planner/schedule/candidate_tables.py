"""Builds the candidate schedule tables of a training job from measured times, and forecasts their time.

Rule: pure. The search is in `solve`, or in `row_scheduling` for models with different tensor sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_common.schedule import Action, ScheduleTable
from rlhf_common.schedule import Pipeline as TablePipeline
from rlhf_planner.schedule.bounds import makespan_bound
from rlhf_planner.schedule.instance import Instance, InstancePipeline
from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_planner.schedule.report import devices_from_json
from rlhf_planner.schedule.row_scheduling import row_table
from rlhf_planner.schedule.row_simulation import Duration, Order, Transfer, simulate_rows, widest
from rlhf_planner.schedule.schedule_check import Step, StepKind
from rlhf_planner.schedule.simulate import (
    BACKWARD,
    FORWARD,
    KINDS,
    WEIGHT,
    InstanceArrays,
    Timeline,
    instance_arrays,
    pad_orders,
    simulate,
)
from rlhf_planner.schedule.solve import SearchOptions
from rlhf_planner.schedule.table_check import check_table
from rlhf_planner.schedule.tables import schedule_table, steps_by_device

STEPS_IN_SHORTEST = 20  # time units of the search in the shortest time
SEARCH_SHARE = 0.05  # maximum search time, as a share of the time that the job could gain
SHORTEST_SEARCH, LONGEST_SEARCH = 0.2, 3.0  # seconds
_OPERATIONS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
_COST_OF = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch on one stage, and bytes stored between forward and backward."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    activation: float


Costs = Mapping[tuple[str, int], StageCost]
"""(model, stage) -> cost."""
Transfers = Mapping[tuple[int, int], float]
"""(rank, rank) of a block, lower one first -> seconds."""


def exact_instance(
    pipelines: Sequence[TablePipeline], costs: Costs, transfers: Transfers, split: bool, room: float | None = None
) -> Instance:
    """Return the instance in seconds and bytes. A split backward takes the measured times of its halves.

    `room` is the memory cap.
    """
    return Instance(
        devices=1 + max(rank for pipe in pipelines for rank in pipe.stage_ranks),
        pipelines=tuple(_pipeline(pipe, costs, transfers, split) for pipe in pipelines),
        memory_cap=room,
    )


def _pipeline(pipe: TablePipeline, costs: Costs, transfers: Transfers, split: bool) -> InstancePipeline:
    own = [costs[pipe.model, stage] for stage in range(len(pipe.stage_ranks))]
    edges = [(min(pair), max(pair)) for pair in zip(pipe.stage_ranks, pipe.stage_ranks[1:], strict=False)]
    return InstancePipeline(
        name=pipe.name,
        stage_devices=pipe.stage_ranks,
        microbatches=pipe.microbatches,
        forward=tuple(cost.forward for cost in own),
        backward=tuple(cost.input_gradient + cost.weight_gradient if split else cost.backward for cost in own),
        weight_gradient=tuple(cost.weight_gradient if split else 0.0 for cost in own),
        activation=tuple(cost.activation for cost in own),
        transfer=tuple(transfers.get(edge, 0.0) for edge in edges),
    )


def coarse(instance: Instance) -> Instance:
    """Return the instance on a coarse grid that is fast to search.

    Times are whole units; activations are whole thousandths of the largest one.
    """
    unit = min(min(pipe.forward) for pipe in instance.pipelines) / STEPS_IN_SHORTEST
    largest = max(max(pipe.activation) for pipe in instance.pipelines)
    byte = largest / 1000 if largest > 0 else 1.0

    def times(values: tuple[float, ...], least: int = 0) -> tuple[float, ...]:
        return tuple(float(max(least, round(value / unit))) for value in values)

    pipelines = []
    for pipe in instance.pipelines:
        weight = times(pipe.weight_gradient)
        whole = times(pipe.backward, 1)
        pipelines.append(
            InstancePipeline(
                name=pipe.name,
                stage_devices=pipe.stage_devices,
                microbatches=pipe.microbatches,
                forward=times(pipe.forward, 1),
                backward=tuple(max(a, b + 1) for a, b in zip(whole, weight, strict=True)),
                weight_gradient=weight,
                activation=tuple(float(math.ceil(value / byte)) for value in pipe.activation),
                transfer=times(pipe.transfer),
            )
        )
    cap = instance.memory_cap
    return Instance(instance.devices, tuple(pipelines), None if cap is None else float(math.floor(cap / byte)))


def search_seconds(instance: Instance, split: bool, serial_seconds: float, steps: int) -> float:
    """Return the time budget of one search in seconds: a share of the possible gain over all `steps` mini-batches,
    within limits.

    The instance is in seconds.
    """
    bound = makespan_bound(instance_arrays(instance, split))
    return min(LONGEST_SEARCH, max(SHORTEST_SEARCH, SEARCH_SHARE * steps * (serial_seconds - bound)))


def search_options(method: str, seconds: float) -> SearchOptions:
    """Return the options for `solve`. Budgets are rounded up to tenths of a second."""
    return SearchOptions(seconds=math.ceil(seconds * 10) / 10, split=method == FUSED_SPLIT)


def table_of(
    instance: Instance, pipelines: Sequence[TablePipeline], answer: Mapping[str, Any], method: str
) -> ScheduleTable:
    """Return the table of an answer in the form of `solution_json` for `instance`.

    Raises ValueError for an answer of another form; TableError, for a table that cannot be executed, is one.
    """
    devices = devices_from_json(answer)
    split = any(step.kind == "W" for row in devices for step in row)
    arrays = instance_arrays(instance, split)
    timeline = simulate(arrays, _orders(arrays, [[(s.pipeline, s.stage, s.kind) for s in row] for row in devices]))
    table = schedule_table(timeline, method, tuple(pipe.model for pipe in pipelines))
    check_table(table)
    return table


def table_of_rows(
    pipelines: Sequence[TablePipeline], costs: Costs, transfers: Transfers, method: str, room: float | None = None
) -> ScheduleTable:
    """Return the table of models of different tensor sizes.

    Raises TableError if the table is invalid, and ValueError if no table stays within `room` bytes.
    """
    duration, transfer = _row_costs(pipelines, costs, transfers)

    def activation(pipeline: int, stage: int) -> float:
        return costs[pipelines[pipeline].model, stage].activation

    split = method == FUSED_SPLIT
    return row_table(pipelines, duration, transfer, activation, method, split=split, room=room)


def forecast(table: ScheduleTable, costs: Costs, transfers: Transfers) -> tuple[float, list[list[Step]]]:
    """Return the seconds of one mini-batch with a table, and its steps per rank, from an event simulation."""
    if widest(table.pipelines) > 1:
        computed = [[action for action in row if action.peer is None] for row in table.rows]
        orders: list[Order] = [[(_step_kind(a), a.pipeline, a.stage, a.microbatch) for a in row] for row in computed]
        times = simulate_rows(table.pipelines, orders, *_row_costs(table.pipelines, costs, transfers))
        steps = [[Step(p, kind, m, s, *times[kind, p, s, m]) for kind, p, s, m in order] for order in orders]
        return max(end for _, end in times.values()), steps
    split = any(action.kind == "W" for row in table.rows for action in row)
    arrays = instance_arrays(exact_instance(table.pipelines, costs, transfers, split), split)
    rows = [[(a.pipeline, a.stage, a.kind) for a in row if a.peer is None] for row in table.rows]
    timeline: Timeline = simulate(arrays, _orders(arrays, rows))
    return timeline.makespan, steps_by_device(timeline)


def _row_costs(pipelines: Sequence[TablePipeline], costs: Costs, transfers: Transfers) -> tuple[Duration, Transfer]:
    """Return the functions for the seconds of steps and of transfers between rows.

    Between rows that are not neighbours, the longest transfer between neighbours on the way counts.
    """

    def duration(kind: StepKind, pipeline: int, stage: int) -> float:
        seconds: float = getattr(costs[pipelines[pipeline].model, stage], _COST_OF[kind])
        return seconds

    def transfer(a: int, b: int) -> float:
        between = range(min(a, b), max(a, b))
        return max((transfers.get((row, row + 1), 0.0) for row in between), default=0.0)

    return duration, transfer


def _step_kind(action: Action) -> StepKind:
    assert action.kind in ("F", "B", "I", "W"), "a computation"
    return action.kind


def _orders(arrays: InstanceArrays, rows: Sequence[Sequence[tuple[int, int, str]]]) -> Any:
    """Return the operations by device of (pipeline, stage, kind) rows."""
    first = [0]
    for pipe in arrays.instance.pipelines:
        first.append(first[-1] + pipe.stages)
    return pad_orders(arrays, [[KINDS * (first[p] + s) + _OPERATIONS[kind] for p, s, kind in row] for row in rows])
