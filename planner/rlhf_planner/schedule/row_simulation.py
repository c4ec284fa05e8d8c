"""Simulates rows whose stages may span several rows: when each step starts and ends. Rule: pure.

A step starts when every row of its stage has reached it and its input is available.
"""

from collections.abc import Callable, Mapping, Sequence

from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.schedule_check import StepKind
from rlhf_planner.schedule.simulate import DeadlockError

RowStep = tuple[StepKind, int, int, int]
"""Kind, pipeline, stage, micro-batch."""
Order = list[RowStep]
"""Computations of a row, in order."""
Duration = Callable[[StepKind, int, int], float]
"""(kind, pipeline, stage) -> time of a step."""
Transfer = Callable[[int, int], float]
"""(row, row) -> time of a transfer between the first rows of two stages on different rows."""


def widest(pipelines: Sequence[Pipeline]) -> int:
    """Return the number of rows per stage of the widest pipeline."""
    return max(pipeline.width for pipeline in pipelines)


def simulate_rows(
    pipelines: Sequence[Pipeline],
    orders: Sequence[Order],
    duration: Duration,
    transfer: Transfer,
) -> dict[RowStep, tuple[float, float]]:
    """Return step -> (start, end), in an executable order. Raises DeadlockError if a row waits for ever."""
    found: dict[RowStep, tuple[float, float]] = {}
    at, idle = [0] * len(orders), [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for row, order in enumerate(orders):
            while at[row] < len(order):
                step = order[at[row]]
                kind, pipeline, stage, _ = step
                first = pipelines[pipeline].stage_ranks[stage]
                rows = range(first, first + pipelines[pipeline].width)
                there = all(at[number] < len(orders[number]) and orders[number][at[number]] == step for number in rows)
                came = input_came(pipelines, step, found, transfer) if there else None
                if came is None:
                    break
                start = max([came, *(idle[number] for number in rows)])
                found[step] = start, start + duration(kind, pipeline, stage)
                for number in rows:
                    at[number], idle[number] = at[number] + 1, found[step][1]
                moved = True
    for row, order in enumerate(orders):
        if at[row] < len(order):
            kind, pipeline, stage, microbatch = order[at[row]]
            description = f"{kind} of micro-batch {microbatch} on stage {stage} of pipeline {pipeline}"
            raise DeadlockError(f"row {row} waits for ever before {description}")
    return found


def input_came(
    pipelines: Sequence[Pipeline],
    step: RowStep,
    found: Mapping[RowStep, tuple[float, float]],
    transfer: Transfer,
) -> float | None:
    """Return when a step's input is on its rows; None if it has not been made, 0 if no other stage makes it.

    `found` maps steps to (start, end).
    """
    kind, pipeline, stage, microbatch = step
    places = pipelines[pipeline].stage_ranks
    if kind == "W":
        producer = found.get(("I", pipeline, stage, microbatch))
        return None if producer is None else producer[1]
    source = stage - 1 if kind == "F" else stage + 1
    if not 0 <= source < len(places):
        return 0.0
    producer = found.get((kind, pipeline, source, microbatch))
    if producer is None:
        return None
    return producer[1] + (0.0 if places[source] == places[stage] else transfer(places[source], places[stage]))
