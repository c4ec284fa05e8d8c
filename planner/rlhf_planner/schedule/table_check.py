"""The checker of executable tables: whether ranks that follow their rows, every transfer blocking both sides, finish.

Any executor may call it before its first step. It replays the rows: a computation runs when its rank comes to it and
its input is there, a transfer when both sides have come to it. Knows orders only, no times and no activation sizes.
"""

from __future__ import annotations

from collections import Counter

from rlhf_api.schedule import Action, ScheduleTable

_COUNTERPART = {"SEND_F": "RECV_F", "SEND_B": "RECV_B"}


class TableError(ValueError):
    """The table cannot be executed; the message names the rank, the place in its row and what is wrong."""


def check_table(table: ScheduleTable) -> None:
    """Raise TableError unless every rank can follow its row to the end and every micro-batch is trained exactly
    once."""
    _check_actions(table)
    done: set[tuple[str, int, int, int]] = set()
    at = [0] * len(table.rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.rows):
            while at[rank] < len(row) and _advance(table, rank, at, done):
                moved = True
    for rank, row in enumerate(table.rows):
        if at[rank] < len(row):
            raise TableError(f"rows[{rank}][{at[rank]}]: {_name(row[at[rank]])} can never run: its input never comes")


def _advance(table: ScheduleTable, rank: int, at: list[int], done: set[tuple[str, int, int, int]]) -> bool:
    action = table.rows[rank][at[rank]]
    if action.peer is None:
        if not _ready(table, action, done):
            return False
        kinds = ("I", "W") if action.kind == "B" else (action.kind,)
        done.update((kind, action.pipeline, action.stage, action.microbatch) for kind in kinds)
        at[rank] += 1
        return True
    other = table.rows[action.peer]
    place = at[action.peer]
    if place >= len(other) or not _meet(action, rank, other[place], action.peer):
        return False
    receiver = action if action.kind.startswith("RECV") else other[place]
    done.add((receiver.kind, receiver.pipeline, receiver.stage, receiver.microbatch))
    at[rank] += 1
    at[action.peer] += 1
    return True


def _meet(action: Action, rank: int, other: Action, peer: int) -> bool:
    """Whether the two actions are the two sides of one transfer."""
    send, receive = (action, other) if action.kind.startswith("SEND") else (other, action)
    step = 1 if send.kind == "SEND_F" else -1
    return (
        _COUNTERPART.get(send.kind) == receive.kind
        and {(action.peer, rank), (other.peer, peer)} == {(peer, rank), (rank, peer)}
        and (send.pipeline, send.microbatch) == (receive.pipeline, receive.microbatch)
        and receive.stage == send.stage + step
    )


def _ready(table: ScheduleTable, action: Action, done: set[tuple[str, int, int, int]]) -> bool:
    """Whether a computation, or the data that a send needs, is there."""
    pipe = table.pipelines[action.pipeline]
    p, s, m = action.pipeline, action.stage, action.microbatch
    before_kind = {"F": "F", "I": "I", "B": "I", "W": "W"}[action.kind]
    if m > 0 and (before_kind, p, s, m - 1) not in done and action.kind != "W":
        return False
    if action.kind == "W":
        return ("I", p, s, m) in done
    neighbour = s - 1 if action.kind == "F" else s + 1
    if action.kind != "F" and ("F", p, s, m) not in done:
        return False
    if not 0 <= neighbour < len(pipe.stage_ranks):
        return True
    if pipe.stage_ranks[neighbour] == pipe.stage_ranks[s]:
        return ("F" if action.kind == "F" else "I", p, neighbour, m) in done
    return ("RECV_F" if action.kind == "F" else "RECV_B", p, s, m) in done


def _check_actions(table: ScheduleTable) -> None:
    """Actions are of known stages on their own rank, once each; sends follow what they send; none is missing."""
    counts: Counter[tuple[str, int, int, int]] = Counter()
    for rank, row in enumerate(table.rows):
        for place, action in enumerate(row):
            at = f"rows[{rank}][{place}]"
            _check_action(table, rank, action, at)
            p, s, m = action.pipeline, action.stage, action.microbatch
            if action.kind == "SEND_F" and not counts[("F", p, s, m)]:
                raise TableError(f"{at}: {_name(action)} comes before the step that makes its data")
            if action.kind == "SEND_B" and not (counts[("B", p, s, m)] or counts[("I", p, s, m)]):
                raise TableError(f"{at}: {_name(action)} comes before the step that makes its data")
            counts[(action.kind, p, s, m)] += 1
            if counts[(action.kind, p, s, m)] > 1:
                raise TableError(f"{at}: {_name(action)} appears twice")
    for index, pipe in enumerate(table.pipelines):
        for stage in range(len(pipe.stage_ranks)):
            for microbatch in range(pipe.microbatches):
                kinds = "".join(kind for kind in "FBIW" if counts[(kind, index, stage, microbatch)])
                if kinds not in ("FB", "FIW"):
                    where = f"micro-batch {microbatch} on stage {stage} of pipeline {index}"
                    raise TableError(f"rows: {where} has {kinds or 'nothing'}; it needs F and B, or F, I and W")


def _check_action(table: ScheduleTable, rank: int, action: Action, at: str) -> None:
    if not 0 <= action.pipeline < len(table.pipelines):
        raise TableError(f"{at}.pipeline: {action.pipeline} is not one of {len(table.pipelines)} pipelines")
    pipe = table.pipelines[action.pipeline]
    if not 0 <= action.stage < len(pipe.stage_ranks) or pipe.stage_ranks[action.stage] != rank:
        raise TableError(f"{at}: {_name(action)} is not a stage of rank {rank}")
    if not 0 <= action.microbatch < pipe.microbatches:
        raise TableError(f"{at}.microbatch: {action.microbatch} is not one of {pipe.microbatches}")
    if (action.peer is None) != (action.kind in "FBIW") or not 0 <= (action.peer or 0) < len(table.rows):
        raise TableError(f"{at}.peer: {action.peer} is not valid for {action.kind}")


def _name(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.microbatch} on stage {action.stage} of pipeline {action.pipeline}"
