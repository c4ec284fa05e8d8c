"""Megatron's layers of experts: the whole model's logits and gradients, the folder's bytes, the same bits by any
table.

The oracles are transformers' own model, on one unpadded sample at a time for gradients, and the backend `torch`.
Tolerance: 1e-5 relative to the largest number of a tensor.
"""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.model_folders import models
from tests.support.training.fused_ranks import moments_of
from tests.support.training.gradient_comparison import assert_same_gradients, plain_gradients, relative_error
from tests.support.training.training_ranks import (
    CPU,
    assert_bitwise,
    finish_folder,
    gradients_of,
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
from rlhf_planner.schedule.methods import opposite
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.megatron.megatron_stage import TENSOR_FIELD, build_megatron_stage
from rlhf_workers.training.parallel.tensor_group import TensorGroup
from rlhf_workers.training.stages.model_stages import read_config
from rlhf_workers.training.trainer import Trainer
from rlhf_workers.weights.tensor_file import model_tensors

TOLERANCE = 1e-5
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, a window, one choice of 16": (
        "mixtral",
        {"sliding_window": models.WINDOW, "num_local_experts": 16, "num_experts_per_tok": 1},
    ),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3_moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
}
"""Expert weights of a token that add up to 1 and that do not, layers without experts, tied and untied.

With 16 experts some have no token of a micro-batch.
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: models.write_policy(root / name, family, seed=1, num_hidden_layers=4, **changes)
        for name, (family, changes) in MODELS.items()
    }


def ours_of(folder: Path, **training: Any) -> RLHFJob:
    return make_job(folder, folder, training={"backend": "megatron", **training})


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager").eval()
    tokens = torch.randint(3, models.VOCABULARY, (3, 2 * models.WINDOW), generator=torch.Generator().manual_seed(1))
    config, tensors = read_config(folders[name], "", 2), model_tensors(folders[name], "")
    first, last = (build_megatron_stage(config, tensors, 2, stage, "lm", CPU, "eager") for stage in range(2))
    with torch.no_grad():
        ours, theirs = last.logits(last(first(first.embed(tokens)))), model(tokens).logits
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_has_the_gradients_of_the_whole_model(name: str, folders: dict[str, Path]) -> None:
    job, batch = ours_of(folders[name]), make_batch(abstained=(3,))
    plain = plain_gradients(job, batch)
    if "one choice" in name:  # whose weight is 1, whatever the router says: what is left of its gradient is rounding
        least = 1e-6 * max(float(value.abs().max()) for value in plain.values())
        for router in [part for part in plain if part.endswith(".mlp.gate.weight")]:
            assert float(plain.pop(router).abs().max()) < least
    for pipeline, data in ((1, 1), (2, 1), (1, 2), (2, 2)):
        got = gradients_of(job, serial(job, pipeline, data), pipeline * data, batch)
        assert all(float(got.pop(part).abs().max()) < least for part in sorted(got.keys() - plain.keys()))
        assert_same_gradients(got, plain, TOLERANCE)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gradients_are_those_of_the_backend_torch(family: str, folders: dict[str, Path]) -> None:
    job, batch = ours_of(folders[family]), make_batch()
    torchs = make_job(folders[family], folders[family])
    expected = gradients_of(torchs, serial(torchs, 2, 1), 2, batch)
    assert_same_gradients(gradients_of(job, serial(job, 2, 1), 2, batch), expected, TOLERANCE)
    sdpa = make_job(folders[family], folders[family], training={"backend": "megatron"}, deterministic=False)
    assert_same_gradients(gradients_of(sdpa, serial(sdpa, 2, 1), 2, batch), expected, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_fused_and_split_tables_and_recomputation_have_the_bits_of_serial_ones(
    name: str, folders: dict[str, Path]
) -> None:
    job, batch = ours_of(folders[name]), make_batch()
    recomputed = ours_of(folders[name], activationCheckpointing=True)
    table = serial(job, 2, 1)
    fused = interleave(opposite(("actor", "critic"), 2, 4))
    expected = gradients_of(job, table, 2, batch)
    found = [gradients_of(job, other, 2, batch) for other in (fused, split_backward(fused), split_backward(table))]
    for other in (*found, gradients_of(recomputed, table, 2, batch)):
        assert [part for part in expected if not torch.equal(other[part], expected[part])] == []


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_half_precision_rounds_no_more_than_the_backend_torch(family: str, tmp_path: Path) -> None:
    """The median of three models: near ties in a token's choice may be rounded differently by either backend."""
    errors: dict[str, list[float]] = {"torch": [], "megatron": []}
    for seed in (2, 6, 8):
        folder = models.write_policy(tmp_path / str(seed), family, seed=seed, num_hidden_layers=4)
        exact_job, batch = make_job(folder, folder), make_batch()
        exact = gradients_of(exact_job, serial(exact_job, 1, 1), 1, batch)
        for backend, found in errors.items():
            job = make_job(folder, folder, training={"backend": backend, "precision": "BFloat16"})
            found.append(relative_error(gradients_of(job, serial(job, 1, 1), 1, batch), exact))
    ours, theirs = statistics.median(errors["megatron"]), statistics.median(errors["torch"])
    assert 0 < ours < 1.5 * theirs < 0.5, errors


def two_stages(job: RLHFJob) -> list[Trainer]:
    return on_ranks(2, lambda rank, peers: trainer_of(job, serial(job, 2, 1), rank, 2, peers))


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_what_was_loaded_is_published_and_saved_bit_by_bit(family: str, tied: bool, tmp_path: Path) -> None:
    """Files have the folder's names and bytes for any training type.

    Published tensors have transformers' names, as those of the backend `torch`.
    """
    policy = models.write_policy(tmp_path / family, family, seed=1, num_hidden_layers=4, tie_word_embeddings=tied)
    source = load_file(policy / "model.safetensors")
    assert ("lm_head.weight" in source) != tied
    published = {}
    for backend in ("torch", "megatron"):
        trainers = two_stages(make_job(policy, policy, training={"backend": backend, "precision": "BFloat16"}))
        published[backend] = {
            name: value for trainer in trainers for name, value in TorchBackend(trainer).published("actor")
        }
    ours, theirs = published["megatron"], published["torch"]
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    for trainer in trainers:
        TorchBackend(trainer).save(tmp_path, 1)
    parts = [load_file(file) for file in (tmp_path / "actor").glob("*.safetensors")]
    saved = {name: value for part in parts for name, value in part.items()}
    assert saved.keys() == source.keys()
    for name, value in source.items():
        assert torch.equal(saved[name].view(torch.int32), value.view(torch.int32)), name


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("writer", ["torch", "megatron"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_either_backend_goes_on_from_the_others_checkpoint(
    family: str, writer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    jobs = {"megatron": ours_of(folders[family]), "torch": make_job(folders[family], folders[family])}
    reader = next(name for name in jobs if name != writer)
    trained, _, _ = run(jobs[writer], range(1), save=tmp_path)
    finish_folder(tmp_path, folders[family])
    read, _, _ = run(jobs[reader], range(1, 1), pipeline=1, restore=str(tmp_path))
    assert_bitwise(read, trained)
    left, right = moments_of(read), moments_of(trained)
    assert [name for name in right if not torch.equal(left[name], right[name])] == []
    if writer == "megatron":
        resumed, _, _ = run(jobs[writer], range(1, 2), restore=str(tmp_path))
        straight, _, _ = run(jobs[writer], range(2))
        assert_bitwise(resumed, straight)


def test_experts_are_not_split_over_a_tensor_group(folders: dict[str, Path]) -> None:
    config, tensors = (
        read_config(folders["mixtral"], "", 1),
        model_tensors(folders["mixtral"], "spec.models.actor.path"),
    )
    with pytest.raises(
        WorkError, match=r"tensor: 2: the model of spec\.models\.actor\.path has experts.*: use 1"
    ) as caught:
        build_megatron_stage(config, tensors, 1, 0, "lm", CPU, "eager", TensorGroup(0, (0, 1)))
    assert caught.value.failure.field == TENSOR_FIELD
