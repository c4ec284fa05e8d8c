"""From measured stage and transfer times to the tables that training may run, and what each should take.

All tables of a choice place the same stages on the same ranks: they differ in order alone, so a training group can go
from one to another between two mini-batches, and gradients add up in the same order in all of them. Where models have
different tensor sizes the search is asked of merged stages (`transform`). Pure; the search itself is `solve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from rlhf_api.schedule import Action, ScheduleTable
from rlhf_api.schedule import Pipeline as TablePipeline
from rlhf_planner.schedule.bounds import makespan_bound
from rlhf_planner.schedule.instance import Instance, InstancePipeline
from rlhf_planner.schedule.methods import FUSED_SPLIT
from rlhf_planner.schedule.report import devices_from_json
from rlhf_planner.schedule.row_simulation import Order, simulate_rows
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
from rlhf_planner.schedule.transform import merged, table_of_rows, widest

STEPS_IN_SHORTEST = 20  # the search sees times in units of a twentieth of the shortest: a finer grid only slows it
SEARCH_SHARE = 0.05  # of the time that the job could win at most: what the search may take
SHORTEST_SEARCH, LONGEST_SEARCH = 0.2, 3.0  # seconds; a job waits for it
_OPERATIONS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": WEIGHT}
_COST_OF = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one micro-batch on one stage, and the bytes it keeps between forward and backward."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    activation: float


Costs = Mapping[tuple[str, int], StageCost]
"""By (model, stage)."""
Transfers = Mapping[tuple[int, int], float]
"""(rank, rank) of a block, lower one first -> seconds."""


def exact_instance(
    pipelines: Sequence[TablePipeline], costs: Costs, transfers: Transfers, split: bool, room: float | None = None
) -> Instance:
    """Return the instance in seconds and bytes; a split backward takes what its halves were measured to take. `room`
    is the memory cap. Devices are rows, or as many of them as the widest stage has."""
    rows = widest(pipelines)
    whole = merged(pipelines)
    return Instance(
        devices=1 + max(device for pipe in whole for device in pipe.stage_ranks),
        pipelines=tuple(
            _pipeline(pipe, _merged_costs(of, rows // of.width, costs), transfers, rows, split)
            for pipe, of in zip(whole, pipelines, strict=True)
        ),
        memory_cap=room,
    )


def _merged_costs(pipe: TablePipeline, parts: int, costs: Costs) -> list[StageCost]:
    """Return the costs of a pipeline's stages, so many neighbouring ones merged: on as many times the ranks they take
    as long as one of them, in the mean, and a rank keeps what is kept of one."""
    own = [costs[pipe.model, stage] for stage in range(len(pipe.stage_ranks))]
    return [_mean(own[first : first + parts]) for first in range(0, len(own), parts)]


def _mean(parts: Sequence[StageCost]) -> StageCost:
    if len(parts) == 1:
        return parts[0]
    times = {name: fmean(getattr(part, name) for part in parts) for name in _COST_OF.values()}
    return StageCost(**times, activation=max(part.activation for part in parts))


def _between(transfers: Transfers, a: int, b: int) -> float:
    """Return the seconds of a transfer between two rows; of rows that are no neighbours the longest in between."""
    low, high = min(a, b), max(a, b)
    return max((transfers.get((row, row + 1), 0.0) for row in range(low, high)), default=0.0)


def _pipeline(
    pipe: TablePipeline, own: Sequence[StageCost], transfers: Transfers, rows: int, split: bool
) -> InstancePipeline:
    """`rows`: of a device."""
    edges = zip(pipe.stage_ranks, pipe.stage_ranks[1:], strict=False)
    return InstancePipeline(
        name=pipe.name,
        stage_devices=pipe.stage_ranks,
        microbatches=pipe.microbatches,
        forward=tuple(cost.forward for cost in own),
        backward=tuple(cost.input_gradient + cost.weight_gradient if split else cost.backward for cost in own),
        weight_gradient=tuple(cost.weight_gradient if split else 0.0 for cost in own),
        activation=tuple(cost.activation for cost in own),
        transfer=tuple(_between(transfers, a * rows, b * rows) for a, b in edges),
    )


def coarse(instance: Instance) -> Instance:
    """Return the instance on a grid that the search is quick on: whole units of time, and of a thousandth of the
    largest activation."""
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
    """Return the time budget of one search in seconds: a small share of what all `steps` mini-batches could win. The
    instance is in seconds."""
    bound = makespan_bound(instance_arrays(instance, split))
    return min(LONGEST_SEARCH, max(SHORTEST_SEARCH, SEARCH_SHARE * steps * (serial_seconds - bound)))


def search_options(method: str, seconds: float) -> SearchOptions:
    """Return what to ask `solve` for; budgets are rounded so that equal jobs ask equal questions."""
    return SearchOptions(seconds=math.ceil(seconds * 10) / 10, split=method == FUSED_SPLIT)


def table_of(
    instance: Instance, pipelines: Sequence[TablePipeline], answer: Mapping[str, Any], method: str
) -> ScheduleTable:
    """Return the table of `pipelines` of an answer in the form of `solution_json` for `instance`, as it was asked. It
    is checked: TableError."""
    devices = devices_from_json(answer)
    split = any(step.kind == "W" for row in devices for step in row)
    arrays = instance_arrays(instance, split)
    timeline = simulate(arrays, _orders(arrays, [[(s.pipeline, s.stage, s.kind) for s in row] for row in devices]))
    if widest(pipelines) > 1:
        table = table_of_rows(steps_by_device(timeline), pipelines, method)
    else:
        table = schedule_table(timeline, method, tuple(pipe.model for pipe in pipelines))
    check_table(table)
    return table


def forecast(table: ScheduleTable, costs: Costs, transfers: Transfers) -> tuple[float, list[list[Step]]]:
    """Return the seconds of one mini-batch under a table, and the steps with start and end, one list per rank, by
    the exact event simulation."""
    if widest(table.pipelines) > 1:
        return _forecast_of_rows(table, costs, transfers)
    split = any(action.kind == "W" for row in table.rows for action in row)
    arrays = instance_arrays(exact_instance(table.pipelines, costs, transfers, split), split)
    rows = [[(a.pipeline, a.stage, a.kind) for a in row if a.peer is None] for row in table.rows]
    timeline: Timeline = simulate(arrays, _orders(arrays, rows))
    return timeline.makespan, steps_by_device(timeline)


def _forecast_of_rows(table: ScheduleTable, costs: Costs, transfers: Transfers) -> tuple[float, list[list[Step]]]:
    """As `forecast`, of rows that hold stages together."""
    computed = [[action for action in row if action.peer is None] for row in table.rows]
    orders: list[Order] = [[(_step_kind(a), a.pipeline, a.stage, a.microbatch) for a in row] for row in computed]

    def duration(kind: StepKind, pipeline: int, stage: int) -> float:
        seconds: float = getattr(costs[table.pipelines[pipeline].model, stage], _COST_OF[kind])
        return seconds

    times = simulate_rows(table.pipelines, orders, duration, partial(_between, transfers))
    steps = [[Step(p, kind, m, s, *times[kind, p, s, m]) for kind, p, s, m in order] for order in orders]
    return max(end for _, end in times.values()), steps


def _step_kind(action: Action) -> StepKind:
    assert action.kind in ("F", "B", "I", "W"), "a computation"
    return action.kind


def _orders(arrays: InstanceArrays, rows: Sequence[Sequence[tuple[int, int, str]]]) -> Any:
    """Operations by device of (pipeline, stage, kind) rows."""
    first = [0]
    for pipe in arrays.instance.pipelines:
        first.append(first[-1] + pipe.stages)
    return pad_orders(arrays, [[KINDS * (first[p] + s) + _OPERATIONS[kind] for p, s, kind in row] for row in rows])
