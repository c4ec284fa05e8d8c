"""No table deadlocks under NCCL's rules, where transfers wait for each other, unlike gloo's."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.training.rendezvous_network import RendezvousCommunicator, StuckRanksError, run_ranks

from rlhf_common.schedule import Action, Kind, Pipeline, ScheduleTable
from rlhf_planner.schedule.candidate_tables import (
    StageCost,
    coarse,
    exact_instance,
    search_options,
    table_of,
    table_of_rows,
)
from rlhf_planner.schedule.forward_only import forward_only
from rlhf_planner.schedule.methods import FUSED, FUSED_SPLIT, opposite, placed
from rlhf_planner.schedule.report import solution_json
from rlhf_planner.schedule.row_simulation import widest
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.schedule.solve import solve
from rlhf_planner.schedule.table_check import check_table
from rlhf_workers.training.communication.communicator import PeerLostError, RowCounts, waiting_for
from rlhf_workers.training.communication.transport import GroupTransport
from rlhf_workers.training.schedule.executor import execute


class Meeting(torch.autograd.Function):
    """Waits for the other ranks of a stage, in its forward and in its backward, like the reductions of a layer."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, meet: Callable[[], None]) -> torch.Tensor:
        ctx.meet = meet
        meet()
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meet()
        return gradients[0], None


def meeting(communicator: RendezvousCommunicator, rank: int, width: int) -> Callable[[], None]:
    """Return a barrier for all ranks of a stage, made of transfers, in one order with all others."""
    first = rank - rank % width

    def meet() -> None:
        others = range(first + 1, first + width)
        for sends in (True, False):
            for peer in others if rank == first else (first,):
                way = communicator.send if sends == (rank != first) else communicator.receive
                way(torch.zeros(1), peer).wait()

    return meet


class ProductStage:
    """A pipeline whose stages each multiply by a weight, as a `PipelineWork`."""

    def __init__(self, stages: int, local_stages: list[int], meet: Callable[[], None] | None = None) -> None:
        self.stages, self.meet = stages, meet
        self.weights = {stage: torch.nn.Parameter(torch.tensor(1.0 + stage)) for stage in local_stages}

    def like_hidden(self, microbatch: int) -> torch.Tensor:
        return torch.empty(2)

    def embed(self, microbatch: int) -> torch.Tensor:
        return torch.full((2,), 1.0 + microbatch, requires_grad=True)

    def forward(self, stage: int, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        output = hidden * self.weights[stage]
        if self.meet is not None:
            output = Meeting.apply(output, self.meet)  # type: ignore[no-untyped-call]
        return output.sum() if stage == self.stages - 1 else output

    def parameters(self, stage: int) -> list[torch.nn.Parameter]:
        return [self.weights[stage]]


def gradients(table: ScheduleTable) -> dict[tuple[str, int], float]:
    """Run every row; return (pipeline, stage) -> gradient."""

    def work(rank: int, communicator: RendezvousCommunicator) -> dict[tuple[str, int], float]:
        works = {
            index: ProductStage(len(p.stage_ranks), own, meeting(communicator, rank, p.width) if p.width > 1 else None)
            for index, p in enumerate(table.pipelines)
            if (own := held_of(p, rank))
        }
        execute(table.rows[rank], works, communicator, 0)
        return {
            (table.pipelines[index].name, stage): float(weight.grad)
            for index, pipeline in works.items()
            for stage, weight in pipeline.weights.items()
            if weight.grad is not None
        }

    return {key: value for result in run_ranks(len(table.rows), work) for key, value in result.items()}


def held_of(pipeline: Pipeline, row: int) -> list[int]:
    return [stage for stage, first in enumerate(pipeline.stage_ranks) if 0 <= row - first < pipeline.width]


def expected(table: ScheduleTable) -> dict[tuple[str, int], float]:
    result: dict[tuple[str, int], float] = {}
    for pipeline in table.pipelines:
        stages, inputs = len(pipeline.stage_ranks), 2 * sum(range(1, pipeline.microbatches + 1))
        product = torch.prod(torch.arange(1.0, stages + 1)).item()
        result |= {(pipeline.name, stage): inputs * product / (1.0 + stage) for stage in range(stages)}
    return result


def all_forward_then_all_backward(pipelines: tuple[Pipeline, ...]) -> ScheduleTable:
    """GPipe, one pipeline after the other."""
    rows: list[list[Action]] = [[] for _ in range(1 + max(r for p in pipelines for r in p.stage_ranks))]
    for index, pipeline in enumerate(pipelines):
        places = pipeline.stage_ranks

        def add(rank: int, kind: Kind, stage: int, microbatch: int, peer: int | None = None, at: int = index) -> None:
            rows[rank].append(Action(kind=kind, pipeline=at, stage=stage, microbatch=microbatch, peer=peer))

        for forward, microbatch in itertools.product((True, False), range(pipeline.microbatches)):
            order = range(len(places)) if forward else range(len(places))[::-1]
            for stage, following in itertools.zip_longest(order, order[1:]):
                add(places[stage], "F" if forward else "B", stage, microbatch)
                if following is not None and places[stage] != places[following]:
                    add(places[stage], "SEND_F" if forward else "SEND_B", stage, microbatch, places[following])
                    add(places[following], "RECV_F" if forward else "RECV_B", following, microbatch, places[stage])
    return ScheduleTable(method="gpipe", pipelines=pipelines, rows=tuple(map(tuple, rows)))


@st.composite
def tables(draw: st.DrawFn) -> ScheduleTable:
    """Generate tables of every kind, for models with any times on any stage."""
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 10))
    models = ("actor", "critic")[: draw(st.integers(1, 2))]
    pipelines = opposite(models, stages, microbatches)
    return draw(made_by(pipelines, draw(st.sampled_from(["serial", "gpipe", FUSED, FUSED_SPLIT]))))


@st.composite
def tables_of_unlike_sizes(draw: st.DrawFn) -> ScheduleTable:
    """Generate tables of two or three models whose stages span different numbers of rows."""
    tensors = {
        model: draw(st.sampled_from([1, 2, 4])) for model in ("actor", "critic", "cost")[: draw(st.integers(2, 3))]
    }
    block = max(tensors.values()) * draw(st.integers(1, 3))
    pipelines = placed(tensors, block, draw(st.integers(1, 8)), alternate=draw(st.booleans()))
    return draw(made_by(pipelines, draw(st.sampled_from(["serial", FUSED, FUSED_SPLIT]))))


@st.composite
def made_by(draw: st.DrawFn, pipelines: tuple[Pipeline, ...], method: str) -> ScheduleTable:
    """Return the table of a method, for models with any times on any stage."""
    if method == "serial":
        return serial_table(pipelines)
    if method == "gpipe":
        return all_forward_then_all_backward(pipelines)
    time = st.floats(0.01, 0.1)
    costs = {
        (model, stage): StageCost(draw(time), draw(time), draw(time), draw(time), 1.0)
        for model, stage in ((p.model, stage) for p in pipelines for stage in range(len(p.stage_ranks)))
    }
    rows = max(first + p.width for p in pipelines for first in p.stage_ranks)
    transfers = {(rank, rank + 1): draw(st.sampled_from([0.0, 0.005])) for rank in range(rows - 1)}
    if widest(pipelines) > 1:
        return table_of_rows(pipelines, costs, transfers, method)
    asked = coarse(exact_instance(pipelines, costs, transfers, method == FUSED_SPLIT))
    solution = solve(asked, search_options(method, 0.1), itertools.count().__next__)
    return table_of(asked, pipelines, solution_json(solution), method)


@given(tables())
@settings(max_examples=30, deadline=None)
def test_every_kind_of_table_ends_and_gives_the_gradients(table: ScheduleTable) -> None:
    assert gradients(table) == pytest.approx(expected(table))


@pytest.mark.full
@given(tables_of_unlike_sizes())
@settings(max_examples=40, deadline=None)
def test_rows_that_hold_stages_together_end_and_give_the_gradients(table: ScheduleTable) -> None:
    """Transfers follow NCCL's rules, and the rows of a stage wait for one another in every step."""
    check_table(table)
    assert gradients(table) == pytest.approx(expected(table))


@pytest.mark.full
@given(tables_of_unlike_sizes())
@settings(max_examples=20, deadline=None)
def test_forwards_alone_end_on_rows_that_hold_stages_together(table: ScheduleTable) -> None:
    assert products(table, "actor") == {
        ("actor", microbatch): 2
        * (1.0 + microbatch)
        * torch.prod(torch.arange(1.0, len(pipeline.stage_ranks) + 1)).item()
        for pipeline in table.pipelines
        if pipeline.model == "actor"
        for microbatch in range(pipeline.microbatches)
    }


def products(table: ScheduleTable, model: str) -> dict[tuple[str, int], float]:
    """Run only the forwards; return (pipeline, micro-batch) -> result of its last stage."""

    def work(rank: int, communicator: RendezvousCommunicator) -> dict[tuple[str, int], float]:
        remembered: dict[tuple[str, int], float] = {}
        works = {
            index: RememberedStage(p.name, len(p.stage_ranks), own, remembered)
            for index, p in enumerate(table.pipelines)
            if p.model == model and (own := held_of(p, rank))
        }
        execute(forward_only(table, model).rows[rank], works, communicator, 0, forward_only=True)
        return remembered

    return {key: value for result in run_ranks(len(table.rows), work) for key, value in result.items()}


class RememberedStage(ProductStage):
    """Stores the results of its last stage, by micro-batch."""

    def __init__(
        self, name: str, stages: int, local_stages: list[int], remembered: dict[tuple[str, int], float]
    ) -> None:
        super().__init__(stages, local_stages)
        self.name, self.remembered = name, remembered

    def forward(self, stage: int, microbatch: int, hidden: torch.Tensor) -> torch.Tensor:
        output = super().forward(stage, microbatch, hidden)
        assert not output.requires_grad
        if stage == self.stages - 1:
            self.remembered[self.name, microbatch] = float(output)
        return output


@given(st.lists(st.tuples(st.sampled_from(["actor", "critic"]), st.integers(1, 6), st.data()), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_forwards_alone_end_wherever_stages_lie(asked: list[tuple[str, int, st.DataObject]]) -> None:
    """Also if several stages of a pipeline are on one rank, and with several pipelines of the model."""
    ranks = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    pipelines = tuple(
        Pipeline(name=f"{model}-{number}", model=model, stage_ranks=tuple(data.draw(ranks)), microbatches=microbatches)
        for number, (model, microbatches, data) in enumerate(asked)
    )
    table = ScheduleTable(method="serial", pipelines=pipelines, rows=((), (), ()))
    assert products(table, "actor") == {
        (p.name, microbatch): 2 * (1.0 + microbatch) * torch.prod(torch.arange(1.0, len(p.stage_ranks) + 1)).item()
        for p in pipelines
        if p.model == "actor"
        for microbatch in range(p.microbatches)
    }


def test_the_network_finds_what_gloo_hides() -> None:
    """Two ranks that both send first: gloo buffers the tensors, NCCL's streams would wait for each other forever."""
    pipelines = opposite(("actor", "critic"), 2, 1)
    rows = all_forward_then_all_backward(pipelines).rows
    crossed = []
    for row in rows:
        forward = [a for a in row if a.kind == "F" and a.stage == 0] + [a for a in row if a.kind == "SEND_F"]
        crossed.append((*forward, *(a for a in row if a not in forward)))
    table = ScheduleTable(method="crossed", pipelines=pipelines, rows=tuple(crossed))
    with pytest.raises(StuckRanksError, match="rank 0: sends to rank 1; rank 1: sends to rank 0"):
        gradients(table)


class SilentPeer:
    """A peer that neither sends nor receives until the group's time-out."""

    transport = GroupTransport("gloo")

    def __init__(self) -> None:
        self.peer = -1

    def send(self, tensor: torch.Tensor, peer: int) -> "SilentPeer":
        return self.receive(tensor, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> "SilentPeer":
        self.peer = peer
        return self

    def wait(self) -> None:
        with waiting_for(f"rank {self.peer}"):
            raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_reduce_max(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: tuple[int, ...]) -> None: ...

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, rows: RowCounts, ranks: tuple[int, ...]
    ) -> None: ...


def test_a_wait_that_fails_names_the_peer_and_the_step_of_the_table() -> None:
    receive = Action(kind="RECV_F", pipeline=0, stage=1, microbatch=3, peer=0)
    forward = Action(kind="F", pipeline=0, stage=1, microbatch=3)
    words = "waiting for rank 4 at step 1 of its schedule row, F of pipeline 0, stage 1, micro-batch 3: timed out"
    with pytest.raises(PeerLostError, match=words):
        execute([receive, forward], {0: ProductStage(2, [1])}, SilentPeer(), 4)
    row = [Action(kind="F", pipeline=0, stage=0, microbatch=0)]
    row.append(Action(kind="SEND_F", pipeline=0, stage=0, microbatch=0, peer=1))
    with pytest.raises(PeerLostError, match="waiting for rank 5 at the end of its schedule row"):
        execute(row, {0: ProductStage(2, [0])}, SilentPeer(), 4, forward_only=True)
