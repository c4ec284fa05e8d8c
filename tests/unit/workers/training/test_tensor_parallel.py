"""Stages divided over tensor groups: gradients, norms, checkpoints and schedules equal those of one rank."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.model_folders import models
from tests.support.training.fused_ranks import assert_fused_and_split_train_the_bits_of_serial, fused_job
from tests.support.training.gradient_comparison import assert_same_gradients
from tests.support.training.tensor_ranks import HEADS, critic_of, whole_moments, write_critic
from tests.support.training.training_ranks import (
    TWO_EPOCHS,
    Alone,
    ThreadCommunicator,
    assert_bitwise,
    exhaust,
    finish_folder,
    gradients_of,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.checkpoints import checkpoint
from rlhf_workers.training.communication.communicator import PeerLostError
from rlhf_workers.training.parallel.tensor_parts import ENDINGS
from rlhf_workers.training.schedule.step_timing import measure
from rlhf_workers.training.trainer import Trainer

TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""
SCORED: dict[str, Any] = {"ppo": {"miniBatchSize": 8, "oldLogProbabilities": "Trainer"}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
}

pytestmark = pytest.mark.usefixtures("megatron_group")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family, changes in MODELS.items():
        write_critic(models.write_policy(root / family, family, seed=1, **HEADS, **changes))
    return {family: root / family for family in MODELS}


def job_of(policy: Path, tensor: int = 1, sequence: str = "Disabled", **spec: Any) -> RLHFJob:
    parallelism = {"tensor": tensor, "sequenceParallel": sequence}
    training = {"backend": "megatron", "parallelism": parallelism, **spec.pop("training", {})}
    return make_job(policy, critic_of(policy), training=training, **spec)


def both(folder: Path, tensor: int, **training: Any) -> tuple[RLHFJob, RLHFJob]:
    """Return the same job divided by Megatron, and whole by PyTorch."""
    return job_of(folder, tensor, training=training), job_of(folder, training={"backend": "torch", **training})


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "data"),
    [("llama", tensor, pipeline, data) for tensor in (1, 2, 4) for pipeline in (1, 2, 4) for data in (1, 2)]
    + [("qwen3", 2, pipeline, data) for pipeline in (1, 2) for data in (1, 2)]
    + [("qwen2", 2, 2, 1), ("qwen3", 4, 2, 1)],
)
def test_gradients_are_those_of_one_rank(
    family: str, tensor: int, pipeline: int, data: int, folders: dict[str, Path]
) -> None:
    ours, theirs = both(folders[family], tensor)
    batch = make_batch(abstained=(3,))
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    assert all(value.any() for name, value in expected.items() if name.startswith("critic:model.layers"))
    got = gradients_of(ours, serial(ours, pipeline, data), pipeline * data * tensor, batch)
    assert_same_gradients(got, expected, TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline"), [("llama", 2, 1), ("llama", 4, 2), ("qwen3", 2, 2), ("qwen2", 2, 2)]
)
def test_states_divided_by_position_change_no_gradient(
    family: str, tensor: int, pipeline: int, folders: dict[str, Path]
) -> None:
    """Includes rows whose lengths the ranks do not divide; this backend rejects packed ones."""
    ours, whole = job_of(folders[family], tensor, "Enabled"), job_of(folders[family], tensor)
    theirs, batch = job_of(folders[family], training={"backend": "torch"}), make_batch(abstained=(3,))
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    got = gradients_of(ours, serial(ours, pipeline, 1), pipeline * tensor, batch)
    assert_same_gradients(got, expected, TOLERANCE)
    assert_same_gradients(got, gradients_of(whole, serial(whole, pipeline, 1), pipeline * tensor, batch), TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_response_with_the_token_of_padding_trains_its_row_no_more_than_transformers_does(
    tensor: int, family: str, folders: dict[str, Path]
) -> None:
    """A policy may draw it like any other token; transformers freezes this row of the embedding, which is zero."""
    ours, theirs = both(folders[family], tensor)
    batch = make_batch()
    responses = batch.responses.clone()
    responses[:, 1] = json.loads((folders[family] / "config.json").read_text())["pad_token_id"]
    drawn = replace(batch, responses=responses)
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, drawn)
    assert_same_gradients(gradients_of(ours, serial(ours, 1, 1), tensor, drawn), expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("sequence", ["Disabled", "Enabled"])
def test_recomputation_and_fused_kernels_change_no_gradient(sequence: str, folders: dict[str, Path]) -> None:
    batch = make_batch()
    recomputed = job_of(folders["qwen2"], 2, sequence, training={"activationCheckpointing": True})
    theirs = job_of(folders["qwen2"], training={"backend": "torch", "activationCheckpointing": True})
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    assert_same_gradients(gradients_of(recomputed, serial(theirs, 2, 1), 4, batch), expected, TOLERANCE)
    fused = job_of(folders["qwen2"], 2, sequence, deterministic=False)
    assert_same_gradients(gradients_of(fused, serial(fused, 1, 1), 2, batch), expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "algorithm", "sequence"),
    [(2, 2, 1, TWO_EPOCHS, "Disabled"), (2, 1, 2, SCORED, "Disabled"), (2, 1, 2, SCORED, "Enabled")],
)
def test_losses_and_norms_are_those_of_one_rank(
    tensor: int, pipeline: int, data: int, algorithm: dict[str, Any], sequence: str, folders: dict[str, Path]
) -> None:
    """Replicated parameters, and samples that all ranks of a group see, count once."""
    ours = job_of(folders["qwen3"], tensor, sequence, training={"microBatchSize": 1}, algorithm=algorithm)
    theirs = job_of(folders["qwen3"], training={"microBatchSize": 1, "backend": "torch"}, algorithm=algorithm)
    _, metrics, _ = run(ours, range(1), pipeline, data)
    _, expected, _ = run(theirs, range(1), 1, 1)
    assert metrics[0].keys() == expected[0].keys()
    assert metrics[0] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    if "oldLogProbabilities" in algorithm["ppo"]:
        sizes = [name for name in expected[0] if name.startswith("gradient_norm/") or name.endswith("/loss")]
        assert len(sizes) == 4, "of actor and critic"
        for name in sizes:
            assert metrics[0][name] == pytest.approx(expected[0][name], rel=TOLERANCE, abs=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "sequence"),
    [
        *((*sizes, "Disabled") for sizes in ((2, 2, 1), (4, 2, 1), (2, 4, 1), (2, 2, 2), (1, 4, 2))),
        (2, 2, 1, "Enabled"),
    ],
)
def test_fused_and_split_train_the_same_bits_as_serial(
    tensor: int, pipeline: int, data: int, sequence: str, tmp_path: Path
) -> None:
    body = fused_job(tmp_path, key_value_heads=4).model_dump(by_alias=True, exclude_unset=True)
    parallelism = {"tensor": tensor, "sequenceParallel": sequence}
    body["spec"]["training"] |= {"backend": "megatron", "parallelism": parallelism}
    assert_fused_and_split_train_the_bits_of_serial(RLHFJob.model_validate(body), pipeline, data)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_was_loaded_is_published_and_saved_bit_by_bit(
    family: str, tensor: int, tied: bool, tmp_path: Path
) -> None:
    """The ranks of the first replica publish every tensor whole, one rank each; other replicas publish none."""
    policy = models.write_policy(tmp_path / family, family, seed=1, **HEADS, tie_word_embeddings=tied)
    write_critic(policy)
    job, _ = both(policy, tensor, precision="BFloat16")
    source = load_file(policy / "model.safetensors")
    assert ("lm_head.weight" in source) != tied
    trainers = on_ranks(2 * tensor, lambda rank, peers: trainer_of(job, serial(job, 1, 2), rank, 2 * tensor, peers))
    found = [dict(TorchBackend(trainer).published("actor")) for trainer in trainers]
    assert sum(map(len, found)) == len(source)
    assert not any(found[tensor:])
    sizes = [sum(value.numel() for value in tensors.values()) for tensors in found[:tensor]]
    assert max(sizes) - min(sizes) <= max(value.numel() for value in source.values())
    published = {name: value for tensors in found for name, value in tensors.items()}
    written = [file.path for trainer in trainers for file in TorchBackend(trainer).save(tmp_path, 1)]
    assert len(written) == len(set(written)), "two ranks wrote one file"
    saved = {
        name: value for file in (tmp_path / "actor").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert saved.keys() == published.keys() == source.keys()
    for name, value in source.items():
        assert torch.equal(saved[name].view(torch.int32), value.view(torch.int32)), name
        assert torch.equal(published[name].view(torch.int16), value.bfloat16().view(torch.int16)), name


@pytest.mark.full
@pytest.mark.parametrize("family", MODELS)
def test_a_checkpoint_is_read_by_every_layout_bit_by_bit(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Tensor 2 x pipeline 2, then one rank, pipelines, other tensor groups, the backend torch, and back."""
    path = folders[family]
    start, plain = both(path, 2)
    trained, _, _ = run(start, range(1), pipeline=2, save=tmp_path / "0")
    finish_folder(tmp_path / "0", path, critic_of(path))
    weights, moments = weights_of(trained), whole_moments(tmp_path / "0")
    assert any(value.any() for value in moments.values())
    whole, quarter = both(path, 1)[0], both(path, 4)[0]
    layouts = [(whole, 4, 1), (quarter, 1, 1), (plain, 1, 1), (start, 1, 2), (whole, 1, 1), (start, 2, 1)]
    for number, (job, pipeline, data) in enumerate(layouts, 1):
        folder = tmp_path / str(number)
        read, _, _ = run(job, range(1, 1), pipeline, data, restore=str(tmp_path / str(number - 1)), save=folder)
        finish_folder(folder, path, critic_of(path))
        for ours, theirs in ((weights_of(read), weights), (whole_moments(folder), moments)):
            assert ours.keys() == theirs.keys()
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.full
def test_a_group_that_comes_back_trains_the_bits_of_one_that_was_not_lost(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    job, _ = both(folders["qwen3"], 2)
    run(job, range(1), 1, 2, save=tmp_path)
    finish_folder(tmp_path, folders["qwen3"], critic_of(folders["qwen3"]))
    resumed, again, _ = run(job, range(1, 2), 1, 2, restore=str(tmp_path))
    straight, metrics, _ = run(job, range(2), 1, 2)
    assert_bitwise(resumed, straight)
    assert again == metrics[1:]


def test_a_part_of_a_moment_that_is_missing_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    job, plain = both(folders["llama"], 2)
    run(job, range(1), 1, save=tmp_path)
    finish_folder(tmp_path, folders["llama"], critic_of(folders["llama"]))
    (tmp_path / "optimizer" / "actor-stage-00000-tensor-00001.safetensors").unlink()
    with pytest.raises(WorkError, match=r"exp_avg\.(rows|columns)-\d+- is missing from actor-stage-00000-tensor-00000"):
        run(plain, range(1, 1), 1, restore=str(tmp_path))


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(folders: dict[str, Path]) -> None:
    path = folders["llama"]
    training = {"backend": "megatron", "parallelism": {"tensor": 2}}
    job = make_job(path, training=training, algorithm={"grpo": {"miniBatchSize": 4, "groupSize": 4}})
    log_p = make_batch().fields["log_probabilities"].clone()
    log_p[0, 0] = float("nan")

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, dict[str, float]]:
        trainer = trainer_of(job, serial(job, 1, 1, models=("actor",)), rank, 2, peers)
        return trainer, exhaust(trainer.train(0, make_batch().with_fields(log_probabilities=log_p)))

    results = on_ranks(2, work)
    assert [metrics["train/nonfinite_steps"] for _, metrics in results] == [1, 1]
    assert [trainer.progress.steps for trainer, _ in results] == [1, 1]
    weights_of([trainer for trainer, _ in results])


class GoneAfter(Alone):
    """A group whose other ranks are lost after this many reductions and gathers."""

    def __init__(self, sums: int) -> None:
        self.left = sums

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._count(ranks)

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._count(ranks)
        whole.copy_(torch.cat([own] * len(ranks)))

    def reduce_scatter_sum(self, own: torch.Tensor, whole: torch.Tensor, ranks: tuple[int, ...]) -> None:
        self._count(ranks)
        own.copy_(whole.chunk(len(ranks))[0])

    def _count(self, ranks: tuple[int, ...]) -> None:
        self.left -= 1
        if self.left < 0:
            raise PeerLostError(f"ranks {', '.join(map(str, ranks))} to join a reduction", RuntimeError("gone"), rank=0)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("sums", "kind", "sequence"),
    [(3, "F", "Disabled"), (12, "B", "Disabled"), (3, "F", "Enabled"), (24, "B", "Enabled")],
)
def test_a_lost_rank_of_the_group_is_named_with_the_step_that_waited(
    sums: int, kind: str, sequence: str, folders: dict[str, Path]
) -> None:
    """In a forward, and inside a backward."""
    job = job_of(folders["llama"], 2, sequence)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 2, GoneAfter(sums))
    with pytest.raises(
        PeerLostError, match=rf"waiting for ranks 0, 1 to join .* step \d+ of its schedule row, {kind} of"
    ):
        next(trainer.train(0, make_batch()))


@pytest.mark.full
def test_measuring_takes_all_ranks_of_a_group_and_changes_no_weight(folders: dict[str, Path]) -> None:
    job, _ = both(folders["llama"], 2)
    table = serial(job, 2, 1)

    def work(rank: int, peers: ThreadCommunicator) -> tuple[Trainer, pb.MeasureResult]:
        trainer = trainer_of(job, table, rank, 4, peers)
        result = exhaust(measure(trainer, pb.Measure(measurement_id=1)))
        exhaust(measure(trainer, pb.Measure(measurement_id=2, schedules=[table.model_dump_json()], rounds=1)))
        return trainer, result

    results = on_ranks(4, work)
    for trainer, result in results:
        assert {(cost.model, cost.stage) for cost in result.stages} == set(trainer.layout.local_stages)
        assert [(transfer.rank, transfer.peer) for transfer in result.transfers] == [(0, 1)]
    before = on_ranks(4, lambda rank, peers: trainer_of(job, table, rank, 4, peers))
    assert_bitwise([trainer for trainer, _ in results], before)


@pytest.mark.parametrize(
    ("changes", "tensor", "says"),
    [
        ({}, 4, "4: the model of spec.models.actor.path has 2 key-value heads, which do not divide by 4: use 2"),
        (
            {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3},
            2,
            "has 3 attention heads and 3 key-value heads.*: use 1",
        ),
        ({"intermediate_size": 63}, 2, "has 63 columns of its feed-forward layers"),
    ],
)
def test_heads_that_do_not_divide_are_refused(changes: dict[str, Any], tensor: int, says: str, tmp_path: Path) -> None:
    job = job_of(models.write_policy(tmp_path / "model", "llama", **changes), tensor)
    with pytest.raises(WorkError, match=says) as caught:
        on_ranks(tensor, lambda rank, peers: trainer_of(job, serial(job, 1, 1), rank, tensor, peers))
    assert caught.value.failure.field == "spec.training.parallelism.tensor"


def test_files_of_moments_say_which_rows_and_columns_they_have(folders: dict[str, Path], tmp_path: Path) -> None:
    job, _ = both(folders["llama"], 2)
    on_ranks(2, lambda rank, peers: checkpoint.save(trainer_of(job, serial(job, 1, 1), rank, 2, peers), tmp_path, 1))
    names = [set(load_file(file)) for file in sorted((tmp_path / "optimizer").glob("actor-*"))]
    layer = "model.layers.0"
    assert {
        f"{layer}.self_attn.q_proj.weight.exp_avg{ENDINGS[0]}0-32",
        f"{layer}.self_attn.o_proj.weight.exp_avg{ENDINGS[1]}0-32",
        f"{layer}.mlp.gate_proj.weight.exp_avg{ENDINGS[0]}0-32",
        f"{layer}.input_layernorm.weight.exp_avg",
    } <= names[0]
    assert f"{layer}.mlp.down_proj.weight.exp_avg_sq{ENDINGS[1]}32-64" in names[1]
    assert not names[0] & names[1]


@pytest.mark.full
def test_half_precision_rounds_no_more_than_one_rank(folders: dict[str, Path]) -> None:
    batch = make_batch()
    ours, theirs = both(folders["qwen3"], 2, precision="BFloat16")
    _, plain = both(folders["qwen3"], 1)
    exact = gradients_of(plain, serial(plain, 1, 1), 1, batch)

    def error(job: RLHFJob, pipeline: int, world: int) -> float:
        """Return the relative error of all gradients together."""
        rounded = gradients_of(job, serial(job, pipeline, 1), world, batch)
        wrong = sum(float((rounded[name] - value).square().sum()) for name, value in exact.items())
        return math.sqrt(wrong / sum(float(value.square().sum()) for value in exact.values()))

    assert 0 < error(ours, 2, 4) < 2 * error(theirs, 1, 1) < 0.5
