"""Models of different tensor sizes in one table: RLHFuse's transformation to equal stages, and the way back to rows.

A row of a table is run by as many ranks as the smallest tensor group has; a model of a larger one has stages that
several rows hold together (`Pipeline.width`). The search knows devices that run one step at a time. So what it is asked
has a device for as many rows as the widest stage has, and neighbouring stages of narrower models are merged (RLHFuse,
arXiv 2409.13221, intra-stage fusion). In its answer a merged step is then a step of each of its stages, in the order
of the pipeline, and each row has those of its own stages in the order of the answer.

That is free of deadlock: put merged steps in one order in which they can run, and in place of each its parts; then
every part has its input, and every row is its part of that one order. Pure.
"""

from collections.abc import Sequence

from rlhf_api.schedule import Action, Kind, Pipeline, ScheduleTable
from rlhf_planner.schedule.row_simulation import Order, simulate_rows
from rlhf_planner.schedule.schedule_check import Step

_DURATION = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""Relative times of steps; they only say which of two transfers comes first, the same on both of its rows."""


def widest(pipelines: Sequence[Pipeline]) -> int:
    """Return the rows of the widest stage."""
    return max(pipeline.width for pipeline in pipelines)


def merged(pipelines: Sequence[Pipeline]) -> tuple[Pipeline, ...]:
    """Return the pipelines on devices of as many rows as the widest stage has, neighbouring stages of one device made
    one; themselves where all have one width."""
    rows = widest(pipelines)
    return tuple(
        one.model_copy(
            update={"stage_ranks": tuple(first // rows for first in one.stage_ranks[:: rows // one.width]), "width": 1}
        )
        for one in pipelines
    )


def table_of_rows(devices: Sequence[Sequence[Step]], pipelines: Sequence[Pipeline], method: str) -> ScheduleTable:
    """Return the table of `pipelines` of an answer for `merged` ones: `devices` are its steps in order."""
    rows = widest(pipelines)
    orders: list[Order] = []
    for row in range(rows * len(devices)):
        order: Order = []
        for step in devices[row // rows]:
            of = pipelines[step.pipeline]
            parts = rows // of.width
            own = range(step.stage * parts, (step.stage + 1) * parts)
            stage = next(stage for stage in own if 0 <= row - of.stage_ranks[stage] < of.width)
            order.append((step.kind, step.pipeline, stage, step.microbatch))
        orders.append(order)
    times = simulate_rows(pipelines, orders, lambda kind, *_: _DURATION[kind], lambda *_: 0.0)
    found: list[list[tuple[float, int, int, Action]]] = [[] for _ in orders]  # (time, transfers first, number, action)
    for number, ((kind, pipeline, stage, microbatch), (start, end)) in enumerate(times.items()):
        of, target = pipelines[pipeline], stage + 1 if kind == "F" else stage - 1
        first, common = of.stage_ranks[stage], {"pipeline": pipeline, "microbatch": microbatch}
        for place in range(of.width):
            found[first + place].append((start, 1, number, Action(kind=kind, stage=stage, **common)))
        if kind == "W" or not 0 <= target < len(of.stage_ranks) or of.stage_ranks[target] == first:
            continue
        send, receive = _ways(kind)
        for place in range(of.width):
            here, there = first + place, of.stage_ranks[target] + place
            found[here].append((end, 0, number, Action(kind=send, stage=stage, peer=there, **common)))
            found[there].append((end, 0, number, Action(kind=receive, stage=target, peer=here, **common)))
    ordered = (sorted(row, key=lambda event: event[:3]) for row in found)
    return ScheduleTable(
        method=method, pipelines=tuple(pipelines), rows=tuple(tuple(action for *_, action in row) for row in ordered)
    )


def _ways(kind: str) -> tuple[Kind, Kind]:
    return ("SEND_F", "RECV_F") if kind == "F" else ("SEND_B", "RECV_B")
