"""Converts a simulated schedule to the table that training ranks execute, and to plain steps for people and checkers.

Steps and transfers are in one total order, a transfer as one event, and a row is its rank's part. So the table is free
of deadlock even if every transfer blocks both sides, and the k-th send between two ranks meets the k-th receive.
"""

from __future__ import annotations

import numpy as np

from rlhf_common.schedule import Action, Kind, ScheduleTable
from rlhf_common.schedule import Pipeline as TablePipeline
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.schedule_check import Step, StepKind
from rlhf_planner.schedule.simulate import BACKWARD, FORWARD, KINDS, InstanceArrays, Timeline


def steps_by_device(timeline: Timeline) -> list[list[Step]]:
    """Return the schedule as step records, one list per device in order of execution."""
    arrays = timeline.arrays
    count = np.zeros(KINDS * arrays.stages, dtype=np.int64)
    rows: list[list[Step]] = []
    for orders in timeline.orders:
        row = []
        for op in orders:
            if op < 0:
                break
            microbatch, k = int(count[op]), int(op) // KINDS
            count[op] += 1
            start = float(timeline.start[arrays.base[op] + microbatch])
            kind = _kind(arrays, int(op))
            row.append(
                Step(
                    int(arrays.pipeline[k]),
                    kind,
                    microbatch,
                    int(arrays.stage[k]),
                    start,
                    start + float(arrays.duration[op]),
                )
            )
        rows.append(row)
    return rows


def _kind(arrays: InstanceArrays, operation: int) -> StepKind:
    k, kind = divmod(operation, KINDS)
    if kind == FORWARD:
        return "F"
    if kind == BACKWARD:
        return "I" if arrays.weight[k] else "B"
    return "W"


def schedule_table(timeline: Timeline, method: str, models: tuple[str, ...] | None = None) -> ScheduleTable:
    """Return the table of a schedule.

    `models` names the model role of every pipeline; by default actor for the first, critic for the others. Passing data
    within a rank needs no transfer.
    """
    arrays = timeline.arrays
    instance = arrays.instance
    if models is None:
        models = tuple("actor" if index == 0 else "critic" for index in range(len(instance.pipelines)))
    events: list[
        tuple[float, int, int, int, Action]
    ] = []  # (time, transfers before computation, sequence, rank, action)
    sequence = 0
    devices = steps_by_device(timeline)
    begins = {
        (step.pipeline, step.stage, step.microbatch, step.kind == "F"): step.start
        for row in devices
        for step in row
        if step.kind != "W"
    }
    for rank, row in enumerate(devices):
        for step in row:
            sequence += 1
            action = Action(kind=step.kind, pipeline=step.pipeline, stage=step.stage, microbatch=step.microbatch)
            events.append((step.start, 1, sequence, rank, action))
            for side, transfer in _transfers(instance, step):
                forward = step.kind == "F"
                used = begins[step.pipeline, step.stage + (1 if forward else -1), step.microbatch, forward]
                # rounding may put the end of a step slightly after the start of the step that uses it
                events.append((min(step.end, used), 0, sequence, side, transfer))
    rows: list[list[Action]] = [[] for _ in range(instance.devices)]
    for *_, rank, action in sorted(events, key=lambda event: event[:3]):
        rows[rank].append(action)
    return ScheduleTable(
        method=method,
        pipelines=tuple(
            TablePipeline(name=pipe.name, model=model, stage_ranks=pipe.stage_devices, microbatches=pipe.microbatches)
            for pipe, model in zip(instance.pipelines, models, strict=True)
        ),
        rows=tuple(tuple(row) for row in rows),
    )


def _transfers(instance: Instance, step: Step) -> list[tuple[int, Action]]:
    """Return (rank, action) of both sides of the transfer after a step; none if the next stage is on the same rank."""
    ranks = instance.pipelines[step.pipeline].stage_devices
    kinds: dict[str, tuple[int, Kind, Kind]] = {
        "F": (1, "SEND_F", "RECV_F"),
        "B": (-1, "SEND_B", "RECV_B"),
        "I": (-1, "SEND_B", "RECV_B"),
    }
    if step.kind not in kinds:
        return []
    direction, send, receive = kinds[step.kind]
    other = step.stage + direction
    if not 0 <= other < len(ranks) or ranks[other] == ranks[step.stage]:
        return []
    sender, receiver = ranks[step.stage], ranks[other]
    pipeline, microbatch = step.pipeline, step.microbatch
    sending = Action(kind=send, pipeline=pipeline, stage=step.stage, microbatch=microbatch, peer=receiver)
    receiving = Action(kind=receive, pipeline=pipeline, stage=other, microbatch=microbatch, peer=sender)
    return [(sender, sending), (receiver, receiving)]
