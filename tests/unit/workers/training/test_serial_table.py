"""The serial table: complete, in 1F1B order, and free of deadlock with blocking transfers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.schedule import Action, Pipeline, ScheduleTable
from rlhf_planner.schedule.serial import one_f_one_b, serial_table


@st.composite
def pipelines(draw: st.DrawFn) -> list[Pipeline]:
    ranks = draw(st.integers(1, 6))
    chosen = []
    for index in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(ranks)))
        stages = draw(st.lists(st.sampled_from(order), min_size=1, max_size=8))
        count = draw(st.integers(1, 9))
        chosen.append(Pipeline(name=f"p{index}", model="actor", stage_ranks=tuple(stages), microbatches=count))
    return chosen


def run_blocking(table: ScheduleTable) -> list[Action]:
    """Return the computations in order of execution if every transfer blocks both sides; fail on a deadlock."""
    heads, done, order = [0] * len(table.rows), set[tuple[str, int, int, int]](), list[Action]()

    def head(rank: int) -> Action | None:
        return table.rows[rank][heads[rank]] if heads[rank] < len(table.rows[rank]) else None

    def finish(rank: int, action: Action) -> None:
        done.add((action.kind, action.pipeline, action.stage, action.microbatch))
        heads[rank] += 1

    while any(head(rank) for rank in range(len(table.rows))):
        before = list(heads)
        for rank in range(len(table.rows)):
            action = head(rank)
            if action is None or action.kind.startswith("RECV"):
                continue
            if action.peer is None:
                assert has_inputs(table, action, rank, done)
                order.append(action)
                finish(rank, action)
                continue
            other = head(action.peer)
            if other is not None and (other.peer, other.kind) == (rank, action.kind.replace("SEND", "RECV")):
                assert (action.kind[-1], action.pipeline, action.stage, action.microbatch) in done
                assert (other.pipeline, other.microbatch) == (action.pipeline, action.microbatch)
                finish(rank, action)
                finish(action.peer, other)
        assert heads != before, f"deadlock at {[head(rank) for rank in range(len(table.rows))]}"
    return order


def has_inputs(table: ScheduleTable, action: Action, rank: int, done: set[tuple[str, int, int, int]]) -> bool:
    """Return whether all inputs of a forward or backward step are on its rank."""
    ranks = table.pipelines[action.pipeline].stage_ranks
    source = action.stage - 1 if action.kind == "F" else action.stage + 1
    forward_done = action.kind == "F" or ("F", action.pipeline, action.stage, action.microbatch) in done
    if not 0 <= source < len(ranks):
        return forward_done
    if ranks[source] == rank:
        return forward_done and (action.kind, action.pipeline, source, action.microbatch) in done
    return forward_done and (f"RECV_{action.kind}", action.pipeline, action.stage, action.microbatch) in done


@given(pipelines())
def test_every_step_runs_once_and_blocking_transfers_never_deadlock(given_pipelines: list[Pipeline]) -> None:
    ran = Counter(run_blocking(serial_table(given_pipelines)))
    expected = {
        (kind, index, stage, m)
        for index, pipeline in enumerate(given_pipelines)
        for stage in range(len(pipeline.stage_ranks))
        for m in range(pipeline.microbatches)
        for kind in ("F", "B")
    }
    assert {(a.kind, a.pipeline, a.stage, a.microbatch) for a in ran} == expected
    assert set(ran.values()) == {1}


@given(pipelines())
def test_every_stage_keeps_its_1f1b_order_and_pipelines_follow_one_another(given_pipelines: list[Pipeline]) -> None:
    table = serial_table(given_pipelines)
    for index, pipeline in enumerate(given_pipelines):
        for stage, rank in enumerate(pipeline.stage_ranks):
            ran = [
                (a.kind, a.microbatch)
                for a in table.rows[rank]
                if (a.pipeline, a.stage, a.peer) == (index, stage, None)
            ]
            assert ran == one_f_one_b(stage, len(pipeline.stage_ranks), pipeline.microbatches)
    for row in table.rows:
        assert [a.pipeline for a in row] == sorted(a.pipeline for a in row)


@given(pipelines())
def test_a_table_survives_json(given_pipelines: list[Pipeline]) -> None:
    table = serial_table(given_pipelines)
    assert ScheduleTable.model_validate_json(table.model_dump_json()) == table


def test_two_stages_four_micro_batches() -> None:
    row = [(a.kind, a.microbatch) for a in serial_table([_actor((0, 1), 4)]).rows[0]]
    assert [step for step in row if step[0] in "FB"] == [
        ("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (("a", (0,), 0), r"pipelines\[0\].microbatches: 0 .* at least 1"),
        (("a", (), 1), r"pipelines\[0\].stage_ranks"),
        (("a", (-1,), 1), r"pipelines\[0\].stage_ranks"),
    ],
)
def test_a_pipeline_that_cannot_run_is_named(pipeline: tuple[str, tuple[int, ...], int], message: str) -> None:
    name, ranks, count = pipeline
    with pytest.raises(ValueError, match=message):
        serial_table([Pipeline(name=name, model="actor", stage_ranks=ranks, microbatches=count)])
    with pytest.raises(ValueError, match=r"pipelines\[1\].name: 'actor'"):
        serial_table([_actor((0,), 1), _actor((0,), 1)])


def _actor(ranks: tuple[int, ...], count: int) -> Pipeline:
    return Pipeline(name="actor", model="actor", stage_ranks=ranks, microbatches=count)
