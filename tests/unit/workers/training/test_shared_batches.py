"""The split of mini-batches with shared prompts, the places of tokens in a row, and the choice of `Auto`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training.training_ranks import make_batch, make_job, serial

from rlhf_planner.training_flops import LEAST_SHARING_GAIN, active_parameters, attention_width, training_flops
from rlhf_planner.transformer_shape import Experts, TransformerShape
from rlhf_workers.training.batches.micro_batch_splitter import MicroBatchSplitter, ModelOperations
from rlhf_workers.training.batches.packed_batches import packed_split
from rlhf_workers.training.batches.packed_rows import PromptTable, RowSegment, packed_row
from rlhf_workers.training.batches.padding import Padding
from rlhf_workers.training.batches.shared_batches import shared_split
from rlhf_workers.training.batches.token_budget import MicroBatchPlan
from rlhf_workers.training.batches.training_batch import TrainingBatch, micro_batch
from rlhf_workers.training.parallel.rank_layout import RankLayout

WHOLE = make_batch()
SEVEN_BILLION = TransformerShape(
    "llama", hidden=4096, layers=32, heads=32, key_value_heads=32, head_width=128, intermediate=11008,
    vocabulary=32000, tied=False,
)  # fmt: skip


@st.composite
def mini_batches(draw: st.DrawFn) -> tuple[list[int], PromptTable, int, int, int, int | None]:
    """Return (lengths, prompts, replicas, micro-batches, samples together, most tokens)."""
    replicas, microbatches, together = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    size = replicas * microbatches * together * draw(st.integers(1, 6))
    of_prompts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=6))
    chosen = draw(st.lists(st.integers(0, len(of_prompts) - 1), min_size=size, max_size=size))
    numbers = [chosen.index(prompt) for prompt in chosen]
    lengths = [of_prompts[prompt] + draw(st.integers(0, 30)) for prompt in chosen]
    table = PromptTable(numbers, [of_prompts[prompt] for prompt in chosen])
    return lengths, table, replicas, microbatches, together, draw(st.none() | st.integers(1, 300))


@given(mini_batches())
def test_every_sample_is_in_one_micro_batch_within_the_bounds(
    mini_batch: tuple[list[int], PromptTable, int, int, int, int | None],
) -> None:
    lengths, prompts, replicas, microbatches, together, bound = mini_batch
    samples = list(range(len(lengths)))
    rows = shared_split(samples, lengths, prompts, replicas, microbatches, together, bound)
    cells = [cell for row in rows for cell in row]
    assert sorted(sample for cell in cells for sample in cell) == samples
    assert len(rows) == replicas
    assert len({len(row) for row in rows}) == 1
    assert all(0 < len(cell) <= len(samples) // (replicas * microbatches) for cell in cells)
    units = [cell[start : start + together] for cell in cells for start in range(0, len(cell), together)]
    assert all(unit == list(range(unit[0], unit[0] + together)) for unit in units)
    tokens = [sum(segment.tokens for segment in packed_row(cell, lengths, prompts)) for cell in cells]
    if bound is None:
        assert len(cells) == replicas * microbatches
    else:
        single = [samples[start : start + together] for start in range(0, len(samples), together)]
        longest = max(sum(segment.tokens for segment in packed_row(unit, lengths, prompts)) for unit in single)
        assert max(tokens) <= max(bound, longest)
    if together == 1:  # a micro-batch has every prompt once
        for cell, count in zip(cells, tokens, strict=True):
            of_prompts = {prompts.numbers[sample]: prompts.lengths[sample] for sample in cell}
            responses = sum(lengths[sample] - prompts.lengths[sample] for sample in cell)
            assert count == sum(of_prompts.values()) + responses


@given(
    st.lists(st.integers(2, 500), min_size=12, max_size=12),
    st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]),
    st.sampled_from([1, 2]),
    st.none() | st.integers(1, 2000),
)
def test_without_equal_prompts_the_split_is_that_of_packing(
    lengths: list[int], shape: tuple[int, int], together: int, bound: int | None
) -> None:
    if 12 // (shape[0] * shape[1]) % together:
        return
    samples, prompts = list(range(12)), PromptTable(list(range(12)), [1] * 12)
    ours = shared_split(samples, lengths, prompts, *shape, together, bound)
    theirs = packed_split(samples, lengths, *shape, together, bound)
    cells = [sorted(sorted(cell) for row in split for cell in row) for split in (ours, theirs)]
    assert cells[0] == cells[1]


def test_a_group_within_the_limits_is_never_parted() -> None:
    """Eight groups of four, in any order: no prompt is computed twice."""
    order = [int(sample) for sample in np.random.default_rng(3).permutation(32)]
    lengths = [100 + 7 * (sample // 4) + sample % 5 for sample in range(32)]
    prompts = PromptTable([sample // 4 * 4 for sample in range(32)], [100 + 7 * (sample // 4) for sample in range(32)])
    for bound in (None, 400):
        cells = [cell for row in shared_split(order, lengths, prompts, 2, 2, 1, bound) for cell in row]
        homes = [
            {number for number, cell in enumerate(cells) if {4 * group, 4 * group + 3} & set(cell)}
            for group in range(8)
        ]
        assert all(len(home) == 1 for home in homes)
        tokens = [sum(segment.tokens for segment in packed_row(cell, lengths, prompts)) for cell in cells]
        assert max(tokens) < 1.3 * min(tokens)


def test_a_group_above_the_bound_is_parted_and_every_part_has_the_prompt() -> None:
    prompts = PromptTable([0] * 16, [4096] * 16)
    cells = shared_split(range(16), [4096 + 512] * 16, prompts, 1, 1, 1, 4096 + 4 * 512)[0]
    assert [packed_row(cell, [4608] * 16, prompts) for cell in cells] == [(RowSegment(4096, (512,) * 4),)] * 4


@given(st.integers(0, 2**16), st.permutations(range(8)), st.integers(1, 8))
def test_a_shared_row_has_every_token_before_its_state(seed: int, order: list[int], count: int) -> None:
    """Also with tokens of an environment, which are not trained, at any place."""
    rng = np.random.default_rng(seed)
    of_prompts = [torch.from_numpy(rng.integers(3, 40, int(rng.integers(1, 7)))) for _ in range(3)]
    whole = make_batch(seed=seed)
    prompts = tuple(of_prompts[int(rng.integers(0, 3))] for _ in range(8))
    batch = replace(whole, prompts=prompts, mask=whole.mask & torch.from_numpy(rng.random(whole.mask.shape) < 0.7))
    cut = micro_batch(batch, order[:count], {}, packed=True, prompts=batch.prompt_table)
    tokens, place = cut.tokens[0], 0
    for number, sample in enumerate(order[:count]):
        prompt, length = batch.prompts[sample], int(batch.response_lengths[sample])
        trained = [t for t in range(length) if batch.mask[sample, t]]
        for t in trained:
            before = int(cut.positions[place])
            assert int(cut.targets[place]) == int(batch.responses[sample, t])
            assert int(tokens[before]) == int(torch.cat([prompt, batch.responses[sample]])[len(prompt) - 1 + t])
            assert int(cut.samples[place]) == number
            place += 1
        last = tokens[int(cut.last[number])]
        assert int(last) == int(batch.responses[sample, trained[-1]] if trained else prompt[0])
    assert place == len(cut.positions)
    assert cut.packed is not None
    assert len(tokens) == sum(segment.tokens for segment in cut.packed)


def test_prompts_share_only_if_all_tokens_are_equal() -> None:
    prompts = [torch.tensor(prompt) for prompt in ([5, 6], [5], [5, 6], [6, 5], [5])]
    assert PromptTable.from_prompts(prompts) == PromptTable([0, 1, 0, 3, 1], [2, 1, 2, 2, 1])


@pytest.mark.parametrize(
    ("prompt", "response", "group", "ratio"), [(4096, 512, 16, 5.8), (1024, 1024, 8, 1.8), (256, 1024, 8, 1.2)]
)
def test_operations_are_those_of_the_formula(prompt: int, response: int, group: int, ratio: float) -> None:
    """The formula of Prefix Grouper's saving (arXiv 2506.05433), for a group of a 7B model."""
    n, d, p, r, g = active_parameters(SEVEN_BILLION), attention_width(SEVEN_BILLION), prompt, response, group
    whole, shared = (
        training_flops(n, d, segment.tokens, segment.pairs) for segment in (RowSegment(p + r), RowSegment(p, (r,) * g))
    )
    assert whole * g == pytest.approx(6 * n * g * (p + r) + 12 * d * g * (p + r) ** 2 / 2)
    assert shared == pytest.approx(6 * n * (p + g * r) + 12 * d * (p**2 / 2 + g * (r * p + r**2 / 2)))
    assert whole * g / shared == pytest.approx(ratio, abs=0.1)
    assert n == pytest.approx(6.5e9, rel=0.01)


def test_a_token_uses_the_chosen_experts_and_the_router_of_a_routed_layer() -> None:
    experts = Experts(count=8, chosen=2, width=10, dense=frozenset({0}))
    shape = replace(SEVEN_BILLION, hidden=4, layers=3, heads=2, key_value_heads=1, head_width=2, intermediate=5)
    attention = 4 * (2 * 4 + 2 * 2)
    assert active_parameters(shape) == 3 * (attention + 3 * 4 * 5)
    routed = 4 * (3 * 2 * 10 + 8)
    assert active_parameters(replace(shape, experts=experts)) == 3 * attention + 60 + 2 * routed


def split_of(mode: str, batch: TrainingBatch, micro_batch_size: int) -> MicroBatchPlan:
    """Return the split of a batch of eight samples, for two models of a million parameters in layers."""
    job = make_job(
        Path("m"), Path("m"), training={"microBatchSize": micro_batch_size, "packing": True, "sharedPrompts": mode}
    )
    operations = {model: ModelOperations(1e6, 1e3) for model in ("actor", "critic")}
    layout = RankLayout(serial(job, 1, 1), 0, 1)
    return MicroBatchSplitter(job.spec, operations).split(layout, list(range(8)), batch)


def batch_of(prompt: int, response: int, group: int) -> TrainingBatch:
    """Return eight samples, `group` for each prompt."""
    tokens, lengths = torch.ones(8, response, dtype=torch.int64), torch.full((8,), response)
    prompts = tuple(torch.full((prompt,), sample // group) for sample in range(8))
    return replace(WHOLE, prompts=prompts, responses=tokens, response_lengths=lengths)


@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from([1, 2, 4]))
def test_auto_shares_from_a_tenth_of_the_operations_on(prompt: int, response: int, group: int) -> None:
    plan = split_of("Auto", batch_of(prompt, response, group), 4)
    segments = RowSegment(prompt + response), RowSegment(prompt, (response,) * group)
    whole, shared = (training_flops(1e6, 1e3, segment.tokens, segment.pairs) for segment in segments)
    assert (plan.prompts is not None) == (group > 1 and group * whole / shared >= LEAST_SHARING_GAIN)
    cells = [[sorted(cell) for cell in split_of(mode, WHOLE, 4).splits["actor"][0]] for mode in ("Auto", "Disabled")]
    assert cells[0] == cells[1]


@pytest.mark.parametrize(
    ("mode", "micro_batch_size", "spared"),
    [("Disabled", 4, None), ("Enabled", 4, 6), ("Auto", 4, 6), ("Enabled", 2, 4), ("Enabled", 1, 0), ("Auto", 1, 0)],
)
def test_metrics_count_a_shared_prompt_once_and_no_padding(
    mode: str, micro_batch_size: int, spared: int | None
) -> None:
    batch, metrics = batch_of(60, 20, 4), Padding(mode != "Disabled")
    plan = split_of(mode, batch, micro_batch_size)
    metrics.begin()
    metrics.add_mini_batch(plan, batch.lengths)
    found = metrics.metrics(("actor",), plan.layout)
    assert found["train/padding"] == 0.0
    assert found.get("train/shared_prompt_ratio") == (None if spared is None else 1 - spared * 60 / (8 * 80))
    shared = 20 * micro_batch_size + 60 if spared else 80 * micro_batch_size
    assert found["train/largest_micro_batch_tokens"] == shared
