"""Checks by replay that ranks which follow an executable table finish, even if every transfer blocks both sides."""

from __future__ import annotations

from collections import Counter
from itertools import product

from rlhf_common.schedule import Action, ScheduleTable

_COUNTERPART = {"SEND_F": "RECV_F", "SEND_B": "RECV_B"}


_Done = tuple[str, int, int, int, int]
"""Kind, pipeline, stage, micro-batch, index of the rank among those of the stage."""


class TableError(ValueError):
    """The table cannot be executed. The message names the place and the problem."""


def check_table(table: ScheduleTable) -> None:
    """Raise TableError unless every rank can follow its row to the end and every micro-batch is trained exactly
    once."""
    _check_actions(table)
    done: set[_Done] = set()
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


def _advance(table: ScheduleTable, rank: int, at: list[int], done: set[_Done]) -> bool:
    action = table.rows[rank][at[rank]]
    pipe = table.pipelines[action.pipeline]
    if action.peer is None:
        first = pipe.stage_ranks[action.stage]
        together = range(first, first + pipe.width)
        if any(table.rows[peer][at[peer] : at[peer] + 1] != (action,) for peer in together):
            return False
        if not all(_ready(table, action, place, done) for place in range(pipe.width)):
            return False
        kinds = ("I", "W") if action.kind == "B" else (action.kind,)
        for peer in together:
            done.update((kind, action.pipeline, action.stage, action.microbatch, peer - first) for kind in kinds)
            at[peer] += 1
        return True
    other = table.rows[action.peer]
    place = at[action.peer]
    if place >= len(other) or not _meet(action, rank, other[place], action.peer):
        return False
    receiver, by = (action, rank) if action.kind.startswith("RECV") else (other[place], action.peer)
    place = by - pipe.stage_ranks[receiver.stage]
    done.add((receiver.kind, receiver.pipeline, receiver.stage, receiver.microbatch, place))
    at[rank] += 1
    at[action.peer] += 1
    return True


def _meet(action: Action, rank: int, other: Action, peer: int) -> bool:
    """Return whether the two actions are the two sides of one transfer."""
    send, receive = (action, other) if action.kind.startswith("SEND") else (other, action)
    step = 1 if send.kind == "SEND_F" else -1
    return (
        _COUNTERPART.get(send.kind) == receive.kind
        and {(action.peer, rank), (other.peer, peer)} == {(peer, rank), (rank, peer)}
        and (send.pipeline, send.microbatch) == (receive.pipeline, receive.microbatch)
        and receive.stage == send.stage + step
    )


def _ready(table: ScheduleTable, action: Action, place: int, done: set[_Done]) -> bool:
    """Return whether the input of a computation is available."""
    pipe = table.pipelines[action.pipeline]
    p, s, m = action.pipeline, action.stage, action.microbatch
    before_kind = {"F": "F", "I": "I", "B": "I", "W": "W"}[action.kind]
    if m > 0 and (before_kind, p, s, m - 1, place) not in done and action.kind != "W":
        return False
    if action.kind == "W":
        return ("I", p, s, m, place) in done
    neighbour = s - 1 if action.kind == "F" else s + 1
    if action.kind != "F" and ("F", p, s, m, place) not in done:
        return False
    if not 0 <= neighbour < len(pipe.stage_ranks):
        return True
    if pipe.stage_ranks[neighbour] == pipe.stage_ranks[s]:
        return ("F" if action.kind == "F" else "I", p, neighbour, m, place) in done
    return ("RECV_F" if action.kind == "F" else "RECV_B", p, s, m, place) in done


def _check_actions(table: ScheduleTable) -> None:
    """Check that actions are complete and unique and on their stage's rank, and that sends follow the step whose result
    they send."""
    counts: Counter[_Done] = Counter()
    for rank, row in enumerate(table.rows):
        for place, action in enumerate(row):
            at = f"rows[{rank}][{place}]"
            _check_action(table, rank, action, at)
            p, s, m = action.pipeline, action.stage, action.microbatch
            own = rank - table.pipelines[p].stage_ranks[s]
            if action.kind == "SEND_F" and not counts[("F", p, s, m, own)]:
                raise TableError(f"{at}: {_name(action)} comes before the step that makes its data")
            if action.kind == "SEND_B" and not (counts[("B", p, s, m, own)] or counts[("I", p, s, m, own)]):
                raise TableError(f"{at}: {_name(action)} comes before the step that makes its data")
            counts[(action.kind, p, s, m, own)] += 1
            if counts[(action.kind, p, s, m, own)] > 1:
                raise TableError(f"{at}: {_name(action)} appears twice")
    for index, pipe in enumerate(table.pipelines):
        for stage, own in product(range(len(pipe.stage_ranks)), range(pipe.width)):
            for microbatch in range(pipe.microbatches):
                kinds = "".join(kind for kind in "FBIW" if counts[(kind, index, stage, microbatch, own)])
                if kinds not in ("FB", "FIW"):
                    where = f"micro-batch {microbatch} on stage {stage} of pipeline {index}"
                    raise TableError(f"rows: {where} has {kinds or 'nothing'}; it needs F and B, or F, I and W")


def _check_action(table: ScheduleTable, rank: int, action: Action, at: str) -> None:
    if not 0 <= action.pipeline < len(table.pipelines):
        raise TableError(f"{at}.pipeline: {action.pipeline} is not one of {len(table.pipelines)} pipelines")
    pipe = table.pipelines[action.pipeline]
    valid = 0 <= action.stage < len(pipe.stage_ranks)
    if not valid or not 0 <= rank - pipe.stage_ranks[action.stage] < pipe.width:
        raise TableError(f"{at}: {_name(action)} is not a stage of rank {rank}")
    if not 0 <= action.microbatch < pipe.microbatches:
        raise TableError(f"{at}.microbatch: {action.microbatch} is not one of {pipe.microbatches}")
    if (action.peer is None) != (action.kind in "FBIW") or not 0 <= (action.peer or 0) < len(table.rows):
        raise TableError(f"{at}.peer: {action.peer} is not valid for {action.kind}")
    if action.peer is not None and action.peer % pipe.width != rank % pipe.width:
        raise TableError(f"{at}.peer: {action.peer} has another place in its stage than rank {rank}")


def _name(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.microbatch} on stage {action.stage} of pipeline {action.pipeline}"
