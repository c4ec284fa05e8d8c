"""Batches and their split: complete or rejected, every sample once, balanced, the same on every rank."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.training.training_ranks import PPO_FIELDS, make_batch, make_samples

from rlhf_api.job.groups import Optimizer
from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.serial import serial_table
from rlhf_planner.transformer_shape import stage_layers
from rlhf_workers.failures import WorkError
from rlhf_workers.training.batches.minibatches import epoch_order, mini_batches, split
from rlhf_workers.training.batches.training_batch import STALE_FIELD, batch_from, micro_batch
from rlhf_workers.training.optimizers.optimizer import Horizon, learning_rate
from rlhf_workers.training.parallel.rank_layout import RankLayout


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32))
def test_a_split_holds_every_sample_once_in_equal_micro_batches(
    replicas: int, microbatches: int, size: int, seed: int
) -> None:
    count = replicas * microbatches * size
    lengths = [int(n) for n in np.random.default_rng(seed).integers(1, 500, count)]
    dealt = split(range(count), lengths, replicas, microbatches)
    assert sorted(sample for replica in dealt for cell in replica for sample in cell) == list(range(count))
    assert [len(replica) for replica in dealt] == [microbatches] * replicas
    assert {len(cell) for replica in dealt for cell in replica} == {size}
    loads = [sum(size * max(lengths[s] for s in cell) for cell in replica) for replica in dealt]
    assert max(loads) - min(loads) <= size * max(lengths)  # no replica is ahead by more than one micro-batch


def test_samples_of_like_length_share_a_micro_batch() -> None:
    assert split(range(6), [5, 50, 6, 40, 7, 60], 1, 3) == [[[5, 1], [3, 4], [2, 0]]]


@given(st.integers(0, 2**53 - 1), st.integers(0, 1000), st.integers(0, 5))
def test_an_epoch_visits_every_sample_in_an_order_of_its_own(seed: int, iteration: int, epoch: int) -> None:
    order = epoch_order(seed, iteration, epoch, 64)
    assert sorted(order) == list(range(64))
    assert order == epoch_order(seed, iteration, epoch, 64)
    assert order != epoch_order(seed, iteration, epoch + 1, 64)
    assert [sample for batch in mini_batches(order, 16) for sample in batch] == order


def test_the_order_does_not_change_between_versions() -> None:
    """A checkpoint of an older version must be replayed in the same order: this list may never change."""
    assert epoch_order(7, 3, 1, 8) == [5, 1, 2, 3, 7, 6, 4, 0]


def test_sizes_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="miniBatchSize 5 does not divide the batch of 8"):
        mini_batches(range(8), 5)
    with pytest.raises(ValueError, match="8 samples does not divide into 3 replicas x 1"):
        split(range(8), [1] * 8, 3, 1)


def test_a_micro_batch_points_at_the_state_before_each_response_token() -> None:
    batch = make_batch(abstained=(2,))
    weights = {"actor": torch.rand(batch.responses.shape)}
    cut = micro_batch(batch, [4, 2, 0], weights)
    place = 0
    for row, sample in enumerate((4, 2, 0)):
        prompt, length = batch.prompts[sample], int(batch.response_lengths[sample])
        tokens = torch.cat([prompt, batch.responses[sample, :length]])
        assert torch.equal(cut.tokens[row, : len(tokens)], tokens)
        assert (cut.tokens[row, len(tokens) :] == 0).all()
        if sample == 2:
            continue
        for t in range(length):
            assert int(cut.positions[place]) == row * cut.tokens.shape[1] + len(prompt) - 1 + t
            assert int(cut.targets[place]) == int(tokens[len(prompt) + t])
            assert cut.weights["actor"][place] == weights["actor"][sample, t]
            assert cut.fields["values"][place] == batch.fields["values"][sample, t]
            assert int(cut.samples[place]) == row
            place += 1
    assert place == len(cut.positions)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 2**16))
def test_sums_by_sample_are_those_of_the_padded_rows(valid: list[bool], seed: int) -> None:
    batch = make_batch(abstained=tuple(row for row, trained in enumerate(valid) if not trained))
    rows = [int(row) for row in np.random.default_rng(seed).permutation(len(valid))]
    cut = micro_batch(batch, rows, {})
    values = cut.fields["values"].double().requires_grad_()
    sums = cut.sum_by_sample(values)
    expected = (batch.fields["values"].double() * batch.mask).sum(dim=1)[rows]
    assert torch.allclose(sums, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)
    (slope,) = torch.autograd.grad((sums * upstream).sum(), values)
    assert torch.equal(slope, upstream[cut.samples])


def change(samples: list[pb.TrainSample], damage: str) -> list[pb.TrainSample]:
    if damage == "lost":
        return samples[:-1]
    if damage == "twice":
        return [*samples[:-1], samples[0]]
    sample = samples[3]
    if damage == "field":
        del sample.fields["values"]
    elif damage == "short":
        sample.fields["values"].CopyFrom(pack(np.zeros(1, np.float32)))
    elif damage == "nan":
        sample.fields["reward"].CopyFrom(pack(np.array([np.nan], np.float32)))
    elif damage == "type":
        sample.fields["reward"].CopyFrom(pack(np.array([1.0])))
    else:
        sample.response.CopyFrom(pack(np.zeros(0, np.int32)))
    return samples


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("lost", "samples 0 to 7 once each, got 7"),
        ("twice", "samples 0 to 7 once each, got 8"),
        ("field", "sample 3 has no values; it has log_probabilities, reference_log_probabilities, reward"),
        ("short", r"sample 3: values is float32 \[1\], needs float32 \["),
        ("nan", "sample 3: reward holds a value that is not a finite number"),
        ("type", "sample 3: reward is float64"),
        ("empty", "sample 3: response is int32"),
    ],
)
def test_an_incomplete_batch_is_refused_never_filled_with_zeros(damage: str, message: str) -> None:
    with pytest.raises(WorkError, match=message) as caught:
        batch_from(change(make_samples(), damage), 8, PPO_FIELDS)
    assert caught.value.failure.reason == "BatchIncomplete"


def test_an_abstained_sample_needs_no_reward_and_is_masked() -> None:
    batch = batch_from(make_samples(abstained=(1,)), 8, PPO_FIELDS)
    assert not batch.valid[1]
    assert not batch.mask[1].any()
    assert batch.mask[0].sum() == batch.response_lengths[0]


def test_layers_are_spread_over_stages_without_a_gap() -> None:
    assert [list(stage_layers(7, 3, s)) for s in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    for layers in range(1, 20):
        for stages in range(1, layers + 1):
            cut = [stage_layers(layers, stages, stage) for stage in range(stages)]
            assert [number for part in cut for number in part] == list(range(layers))
            assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_the_learning_rate_warms_up_and_falls() -> None:
    fields = Optimizer(schedule="Linear", warmup_steps=2)
    rates = [learning_rate(fields, 1.0, step, Horizon(6)) for step in range(7)]
    assert rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = Optimizer(schedule="Cosine")
    assert [learning_rate(cosine, 2.0, step, Horizon(4)) for step in (0, 2, 4)] == pytest.approx([2.0, 1.0, 0.0])
    assert learning_rate(Optimizer(), 3.0, 10_000, Horizon(4)) == 3.0


@pytest.mark.parametrize("schedule", ["Linear", "Cosine"])
def test_the_learning_rate_falls_to_its_least(schedule: str) -> None:
    fields = Optimizer.model_validate({"schedule": schedule, "minLearningRateRatio": 0.1})
    rates = [learning_rate(fields, 2.0, step, Horizon(8)) for step in range(10)]
    assert rates[0] == 2.0
    assert rates == sorted(rates, reverse=True)
    assert rates[8:] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize("total", [6, 20, 1000])
@pytest.mark.parametrize("schedule", ["Linear", "Cosine"])
def test_another_number_of_iterations_bends_the_rate_and_never_makes_it_jump(schedule: str, total: int) -> None:
    fields = Optimizer.model_validate({"schedule": schedule, "warmupSteps": 2})
    before = Horizon(10)
    after = before.changed(total, 5, 2)
    assert learning_rate(fields, 1.0, 5, after) == pytest.approx(learning_rate(fields, 1.0, 5, before))
    rates = [learning_rate(fields, 1.0, step, after) for step in range(5, total + 1)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.0)
    assert all(rate > 0 for rate in rates[:-1])
    again = after.changed(total + 7, total - 1, 2)
    assert learning_rate(fields, 1.0, total - 1, again) == pytest.approx(rates[-2])


def test_a_change_during_warm_up_is_as_if_it_had_always_been() -> None:
    fields = Optimizer(schedule="Linear", warmup_steps=3)
    changed = Horizon(10).changed(20, 2, 3)
    assert [learning_rate(fields, 1.0, step, changed) for step in range(21)] == [
        learning_rate(fields, 1.0, step, Horizon(20)) for step in range(21)
    ]


def test_ranks_of_blocks_and_replicas() -> None:
    table = serial_table(
        [
            Pipeline(name="actor", model="actor", stage_ranks=(0, 1), microbatches=2),
            Pipeline(name="critic-0", model="critic", stage_ranks=(0,), microbatches=1),
            Pipeline(name="critic-1", model="critic", stage_ranks=(1,), microbatches=1),
        ]
    )
    layout = RankLayout(table, 3, 4)
    assert (layout.block, layout.blocks, layout.local_stages) == (1, 2, (("actor", 1), ("critic", 0)))
    assert layout.holders("actor", 1) == (1, 3)
    assert layout.holders("critic", 0) == (0, 1, 2, 3)
    assert layout.ends("actor") == ((0, 1), (2, 3))
    assert (layout.replicas("critic"), layout.replica(1), layout.replica(2)) == (4, 2, 3)
    assert [RankLayout(table, rank, 4).writes("critic", 0) for rank in range(4)] == [True, False, False, False]
    assert [RankLayout(table, rank, 4).publishes("critic", 0) for rank in range(4)] == [True, False, True, False]
    with pytest.raises(ValueError, match="a table of 2 rows needs a multiple of 2 ranks"):
        RankLayout(table, 0, 3)


def test_a_batch_says_which_responses_were_cut() -> None:
    samples = make_samples()
    for index, sample in enumerate(samples):
        sample.finish_reason = "length" if index in (2, 5) else "stop"
    assert batch_from(samples, 8, PPO_FIELDS).finished.tolist() == [index not in (2, 5) for index in range(8)]


def test_a_response_that_failed_has_not_finished_and_an_unknown_reason_is_refused() -> None:
    samples = make_samples(abstained=(3,))
    samples[3].response.CopyFrom(pack(np.empty(0, np.int32)))
    samples[3].fields.clear()
    assert not batch_from(samples, 8, PPO_FIELDS).finished[3]
    samples[4].finish_reason = ""
    assert batch_from(samples, 8, PPO_FIELDS).finished.tolist() == [index not in (3, 4) for index in range(8)]
    samples[4].finish_reason = "bored"
    with pytest.raises(WorkError, match="sample 4: finish_reason is 'bored', not one of stop, length"):
        batch_from(samples, 8, PPO_FIELDS)


def test_tokens_of_earlier_versions_are_told_apart_where_samples_are_carried() -> None:
    samples = make_samples()
    for sample in samples:
        count = sample.response.shape[0]
        spans = [(2, 1), (3, count - 1)] if sample.sample == 1 and count > 1 else [(3, count)]
        del sample.versions[:]
        sample.versions.extend(pb.VersionSpan(version=version, tokens=tokens) for version, tokens in spans)
    batch = batch_from(samples, len(samples), PPO_FIELDS, version=3)
    stale = batch.stale
    assert stale is not None
    assert stale.nonzero().tolist() == [[1, 0]]
    first = micro_batch(batch, [1, 0], {}).stale
    assert first is not None
    assert first.nonzero().tolist() == [[0]]
    assert STALE_FIELD not in batch_from(samples, len(samples), PPO_FIELDS).fields, "nobody asked"
    assert batch_from(samples, len(samples), PPO_FIELDS, version=2).stale is None, "none is older"
