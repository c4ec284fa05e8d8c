"""Sharded models on two and four ranks: gradients, losses and norms of plain PyTorch, and the same checkpoints.

The ranks are processes, as a process has one process group; a group computes the results of several tests once.
"""

import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.model_folders import models
from tests.support.training.fused_ranks import moments_of
from tests.support.training.gradient_comparison import assert_same_gradients
from tests.support.training.sharded_ranks import Order, ShardedRanks, launched, parallel, united, whole
from tests.support.training.training_ranks import (
    finish_folder,
    gradients_of,
    group_of_one,
    make_batch,
    make_job,
    run,
    serial,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""
FAMILIES = ("llama", "qwen2", "gemma2", "mixtral", "qwen3_moe")
"""Untied; tied with biases; tied with scaled embeddings and a cap on logits; experts; experts only in some layers."""
EVERY = [(family, tied) for family in models.ARCHITECTURES for tied in (True, False)]
"""Cases of loading, publishing and saving: every family, with a tied and with a separate head."""
SHARDS = (2, 4)
ABSTAINED = (0, 1, 2, 3)
"""Half of the batch: micro-batches without tokens."""
AGAIN = {"ppo": {"miniBatchSize": 8, "epochs": 2, "oldLogProbabilities": "Trainer", "criticWarmupIterations": 1}}
"""Settings with a forward-only pass before a training, and an iteration in which the actor is frozen."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: models.write_policy(root / family, family, seed=1) for family in FAMILIES}


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("every")
    named = {f"{family}-{'tied' if tied else 'untied'}": (family, tied) for family, tied in EVERY}
    return {
        name: models.write_policy(root / name, family, seed=1, tie_word_embeddings=tied)
        for name, (family, tied) in named.items()
    }


@pytest.fixture(scope="module")
def saved(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a checkpoint of two pipeline stages with tensor groups of two ranks, of Megatron's layers, after an
    iteration.
    """
    folder = tmp_path_factory.mktemp("whole") / "checkpoint"
    with group_of_one():
        run(in_tensor_groups(folders), range(1), pipeline=2, save=folder)
        finish_folder(folder, folders["llama"])
        yield folder


@pytest.fixture(scope="module", params=SHARDS)
def ranks(
    request: pytest.FixtureRequest,
    folders: dict[str, Path],
    every: dict[str, Path],
    saved: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ShardedRanks]:
    """Yield a group that carries out the orders of all tests, and then trains until it is ended."""
    shard, root = request.param, tmp_path_factory.mktemp("ranks")

    def order(name: str, job: RLHFJob, **wanted: Any) -> Order:
        return Order(name, parallel(job, shard).model_dump_json(by_alias=True), **wanted)

    trained = job_of(folders)
    recomputed = job_of(folders, training={"activationCheckpointing": True})
    half = halved(folders["llama"])
    orders = [
        *(order(f"gradients-{family}", make_job(path, path), gradients=True) for family, path in folders.items()),
        *(order(f"packed-{family}", packed(path), gradients=True) for family, path in folders.items()),
        *(order(f"cut-{family}", cut(path, shard), gradients=True) for family, path in folders.items()),
        order("abstained", trained, gradients=True, abstained=ABSTAINED),
        order("recomputed", recomputed, gradients=True),
        order("half", half, gradients=True),
        *(order(f"initial-{name}", halved(path), save=str(root / f"initial-{name}")) for name, path in every.items()),
        order("trained", trained, after=2),
        order("offloaded", job_of(folders, training={"parallelism": {"offloadOptimizer": True}}), after=2),
        order("again", job_of(folders, algorithm=AGAIN), after=2),
        order("first", trained, after=1, save=str(root / "checkpoint")),
        order("restored", trained, first=1, after=1, restore=str(saved), save=str(root / "again")),
        order("resumed", trained, first=1, after=2, restore=str(root / "checkpoint")),
        order("begun", trained, after=1, waits=True),
        order("on", trained, after=100_000, silence=10.0),
    ]
    with launched(root, shard, orders) as group:
        yield group


def job_of(folders: dict[str, Path], **spec: Any) -> RLHFJob:
    return make_job(folders["llama"], folders["llama"], **spec)


def in_tensor_groups(folders: dict[str, Path]) -> RLHFJob:
    return job_of(folders, training={"backend": "megatron", "parallelism": {"pipeline": 2, "tensor": 2}})


def halved(folder: Path) -> RLHFJob:
    return make_job(folder, folder, training={"precision": "BFloat16"})


def packed(folder: Path) -> RLHFJob:
    return make_job(folder, folder, training={"packing": True})


def cut(folder: Path, context: int) -> RLHFJob:
    """Return a job with packed samples that all ranks share by position."""
    return make_job(folder, folder, training={"packing": True, "parallelism": {"context": context}})


def assert_same_bits(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_gradients_are_those_of_a_rank_that_holds_everything(ranks: ShardedRanks, folders: dict[str, Path]) -> None:
    for family, path in folders.items():
        job = make_job(path, path)
        expected = gradients_of(job, serial(job, 1, 1), 1, make_batch())
        assert_same_gradients(whole(ranks.reports(f"gradients-{family}"), "gradients"), expected, TOLERANCE)
    job = job_of(folders)
    expected = gradients_of(job, serial(job, 1, 1), 1, make_batch())
    assert_same_gradients(whole(ranks.reports("recomputed"), "gradients"), expected, TOLERANCE)
    expected = gradients_of(job, serial(job, 1, 1), 1, make_batch(abstained=ABSTAINED))
    assert_same_gradients(whole(ranks.reports("abstained"), "gradients"), expected, TOLERANCE)


def test_packed_rows_have_the_gradients_of_padded_ones_also_shared_by_position(
    ranks: ShardedRanks, folders: dict[str, Path]
) -> None:
    for family, path in folders.items():
        job = make_job(path, path)
        expected = gradients_of(job, serial(job, 1, 1), 1, make_batch())
        for name in (f"packed-{family}", f"cut-{family}"):
            assert_same_gradients(whole(ranks.reports(name), "gradients"), expected, TOLERANCE)


def test_half_precision_rounds_no_more_than_a_rank_that_holds_everything(
    ranks: ShardedRanks, folders: dict[str, Path]
) -> None:
    job, half = job_of(folders), job_of(folders, training={"precision": "BFloat16"})
    exact = gradients_of(job, serial(job, 1, 1), 1, make_batch())

    def error(rounded: Mapping[str, torch.Tensor]) -> float:
        wrong = sum(float((rounded[name] - value).square().sum()) for name, value in exact.items())
        return math.sqrt(wrong / sum(float(value.square().sum()) for value in exact.values()))

    theirs = error(gradients_of(half, serial(half, 1, 1), 1, make_batch()))
    assert 0 < error(whole(ranks.reports("half"), "gradients")) < 2 * theirs < 0.5


def test_losses_norms_and_weights_are_those_of_a_rank_that_holds_everything(
    ranks: ShardedRanks, folders: dict[str, Path]
) -> None:
    trainers, metrics, _ = run(job_of(folders), range(2), pipeline=1)
    ours = ranks.reports("trained")
    assert all(report["metrics"] == ours[0]["metrics"] for report in ours), "ranks report different metrics"
    for got, expected in zip(ours[0]["metrics"], metrics, strict=True):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-5)
    sizes = [name for name in metrics[0] if name.startswith("gradient_norm/") or name.endswith("/loss")]
    assert len(sizes) == 4, "of actor and critic"
    for got in sizes:
        assert ours[0]["metrics"][0][got] == pytest.approx(metrics[0][got], rel=TOLERANCE, abs=1e-6), got
    weights = weights_of(trainers)
    published = united(ours, "published")
    assert published.keys() == weights.keys()
    rate = 1e-2  # a step of AdamW has this size for any gradient: rounding decides it where the gradient is about zero
    for name, value in weights.items():
        assert float((published[name] - value).abs().mean()) <= 1e-3 * rate, name


def test_passes_of_forwards_alone_and_a_held_actor_train_what_a_rank_that_holds_everything_trains(
    ranks: ShardedRanks, folders: dict[str, Path]
) -> None:
    ours = ranks.reports("again")
    _, metrics, _ = run(job_of(folders, algorithm=AGAIN), range(2), pipeline=1)
    assert all(report["metrics"] == ours[0]["metrics"] for report in ours), "ranks report different metrics"
    for got, expected in zip(ours[0]["metrics"], metrics, strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_what_was_loaded_is_published_and_saved_bit_by_bit_and_by_one_rank_each(
    ranks: ShardedRanks, every: dict[str, Path]
) -> None:
    for family, path in every.items():
        source = load_file(path / "model.safetensors")
        assert ("lm_head.weight" in source) == family.endswith("-untied")
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        parameters = {name: value.detach() for name, value in model.named_parameters()}
        published = united(ranks.reports(f"initial-{family}"), "published")
        assert {name.removeprefix("actor:") for name in published if name.startswith("actor:")} == parameters.keys()
        for name, value in parameters.items():
            assert torch.equal(published[f"actor:{name}"].view(torch.int16), value.bfloat16().view(torch.int16)), name
        parts = [load_file(file) for file in (ranks.folder / f"initial-{family}" / "actor").glob("*.safetensors")]
        assert sum(map(len, parts)) == len(source)
        assert_same_bits({name: value for part in parts for name, value in part.items()}, source)
    found = ranks.reports("initial-llama-untied")
    published = united(found, "published")
    sizes = [sum(value.numel() for value in report["published"].values()) for report in found]
    largest = max(value.numel() for value in published.values())
    assert max(sizes) - min(sizes) <= 2 * largest, "one rank keeps more than its share"


def test_a_checkpoint_goes_from_tensor_groups_to_parts_and_back_bit_by_bit(
    ranks: ShardedRanks, folders: dict[str, Path], saved: Path, tmp_path: Path
) -> None:
    """Go from Megatron's layers, tensor 2 x pipeline 2, to sharded models of torch; then whole, and back."""
    root = ranks.folder
    expected, _, _ = run(job_of(folders), range(1, 1), pipeline=1, restore=str(saved))
    assert_same_bits(united(ranks.reports("restored"), "published"), weights_of(expected))
    assert_same_bits(whole(ranks.reports("restored"), "moments"), moments_of(expected))
    again, _, _ = run(job_of(folders), range(1, 1), pipeline=1, restore=str(root / "again"))
    assert_same_bits(weights_of(again), weights_of(expected))
    assert_same_bits(moments_of(again), moments_of(expected))
    assert again[0].progress == expected[0].progress
    back, _, _ = run(in_tensor_groups(folders), range(1, 1), restore=str(root / "again"), save=tmp_path)
    assert_same_bits(weights_of(back), weights_of(expected))
    finish_folder(tmp_path, folders["llama"])
    whole_again, _, _ = run(job_of(folders), range(1, 1), pipeline=1, restore=str(tmp_path))
    assert_same_bits(moments_of(whole_again), moments_of(expected))


def test_a_group_that_comes_back_trains_the_bits_of_one_that_was_not_lost(ranks: ShardedRanks) -> None:
    for part in ("published", "moments"):
        for straight, resumed in zip(ranks.reports("trained"), ranks.reports("resumed"), strict=True):
            assert_same_bits(resumed[part], straight[part])
    assert ranks.reports("resumed")[0]["metrics"] == ranks.reports("trained")[0]["metrics"][1:]


def test_moments_in_host_memory_train_the_bits_of_moments_on_the_device(ranks: ShardedRanks) -> None:
    for part in ("published", "moments"):
        for resident, offloaded in zip(ranks.reports("trained"), ranks.reports("offloaded"), strict=True):
            assert_same_bits(offloaded[part], resident[part])
    for resident, offloaded in zip(
        ranks.reports("trained")[0]["metrics"], ranks.reports("offloaded")[0]["metrics"], strict=True
    ):
        assert offloaded.pop("train/host_optimizer_bytes") > 0
        assert offloaded == resident


def test_rows_of_moments_that_are_missing_are_named(
    ranks: ShardedRanks, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for part in ranks.folder.joinpath("checkpoint").iterdir():
        (folder / part.name).symlink_to(part) if part.name != "optimizer" else None
    (folder / "optimizer").mkdir()
    for part in ranks.folder.joinpath("checkpoint", "optimizer").iterdir():
        if "shard-00001" not in part.name:
            (folder / "optimizer" / part.name).symlink_to(part)
    with pytest.raises(WorkError, match=r"exp_avg\.rows-\d+-.* is missing from actor-stage-00000-shard-00000"):
        run(job_of(folders), range(1, 1), pipeline=1, restore=str(folder))


def test_ranks_of_a_lost_or_silent_one_end_and_ask_to_be_started_again(ranks: ShardedRanks) -> None:
    """Kill or stop rank 1 in the last test of a group, while all train: no other rank waits forever."""
    ranks.go_on()
    ranks.reports("begun")
    how = signal.SIGSTOP if ranks.world == SHARDS[0] else signal.SIGKILL
    os.kill(ranks.pids[1], how)
    ended = ranks.ended(ranks.world if how == signal.SIGKILL else ranks.world - 1)
    ended.pop(1, None)
    assert ended == {rank: int(ExitCode.RESTART) for rank in range(ranks.world) if rank != 1}
