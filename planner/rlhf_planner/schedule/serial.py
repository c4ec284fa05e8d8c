"""The serial baseline as an executable table: 1F1B of the first pipeline, then of the next. Rule: pure.

Rows are parts of one global sequence, so the table is free of deadlock even if transfers block both ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhf_common.schedule import Action, Kind, Pipeline, ScheduleTable

METHOD = "serial-1f1b"

_DURATION: dict[Kind, int] = {"F": 1, "B": 2}
"""Relative times of a forward and a whole backward step; they only order events."""


@dataclass(frozen=True, order=True)
class _Event:
    """One entry of the global sequence. At equal times a transfer comes before the computation that may need it."""

    time: int
    computes: bool
    number: int
    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    """One action per rank of `ranks`."""


def serial_table(pipelines: Sequence[Pipeline]) -> ScheduleTable:
    """Return the table of 1F1B of each pipeline in turn, with whole backward steps.

    Raises ValueError naming the field of a pipeline that cannot run.
    """
    _check(pipelines)
    ranks = max(rank + pipeline.width for pipeline in pipelines for rank in pipeline.stage_ranks)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for index, pipeline in enumerate(pipelines):
        for event in sorted(_events(index, pipeline)):
            for rank, action in zip(event.ranks, event.actions, strict=True):
                add(rows, rank, action, pipeline.width)
    return ScheduleTable(method=METHOD, pipelines=tuple(pipelines), rows=tuple(tuple(row) for row in rows))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[Kind, int]]:
    """Return the (kind, micro-batch) pairs of one stage in 1F1B order."""
    warm_up = min(stages - 1 - stage, microbatches)
    order: list[tuple[Kind, int]] = [("F", m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        order += [("F", m + warm_up), ("B", m)]
    return order + [("B", m) for m in range(microbatches - warm_up, microbatches)]


def add(rows: Sequence[list[Action]], rank: int, action: Action, width: int) -> None:
    """Append an action of a stage's first row, `rank`, to all `width` rows of the stage, each with its own peer."""
    for place in range(width):
        own = action if action.peer is None or not place else action.model_copy(update={"peer": action.peer + place})
        rows[rank + place].append(own)


def _events(index: int, pipeline: Pipeline) -> Iterator[_Event]:
    """Yield the events of one pipeline.

    Stages are in 1F1B order. A step that can start earliest comes next, of the last such stage.
    """
    stages = len(pipeline.stage_ranks)
    waiting = [one_f_one_b(stage, stages, pipeline.microbatches)[::-1] for stage in range(stages)]
    finished: dict[tuple[Kind, int, int], int] = {}
    idle = dict.fromkeys(pipeline.stage_ranks, 0)
    for number in range(2 * stages * pipeline.microbatches):
        ready = []
        for stage, order in enumerate(waiting):
            needed = _needs(order[-1], stage, stages) if order else None
            if needed is not None and all(step in finished for step in needed):
                start = max([idle[pipeline.stage_ranks[stage]], *(finished[step] for step in needed)])
                ready.append((start, -stage))
        start, stage = min(ready)[0], -min(ready)[1]
        kind, microbatch = waiting[stage].pop()
        rank, end = pipeline.stage_ranks[stage], start + _DURATION[kind]
        idle[rank] = finished[kind, stage, microbatch] = end
        step = Action(kind=kind, pipeline=index, stage=stage, microbatch=microbatch)
        yield _Event(start, True, number, (rank,), (step,))
        target = stage + 1 if kind == "F" else stage - 1
        if 0 <= target < stages and pipeline.stage_ranks[target] != rank:
            yield _transfer(step, end, number, rank, target, pipeline.stage_ranks[target])


def _needs(step: tuple[Kind, int], stage: int, stages: int) -> list[tuple[Kind, int, int]]:
    """Return the steps (kind, stage, micro-batch) that must be finished before this one starts."""
    kind, microbatch = step
    if kind == "F":
        return [("F", stage - 1, microbatch)] if stage > 0 else []
    own: list[tuple[Kind, int, int]] = [("F", stage, microbatch)]
    return [*own, ("B", stage + 1, microbatch)] if stage < stages - 1 else own


def _transfer(step: Action, time: int, number: int, rank: int, target: int, peer: int) -> _Event:
    """Return the transfer of `step`'s result from `rank` to stage `target` on `peer`, as one event of both."""
    send: Kind = "SEND_F" if step.kind == "F" else "SEND_B"
    receive: Kind = "RECV_F" if step.kind == "F" else "RECV_B"
    common = {"pipeline": step.pipeline, "microbatch": step.microbatch}
    out = Action(kind=send, stage=step.stage, peer=peer, **common)
    into = Action(kind=receive, stage=target, peer=rank, **common)
    return _Event(time, False, number, (rank, peer), (out, into))


def _check(pipelines: Sequence[Pipeline]) -> None:
    if not pipelines:
        raise ValueError("pipelines: [] is not valid; give at least one pipeline")
    names = [pipeline.name for pipeline in pipelines]
    for index, pipeline in enumerate(pipelines):
        field = f"pipelines[{index}]"
        if names.index(pipeline.name) != index:
            raise ValueError(f"{field}.name: {pipeline.name!r} is not valid; names must be unique")
        if pipeline.microbatches < 1:
            raise ValueError(f"{field}.microbatches: {pipeline.microbatches} is not valid; give at least 1")
        if not pipeline.stage_ranks or min(pipeline.stage_ranks) < 0:
            raise ValueError(f"{field}.stage_ranks: {pipeline.stage_ranks} is not valid; one rank >= 0 per stage")
        if pipeline.width < 1 or any(rank % pipeline.width for rank in pipeline.stage_ranks):
            begins = f"stages at {pipeline.stage_ranks} must begin at multiples of it"
            raise ValueError(f"{field}.width: {pipeline.width} is not valid; {begins}")
