"""Ranks as positions: blocks x rows x ranks of a row; each rank occurs once, and sums cover the right ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.schedule import Pipeline, ScheduleTable
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.parallel.rank_layout import RankLayout


@st.composite
def groups(draw: st.DrawFn) -> list[RankLayout]:
    """Layouts of all ranks of a group.

    One model is over all rows, with stages of one, two or four rows; another is over all rows; another has two copies
    in a block.
    """
    stages, tensor, blocks = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    width = draw(st.sampled_from([1, 2, 4]))
    rows = stages * width
    order = draw(st.permutations(range(rows)))
    some = tuple(draw(st.lists(st.sampled_from(range(rows)), min_size=1, max_size=3)))
    pipelines = [
        Pipeline(name="actor", model="actor", stage_ranks=tuple(range(0, rows, width)), microbatches=2, width=width),
        Pipeline(name="critic", model="critic", stage_ranks=tuple(order), microbatches=2),
        *(Pipeline(name=f"cost-{n}", model="cost", stage_ranks=some, microbatches=1) for n in range(2)),
    ]
    world = blocks * rows * tensor
    table = serial_table(pipelines)
    return [RankLayout(table, rank, world, tensor) for rank in range(world)]


@given(groups())
def test_every_rank_has_one_place_and_every_place_one_rank(layouts: list[RankLayout]) -> None:
    first = layouts[0]
    places = {(layout.block, layout.local, layout.number) for layout in layouts}
    assert len(places) == len(layouts) == first.blocks * first.rows * first.tensor
    for rank, layout in enumerate(layouts):
        assert layout.global_rank(layout.block, layout.local, layout.number) == rank
        for model in layout.models:
            group = layout.tensor_group(model)
            together = [layouts[other] for other in group]
            assert {other.tensor_group(model) for other in together} == {group}
            assert [other.tensor_rank(model) for other in together] == list(range(len(group)))
            assert {other.block for other in together} == {layout.block}
            stages = {tuple(key for key in other.local_stages if key[0] == model) for other in together}
            assert len(stages) == 1, "they hold the same stages"
        together = [layouts[other] for other in layout.tensor_group("critic")]
        assert all((other.local, other.row) == (layout.local, layout.row) for other in together)


@given(groups())
def test_peers_of_a_row_are_of_the_same_block_and_number(layouts: list[RankLayout]) -> None:
    for layout in layouts:
        for row in range(layout.rows):
            peer = layouts[layout.first_rank + row * layout.tensor]
            assert (peer.block, peer.local, peer.number) == (layout.block, row, layout.number)


@given(groups())
def test_what_a_rank_holds_is_summed_among_all_who_hold_it_and_saved_by_one(layouts: list[RankLayout]) -> None:
    for layout in layouts:
        for key in layout.local_stages:
            holders = layout.holders(*key)
            number = layout.tensor_rank(key[0])
            assert set(holders) == {
                other.rank for other in layouts if key in other.local_stages and other.tensor_rank(key[0]) == number
            }
            assert {layouts[rank].holders(*key) for rank in holders} == {holders}
            assert sum(layouts[rank].writes(*key) for rank in holders) == 1
            for block in range(layout.blocks):
                assert sum(layouts[rank].publishes(*key) for rank in holders if layouts[rank].block == block) == 1


@given(groups())
def test_all_ranks_make_the_same_groups_and_a_rank_sums_in_no_other(layouts: list[RankLayout]) -> None:
    groups_in_order = layouts[0].groups()
    assert all(layout.groups() == groups_in_order for layout in layouts)
    all_groups = set(groups_in_order)
    for layout in layouts:
        wanted = [layout.holders(*key) for key in layout.local_stages] + [
            layout.tensor_group(model) for model in layout.models
        ]
        wanted += [
            ends for model in layout.models for ends in layout.ends(model) if layout.rank in ends and len(set(ends)) > 1
        ]
        assert all(ranks in all_groups for ranks in wanted if len(ranks) > 1)


@given(groups())
def test_without_tensor_groups_blocks_are_rows_of_ranks(layouts: list[RankLayout]) -> None:
    for layout in layouts:
        if layout.tensor == 1:
            assert (layout.block, layout.local) == divmod(layout.rank, layout.rows)
            assert (layout.first_rank, layout.tensor_group("critic")) == (layout.block * layout.rows, (layout.rank,))


@given(groups())
def test_a_rank_knows_whether_all_have_a_stage_of_every_model(layouts: list[RankLayout]) -> None:
    everywhere = all({model for model, _ in layout.local_stages} == set(layout.models) for layout in layouts)
    assert {layout.every_rank_has_all for layout in layouts} == {everywhere}


@given(groups())
def test_tensor_ranks_get_the_samples_of_one_copy(layouts: list[RankLayout]) -> None:
    for layout in layouts:
        for index in range(len(layout.table.pipelines)):
            group = layout.tensor_group(layout.table.pipelines[index].model)
            assert {layouts[other].replica(index) for other in group} == {layout.replica(index)}
        assert layout.replicas("cost") == 2 * layout.blocks


@st.composite
def expert_groups(draw: st.DrawFn) -> list[RankLayout]:
    """Layouts of all ranks whose blocks divide experts, with a model over all rows and one in the opposite order."""
    rows, expert = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    world = expert * draw(st.integers(1, 2)) * rows
    orders = {"actor": tuple(range(rows)), "critic": tuple(reversed(range(rows)))}
    pipelines = [Pipeline(name=name, model=name, stage_ranks=order, microbatches=2) for name, order in orders.items()]
    table = serial_table(pipelines)
    return [RankLayout(table, rank, world, expert=expert) for rank in range(world)]


@given(expert_groups())
def test_an_expert_group_holds_every_part_once_of_the_same_stages(layouts: list[RankLayout]) -> None:
    for layout in layouts:
        together = [layouts[rank] for rank in layout.expert_group]
        assert {other.expert_group for other in together} == {layout.expert_group}
        assert [other.expert_rank for other in together] == list(range(layout.expert))
        assert {(other.local, other.local_stages) for other in together} == {(layout.local, layout.local_stages)}


@given(expert_groups())
def test_a_part_of_experts_is_summed_among_all_who_hold_it_and_saved_by_one(layouts: list[RankLayout]) -> None:
    groups = layouts[0].groups()
    for layout in layouts:
        for key in layout.local_stages:
            same = layout.by_experts(*key)
            assert {layouts[rank].by_experts(*key) for rank in same} == {same}
            assert sum(layouts[rank].writes(*key) for rank in same) == 1
            assert {rank for other in layout.expert_group for rank in layouts[other].by_experts(*key)} == set(
                layout.holders(*key)
            )
            assert all(ranks in groups for ranks in (same, layout.holders(*key), layout.expert_group) if len(ranks) > 1)


@st.composite
def context_groups(draw: st.DrawFn) -> list[RankLayout]:
    """Layouts of all ranks whose blocks divide samples by position, and possibly experts too.

    One model is over all rows, one in the opposite order, and one has two copies in a block.
    """
    rows, context, expert = (
        draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4])),
    )  # fmt: skip
    world = context * expert * draw(st.integers(1, 2)) * rows
    orders = {"actor": tuple(range(rows)), "critic": tuple(reversed(range(rows)))}
    pipelines = [Pipeline(name=name, model=name, stage_ranks=order, microbatches=2) for name, order in orders.items()]
    pipelines += [Pipeline(name=f"cost-{n}", model="cost", stage_ranks=(0,), microbatches=1) for n in range(2)]
    table = serial_table(pipelines)
    return [RankLayout(table, rank, world, expert=expert, context=context) for rank in range(world)]


@given(context_groups())
def test_a_context_group_runs_the_same_rows_on_the_samples_of_one_copy(layouts: list[RankLayout]) -> None:
    groups = layouts[0].groups()
    for layout in layouts:
        together = [layouts[rank] for rank in layout.context_group]
        assert {other.context_group for other in together} == {layout.context_group}
        assert [other.context_rank for other in together] == list(range(layout.context))
        assert {(other.local, other.local_stages) for other in together} == {(layout.local, layout.local_stages)}
        assert len(together) == 1 or layout.context_group in groups
        for index, pipeline in enumerate(layout.table.pipelines):
            assert {other.replica(index) for other in together} == {layout.replica(index)}
            assert [other.speaks(pipeline.model) for other in together].count(True) == 1
            assert layout.replica(index) < layout.replicas(pipeline.model)


@given(context_groups())
def test_every_replica_is_run_by_one_context_group(layouts: list[RankLayout]) -> None:
    for model in layouts[0].models:
        groups: dict[int, set[tuple[int, ...]]] = {}
        for layout in layouts:
            for index in layout.pipelines(model):
                if layout.runs(index, 0):
                    groups.setdefault(layout.replica(index), set()).add(layout.context_group)
        assert sorted(groups) == list(range(layouts[0].replicas(model))), "every share of the samples is run"
        assert all(len(found) == 1 for found in groups.values())


def test_blocks_that_are_no_multiple_of_a_group_are_refused_in_words() -> None:
    table: ScheduleTable = serial_table([Pipeline(name="a", model="actor", stage_ranks=(0,), microbatches=1)])
    with pytest.raises(ValueError, match="3 blocks of ranks are no multiple of 2 expert parallel ones"):
        RankLayout(table, 0, 3, expert=2)
    with pytest.raises(ValueError, match="3 blocks of ranks are no multiple of 2 context parallel ones"):
        RankLayout(table, 0, 3, context=2)


def test_a_group_that_is_no_multiple_is_refused_in_words() -> None:
    table: ScheduleTable = serial_table([Pipeline(name="a", model="actor", stage_ranks=(0, 1), microbatches=1)])
    with pytest.raises(ValueError, match="2 rows by 4 tensor parallel ranks each needs a multiple of 8 ranks"):
        RankLayout(table, 0, 4, 4)
