"""Samples divided by position: gradients, metrics, schedules and checkpoints equal those of whole samples."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.model_folders import models
from tests.support.training.gradient_comparison import (
    OF_WHOLE_RESPONSES,
    algorithm_gradients,
    assert_same_gradients,
    relative_error,
)
from tests.support.training.training_ranks import (
    CPU,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    gradients_of,
    group_of_one,
    interleave,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    split_backward,
    trainer_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.schedule import Pipeline
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import serial_table
from rlhf_workers.training.parallel.context_group import ContextCut, ContextGroup, padded
from rlhf_workers.training.parallel.rank_layout import RankLayout
from rlhf_workers.training.schedule.step_timing import measure, slowest_seconds
from rlhf_workers.training.trainer import Trainer

TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""
FAMILIES = ("llama", "mistral", "gemma2", "qwen3", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    narrow = {"mistral": {"sliding_window": 5}, "gemma2": {"sliding_window": 6}}
    return {
        family: models.write_policy(root / family, family, seed=1, num_hidden_layers=2, **narrow.get(family, {}))
        for family in FAMILIES
    }


def job_of(folder: Path, context: int, **spec: Any) -> RLHFJob:
    """Return a job with actor and critic from one folder, whose samples are divided over this many ranks."""
    training = spec.pop("training", {})
    parallelism = {"context": context, **training.pop("parallelism", {})}
    return make_job(folder, folder, training={"microBatchSize": 2, "parallelism": parallelism, **training}, **spec)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("family", "context", "pipeline", "data", "training", "deterministic"),
    [
        ("llama", 2, 1, 1, {}, True),
        ("llama", 2, 1, 1, {}, False),
        ("qwen3", 4, 1, 1, {"packing": True}, False),
        ("mistral", 2, 2, 1, {"packing": True}, True),
        ("mistral", 4, 1, 1, {}, False),
        ("gemma2", 2, 1, 2, {"activationCheckpointing": True}, True),
        ("qwen3", 2, 2, 2, {"packing": True, "activationCheckpointing": True}, False),
        ("mixtral", 2, 1, 1, {"parallelism": {"expert": 2}}, True),
        ("mixtral", 2, 1, 2, {"packing": True, "parallelism": {"data": 2, "expert": 4}}, True),
        ("mixtral", 3, 1, 2, {"parallelism": {"data": 2, "expert": 2}}, True),
        ("mistral", 2, 2, 1, {"backend": "megatron"}, True),
        ("qwen3", 4, 1, 1, {"backend": "megatron", "activationCheckpointing": True}, False),
        ("llama", 2, 1, 1, {"backend": "megatron", "parallelism": {"tensor": 2}}, False),
        ("llama", 2, 1, 1, {"backend": "megatron", "parallelism": {"tensor": 2, "criticTensor": 1}}, True),
        ("mixtral", 2, 1, 2, {"backend": "megatron", "parallelism": {"data": 2, "expert": 2}}, True),
    ],
)
def test_gradients_are_those_of_one_rank(
    family: str,
    context: int,
    pipeline: int,
    data: int,
    training: dict[str, Any],
    deterministic: bool,
    folders: dict[str, Path],
) -> None:
    folder, batch = folders[family], make_batch(abstained=(3,))
    plain = make_job(folder, folder)
    expected = gradients_of(plain, serial(plain, 1, 1), 1, batch)
    job = job_of(folder, context, training=training, deterministic=deterministic)
    world = pipeline * data * context * job.spec.training.parallelism.tensor
    with group_of_one():  # Megatron asks for one where a tensor group has several ranks
        got = gradients_of(job, serial(job, pipeline, data), world, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("deterministic", "training"),
    [(True, {"packing": True}), (False, {"packing": True}), (True, {"backend": "megatron"})],
)
def test_fused_and_split_tables_have_the_bits_of_serial_ones_also_recomputed(
    deterministic: bool, training: dict[str, Any], folders: dict[str, Path]
) -> None:
    folder, batch = folders["mistral"], make_batch()
    job, recomputed = (
        job_of(folder, 2, training={"activationCheckpointing": again, **training}, deterministic=deterministic)
        for again in (False, True)
    )
    table = serial(job, 2, 1)
    fused = interleave(opposite(("actor", "critic"), 2, 4))
    expected = gradients_of(job, table, 4, batch)
    found = [gradients_of(job, other, 4, batch) for other in (fused, split_backward(fused))]
    for other in (*found, gradients_of(recomputed, split_backward(fused), 4, batch)):
        assert [name for name in expected if not torch.equal(other[name], expected[name])] == []


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("algorithm", OF_WHOLE_RESPONSES)
def test_objectives_of_whole_responses_and_of_pairs_have_the_gradients_of_whole_samples(
    algorithm: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pair: tuple[dict[str, Any], ...] = ({"parallelism": {"context": 2}}, {})
    found = [algorithm_gradients(algorithm, folders["qwen3"], tmp_path, 1, **training) for training in pair]
    assert any(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_half_precision_rounds_no_more_than_a_rank_with_whole_samples(family: str, folders: dict[str, Path]) -> None:
    folder, batch = folders[family], make_batch()
    plain = make_job(folder, folder)
    exact = gradients_of(plain, serial(plain, 1, 1), 1, batch)
    errors = []
    for context in (2, 1):
        job = job_of(folder, context, training={"precision": "BFloat16"}, deterministic=False)
        errors.append(relative_error(gradients_of(job, serial(job, 1, 1), context, batch), exact))
    assert 0 < errors[0] < 1.2 * errors[1]


def test_adapters_have_the_gradients_of_whole_samples(folders: dict[str, Path]) -> None:
    found = []
    for context in (2, 1):
        job = job_of(folders["llama"], context, training={"lora": {"rank": 4}})
        found.append(gradients_of(job, serial(job, 1, 1), context, make_batch()))
    assert any(gradient.any() for gradient in found[0].values())
    assert_same_gradients(found[0], found[1], TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("context", "training"),
    [(2, {"packing": True, "parallelism": {"shardOptimizer": True}}), (4, {"microBatchTokens": 20})],
)
def test_an_iteration_and_its_checkpoint_are_those_of_whole_samples(
    context: int, training: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    """Every token counts once, and log-probabilities before the first step equal those of one rank.

    Each layout continues from the other's checkpoint to the same weights except for rounding.
    """
    folder = folders["qwen3"]
    again = {"ppo": {"miniBatchSize": 4, "epochs": 2, "oldLogProbabilities": "Trainer"}}
    cut, whole = (job_of(folder, ranks, training=dict(training), algorithm=again) for ranks in (context, 1))
    trained, ours, _ = run(cut, range(1), 1, save=tmp_path / "cut")
    _, theirs, _ = run(whole, range(1), 1, save=tmp_path / "whole")
    assert ours[0].keys() == theirs[0].keys()
    unlike = {"train/padding", "train/largest_micro_batch_tokens"}  # a sample is a multiple of the chunks
    for name, value in theirs[0].items():
        assert name in unlike or ours[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert ours[0]["train/padding"] > theirs[0]["train/padding"]
    finish_folder(tmp_path / "cut", folder)
    read, _, _ = run(whole, range(1, 1), 1, restore=str(tmp_path / "cut"))
    assert_bitwise(read, trained[:1])


@pytest.mark.full
def test_measuring_changes_no_weight(folders: dict[str, Path]) -> None:
    job = job_of(folders["llama"], 2)
    table = serial(job, 2, 1)

    def work(rank: int, peers: ThreadCommunicator) -> Trainer:
        trainer = trainer_of(job, table, rank, 4, peers)
        measured = exhaust(measure(trainer, pb.Measure(measurement_id=1)))
        assert all(stage.forward > 0 and stage.weight_gradient > 0 for stage in measured.stages)
        return trainer

    before = on_ranks(4, lambda rank, peers: trainer_of(job, table, rank, 4, peers))
    assert_bitwise(on_ranks(4, work), before)


@pytest.mark.parametrize(("context", "expert"), [(1, 2), (2, 4), (3, 2), (4, 6)])
def test_ranks_that_wait_for_one_another_measure_equally_often(context: int, expert: int) -> None:
    """Also if groups overlap, so that some wait for each other through others between them."""
    world = math.lcm(context, expert)
    table = serial_table([Pipeline(name="actor", model="actor", stage_ranks=(0,), microbatches=1)])

    def work(rank: int, peers: ThreadCommunicator) -> float:
        layout = RankLayout(table, rank, world, expert=expert, context=context)
        timed: Any = SimpleNamespace(layout=layout, communicator=peers, device=CPU)
        return slowest_seconds(float(rank), timed, "actor")

    assert on_ranks(world, work) == [world - 1] * world


@given(
    context=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    rows=st.integers(1, 3),
    draw=st.data(),
)
def test_every_position_is_one_rank_s_and_all_ranks_have_as_many_keys_to_attend_to(
    context: int, lengths: list[int], rows: int, draw: st.DataObject
) -> None:
    groups = [ContextGroup(rank, tuple(range(context)), Alone()) for rank in range(context)]
    widths = [padded(length, groups[0].chunks) for length in lengths]
    assert all(0 <= width - length < groups[0].chunks for width, length in zip(widths, lengths, strict=True))
    cuts = [ContextCut.for_lengths(group, widths) for group in groups]
    assert sorted(torch.cat([cut.columns for cut in cuts]).tolist()) == list(range(sum(widths)))
    assert len({sum(chunk.length * (2 * chunk.start + chunk.length) for chunk in cut.own_chunks) for cut in cuts}) == 1
    row = torch.arange(sum(widths))
    joined = torch.cat([row[cut.columns] for cut in cuts])
    for cut in cuts:
        assert torch.equal(joined[cut.order], row)
        assert torch.equal(row[cut.back], joined)
        placed = [torch.arange(chunk.start, chunk.start + chunk.length) for chunk in cut.own_chunks]
        assert torch.equal(cut.positions, torch.cat(placed))
    flat = torch.arange(rows * sum(widths)).view(rows, -1)
    places = torch.tensor(draw.draw(st.lists(st.integers(0, flat.numel() - 1), max_size=8)), dtype=torch.int64)
    owned = [cut.own(places) for cut in cuts]
    assert sorted(torch.cat([own.mine for own in owned]).tolist()) == list(range(len(places)))
    for cut, own in zip(cuts, owned, strict=True):
        assert torch.equal(flat[:, cut.columns].flatten()[own.places], places[own.mine])


def test_a_sample_that_is_no_multiple_of_the_chunks_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="a sample of 6 positions is not cut into 4 equal chunks"):
        ContextCut.for_lengths(ContextGroup(0, (0, 1), Alone()), [8, 6])
