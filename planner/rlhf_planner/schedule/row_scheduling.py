"""Builds fused tables by list scheduling for models whose stages span different numbers of rows. Rule: pure.

The step that can start first is next. A stage starts a forward only while it has fewer micro-batches than 1F1B would,
plus `spare`. Tables are free of deadlock for the same reason as in `tables`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rlhf_common.schedule import Action, Kind, Pipeline, ScheduleTable
from rlhf_planner.schedule.row_simulation import Duration, Order, RowStep, Transfer, input_came, simulate_rows
from rlhf_planner.schedule.schedule_check import StepKind
from rlhf_planner.schedule.table_check import check_table

SPARES: Final = (0, 1, 2, 4, 8)
"""Micro-batches that a stage may have beyond those of 1F1B, tried in order."""
MAX_LOOKS: Final = 4_000_000
"""Approximate maximum of steps visited in all tries; large tables get fewer tries, but at least one."""
_AFTER: Final[dict[StepKind, int]] = {"B": 0, "I": 0, "F": 1, "W": 2}


def row_table(
    pipelines: Sequence[Pipeline],
    duration: Duration,
    transfer: Transfer,
    activation: Callable[[int, int], float],
    method: str,
    *,
    split: bool,
    room: float | None,
) -> ScheduleTable:
    """Return the table of the shortest schedule found, checked.

    Raises ValueError if no schedule found stays within `room`, and TableError for an invalid table.
    """
    stages = sum(len(pipeline.stage_ranks) for pipeline in pipelines)
    looks = 3 * stages * sum(len(pipeline.stage_ranks) * pipeline.microbatches for pipeline in pipelines)
    models = tuple(range(len(pipelines)))
    tries = [(spare, first) for spare in SPARES for first in (models, models[::-1])][: max(1, MAX_LOOKS // looks)]
    found: list[tuple[float, float, int, list[Order]]] = []
    for number, (spare, first) in enumerate(tries):
        orders = list_schedule(pipelines, duration, transfer, split=split, spare=spare, first=first)
        peak = max(_peak(order, activation, split) for order in orders)
        if room is None or peak <= room:
            times = simulate_rows(pipelines, orders, duration, transfer)
            found.append((max(end for _, end in times.values()), peak, number, orders))
    if not found:
        raise ValueError(f"no schedule {method} keeps within the {room:.0f} bytes that a rank has for activations")
    *_, orders = min(found)
    table = _table(pipelines, simulate_rows(pipelines, orders, duration, transfer), len(orders), method)
    check_table(table)
    return table


def list_schedule(
    pipelines: Sequence[Pipeline],
    duration: Duration,
    transfer: Transfer,
    *,
    split: bool,
    spare: int,
    first: Sequence[int],
) -> list[Order]:
    """Return the computations of each row, in order.

    `split` makes weight gradients separate steps. `first` lists pipelines by priority among steps of a kind.
    """
    rows = max(rank + pipeline.width for pipeline in pipelines for rank in pipeline.stage_ranks)
    orders: list[Order] = [[] for _ in range(rows)]
    idle, ends = [0.0] * rows, dict[RowStep, tuple[float, float]]()
    stages = [(p, s) for p, pipeline in enumerate(pipelines) for s in range(len(pipeline.stage_ranks))]
    done: dict[tuple[StepKind, int, int], int] = {}

    def begins(step: RowStep) -> float | None:
        _, p, s, _ = step
        came = input_came(pipelines, step, ends, transfer)
        start = pipelines[p].stage_ranks[s]
        return None if came is None else max([came, *idle[start : start + pipelines[p].width]])

    for _ in range((3 if split else 2) * sum(pipelines[p].microbatches for p, _ in stages)):
        ready = [
            (start, _AFTER[step[0]], first.index(p), step)
            for p, s in stages
            for step in _waiting(pipelines[p], p, s, done, split, spare)
            if (start := begins(step)) is not None
        ]
        start, *_, step = min(ready)
        kind, p, s, _ = step
        ends[step] = start, start + duration(kind, p, s)
        done[kind, p, s] = done.get((kind, p, s), 0) + 1
        for row in range(pipelines[p].stage_ranks[s], pipelines[p].stage_ranks[s] + pipelines[p].width):
            orders[row].append(step)
            idle[row] = ends[step][1]
    return orders


def _waiting(
    pipeline: Pipeline, p: int, s: int, done: dict[tuple[StepKind, int, int], int], split: bool, spare: int
) -> list[RowStep]:
    """Return the next steps of a stage, with or without available input."""
    back: StepKind = "I" if split else "B"
    forwards, backwards, weights = (done.get((kind, p, s), 0) for kind in ("F", back, "W"))
    in_flight = forwards - (weights if split else backwards)
    found: list[RowStep] = [(back, p, s, backwards)] if backwards < forwards else []
    if forwards < pipeline.microbatches and in_flight < len(pipeline.stage_ranks) - s + spare:
        found.append(("F", p, s, forwards))
    return [*found, ("W", p, s, weights)] if split and weights < backwards else found


def _peak(order: Order, activation: Callable[[int, int], float], split: bool) -> float:
    """Return the maximum memory that a rank of a row needs at a time."""
    in_use = peak = 0.0
    for kind, pipeline, stage, _ in order:
        if kind == "F":
            in_use += activation(pipeline, stage)
            peak = max(peak, in_use)
        elif kind == ("W" if split else "B"):
            in_use -= activation(pipeline, stage)
    return peak


def _table(
    pipelines: Sequence[Pipeline], times: dict[RowStep, tuple[float, float]], rows: int, method: str
) -> ScheduleTable:
    """Return the table of steps at their times, with the transfers between them."""
    found: list[list[tuple[float, int, int, Action]]] = [
        [] for _ in range(rows)
    ]  # (time, transfers first, number, ...)
    for number, ((kind, p, stage, microbatch), (start, end)) in enumerate(times.items()):
        of, target = pipelines[p], stage + 1 if kind == "F" else stage - 1
        own = range(of.stage_ranks[stage], of.stage_ranks[stage] + of.width)
        action = Action(kind=kind, pipeline=p, stage=stage, microbatch=microbatch)
        for row in own:
            found[row].append((start, 1, number, action))
        if kind == "W" or not 0 <= target < len(of.stage_ranks) or of.stage_ranks[target] == own.start:
            continue
        send, receive = _WAYS[kind]
        for row, peer in zip(own, range(of.stage_ranks[target], of.stage_ranks[target] + of.width), strict=True):
            out = Action(kind=send, pipeline=p, stage=stage, microbatch=microbatch, peer=peer)
            into = Action(kind=receive, pipeline=p, stage=target, microbatch=microbatch, peer=row)
            found[row].append((end, 0, number, out))
            found[peer].append((end, 0, number, into))
    ordered = (sorted(row, key=lambda event: event[:3]) for row in found)
    return ScheduleTable(
        method=method, pipelines=tuple(pipelines), rows=tuple(tuple(action for *_, action in row) for row in ordered)
    )


_WAYS: Final[dict[StepKind, tuple[Kind, Kind]]] = {
    "F": ("SEND_F", "RECV_F"),
    "B": ("SEND_B", "RECV_B"),
    "I": ("SEND_B", "RECV_B"),
}
