"""Micro-batches of bounded tokens: every sample once, within every bound, as few as possible, with a table to run
them."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.methods import FUSED
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.batches.minibatches import split
from rlhf_workers.training.batches.padding import Padding
from rlhf_workers.training.batches.token_budget import bounded, padded_tokens, split_minibatch
from rlhf_workers.training.parallel.rank_layout import RankLayout


def long_tailed(count: int, seed: int = 0) -> list[int]:
    """Return lengths of which most are short and few are long."""
    return [int(n) for n in np.random.default_rng(seed).lognormal(5.0, 1.0, count).clip(1, 4096)]


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2000),
    st.integers(0, 2**32),
)
def test_every_sample_is_in_one_micro_batch_and_every_bound_holds(
    replicas: int, microbatches: int, units: int, together: int, most_tokens: int, seed: int
) -> None:
    count = replicas * microbatches * units * together
    lengths = [int(n) for n in np.random.default_rng(seed).integers(1, 500, count)]
    plan = bounded(split(range(count), lengths, replicas, microbatches, together), lengths, together, most_tokens)
    cells = [cell for replica in plan for cell in replica]
    assert sorted(sample for cell in cells for sample in cell) == list(range(count))
    assert len(plan) == replicas
    assert len({len(replica) for replica in plan}) == 1
    assert len(plan[0]) >= microbatches
    for cell in cells:
        assert 0 < len(cell) <= units * together
        assert padded_tokens(cell, lengths) <= max(most_tokens, together * max(lengths))
        for start in range(0, len(cell), together):
            assert cell[start] % together == 0
            assert cell[start : start + together] == list(range(cell[start], cell[start] + together))


def test_a_split_within_the_bound_stays_as_it_is() -> None:
    lengths = long_tailed(32)
    plan = split(range(32), lengths, 2, 4)
    assert bounded(plan, lengths, 1, max(padded_tokens(cell, lengths) for row in plan for cell in row)) is plan


def test_long_tailed_lengths_need_fewer_micro_batches_than_a_bound_of_samples_that_is_as_safe() -> None:
    """4,096 tokens is one sample of the longest: a limit of samples would allow only one each."""
    lengths = long_tailed(128)
    plan = bounded(split(range(128), lengths, 1, 2), lengths, 1, 4096)
    assert max(padded_tokens(cell, lengths) for cell in plan[0]) <= 4096
    assert len(plan[0]) < 16
    assert sum(padded_tokens(cell, lengths) for cell in plan[0]) < 1.6 * sum(lengths)


@given(st.lists(st.integers(1, 40), min_size=4, max_size=9), st.integers(40, 120))
def test_no_cut_of_the_samples_by_length_costs_less(lengths: list[int], bound: int) -> None:
    """Padded tokens plus a sixteenth of the bound per micro-batch; compared with every possible cut."""
    falling, count = sorted(lengths, reverse=True), len(lengths)
    cuts = [c for n in range(count) for c in combinations(range(1, count), n)]
    every = [[falling[a] * (b - a) for a, b in pairwise((0, *cut, count))] for cut in cuts]
    least = min(sum(sizes) + len(sizes) * bound / 16 for sizes in every if max(sizes) <= bound)
    plan = split(range(count), lengths, 1, 1)
    if padded_tokens(plan[0][0], lengths) > bound:
        sizes = [padded_tokens(cell, lengths) for cell in bounded(plan, lengths, 1, bound)[0]]
        assert sum(sizes) + len(sizes) * bound / 16 == least


def test_thousands_of_samples_are_cut_within_a_moment() -> None:
    """An additional search over numbers of micro-batches took seconds for every mini-batch."""
    lengths = long_tailed(8192)
    plan = bounded(split(range(8192), lengths, 4, 1), lengths, 1, 8192)
    assert {len(replica) for replica in plan} == {len(plan[0])}


def test_the_table_runs_as_many_micro_batches_as_there_are() -> None:
    pipelines = [Pipeline(name=m, model=m, stage_ranks=(0, 1), microbatches=2) for m in ("actor", "critic")]
    layout = RankLayout(serial_table(pipelines), 1, 4)
    lengths = long_tailed(16)
    assert split_minibatch(layout, list(range(16)), lengths, 1, None).layout is layout
    plan = split_minibatch(layout, list(range(16)), lengths, 1, max(lengths))
    count = len(plan.splits["actor"][0])
    assert count > 2
    assert plan.layout.table.pipelines == tuple(p.model_copy(update={"microbatches": count}) for p in pipelines)
    assert {action.microbatch for action in plan.layout.row} == set(range(count))
    assert (plan.layout.rank, plan.layout.world) == (1, 4)


def test_a_fused_table_is_not_made_longer() -> None:
    table = serial_table([Pipeline(name="actor", model="actor", stage_ranks=(0,), microbatches=2)])
    layout = RankLayout(table.model_copy(update={"method": FUSED}), 0, 1)
    with pytest.raises(ValueError, match=f"a table {FUSED} is for the micro-batches that it has"):
        layout.with_microbatches({"actor": 3})


def test_micro_batches_of_all_copies_are_counted() -> None:
    """So ranks report the same for any number of copies."""
    table = serial_table([Pipeline(name="actor", model="actor", stage_ranks=(0,), microbatches=2)])
    padding, layout = Padding(), RankLayout(table, 0, 2)
    padding.add_mini_batch(split_minibatch(layout, [0, 1, 2, 3], [2, 6, 8, 4], 1, None), [2, 6, 8, 4])
    assert padding.metrics(["actor"], layout)["train/micro_batches"] == 4.0


def test_padding_is_what_is_not_a_token() -> None:
    table = serial_table([Pipeline(name="actor", model="actor", stage_ranks=(0,), microbatches=2)])
    padding, layout = Padding(), RankLayout(table, 0, 1)
    assert padding.metrics(["actor"], layout) == {}
    padding.add_mini_batch(split_minibatch(layout, [0, 1, 2, 3], [2, 6, 8, 4], 1, None), [2, 6, 8, 4])
    assert padding.metrics(["actor"], layout) == {
        "train/padding": pytest.approx(1 - 20 / 24),
        "train/micro_batches": 2.0,
        "train/largest_micro_batch_tokens": 16.0,
    }
