"""Chunks of Megatron: the model of a Hugging Face folder, with gradients and checkpoints of the backend `torch`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.model_folders import models
from tests.support.training.fused_ranks import assert_fused_and_split_train_the_bits_of_serial, fused_job, moments_of
from tests.support.training.gradient_comparison import assert_same_gradients, relative_error
from tests.support.training.training_ranks import (
    CPU,
    assert_bitwise,
    finish_folder,
    gradients_of,
    make_batch,
    make_job,
    on_ranks,
    run,
    serial,
    split_backward,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.megatron.megatron_stage import build_megatron_stage
from rlhf_workers.training.stages.model_stages import read_config
from rlhf_workers.weights.tensor_file import model_tensors

TOLERANCE = 1e-5
"""Tolerance relative to the largest number of a tensor: float32 sums in another order."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": True},
}
"""Tied and untied; the mistral's window is shorter than the samples."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"num_hidden_layers": 4}
    return {
        family: models.write_policy(root / family, family, seed=1, **sizes, **changes)
        for family, changes in MODELS.items()
    }


def both(folder: Path, **training: Any) -> tuple[RLHFJob, RLHFJob]:
    """Return the same job with Megatron and with PyTorch."""
    ours, theirs = (make_job(folder, folder, training={"backend": name, **training}) for name in ("megatron", "torch"))
    return ours, theirs


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_transformers(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.randint(3, models.VOCABULARY, (3, 2 * models.WINDOW), generator=torch.Generator().manual_seed(1))
    config, tensors = read_config(folder, "", 2), model_tensors(folder, "")
    first, last = (build_megatron_stage(config, tensors, 2, stage, "lm", CPU, "eager") for stage in range(2))
    with torch.no_grad():
        ours = last.logits(last(first(first.embed(tokens))))
        theirs = model(tokens).logits
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.abs().max())


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_of_the_backend_torch(family: str, folders: dict[str, Path]) -> None:
    ours, theirs = both(folders[family])
    batch = make_batch(abstained=(3,))
    assert max(batch.lengths) > models.WINDOW
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    table = serial(ours, 2, 1)
    whole = gradients_of(ours, table, 2, batch)
    assert_same_gradients(whole, expected, TOLERANCE)
    split = gradients_of(ours, split_backward(table), 2, batch)
    assert [name for name in whole if not torch.equal(whole[name], split[name])] == []


@pytest.mark.full
def test_pipelines_replicas_kernels_and_recomputation_change_no_gradient(folders: dict[str, Path]) -> None:
    batch = make_batch()
    ours, theirs = both(folders["mistral"])
    expected = gradients_of(theirs, serial(theirs, 1, 1), 1, batch)
    for pipeline, data in ((1, 1), (4, 1), (1, 2), (2, 2)):
        got = gradients_of(ours, serial(ours, pipeline, data), pipeline * data, batch)
        assert_same_gradients(got, expected, TOLERANCE)
    recomputed, _ = both(folders["mistral"], activationCheckpointing=True)
    assert_same_gradients(gradients_of(recomputed, serial(ours, 2, 1), 2, batch), expected, TOLERANCE)
    fused = make_job(folders["mistral"], folders["mistral"], training={"backend": "megatron"}, deterministic=False)
    assert_same_gradients(gradients_of(fused, serial(ours, 2, 1), 2, batch), expected, TOLERANCE)


@pytest.mark.full
def test_half_precision_rounds_no_more_than_the_backend_torch(folders: dict[str, Path]) -> None:
    batch = make_batch()
    _, plain = both(folders["qwen3"])
    exact = gradients_of(plain, serial(plain, 2, 1), 2, batch)

    rounded = [gradients_of(job, serial(job, 2, 1), 2, batch) for job in both(folders["qwen3"], precision="BFloat16")]
    ours, theirs = (relative_error(got, exact) for got in rounded)
    assert 0 < ours < 2 * theirs < 0.5, (ours, theirs)


@pytest.mark.full
def test_fused_and_split_train_the_same_bits_as_serial(tmp_path: Path) -> None:
    job = fused_job(tmp_path)
    training = job.spec.training.model_copy(update={"backend": "megatron"})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})
    assert_fused_and_split_train_the_bits_of_serial(job, 2, 1)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", MODELS)
def test_what_was_loaded_is_published_and_saved_bit_by_bit(family: str, tied: bool, tmp_path: Path) -> None:
    policy = models.write_policy(tmp_path / family, family, seed=1, num_hidden_layers=4, tie_word_embeddings=tied)
    job, _ = both(policy, precision="BFloat16")
    source = load_file(policy / "model.safetensors")
    assert ("lm_head.weight" in source) != tied
    trainers = on_ranks(2, lambda rank, peers: trainer_of(job, serial(job, 2, 1), rank, 2, peers))
    published = {name: value for trainer in trainers for name, value in TorchBackend(trainer).published("actor")}
    assert published.keys() == source.keys()
    for trainer in trainers:
        TorchBackend(trainer).save(tmp_path, 1)
    saved = {
        name: value for file in (tmp_path / "actor").glob("*.safetensors") for name, value in load_file(file).items()
    }
    assert saved.keys() == source.keys()
    for name, value in source.items():
        assert torch.equal(saved[name].view(torch.int32), value.view(torch.int32)), name
        assert torch.equal(published[name].view(torch.int16), value.bfloat16().view(torch.int16)), name


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("writer", ["torch", "megatron"])
def test_either_backend_goes_on_from_the_others_checkpoint(
    writer: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Weights and moments are the same bits with another number of stages.

    A group that was lost and returns trains the same bits as one that was not.
    """
    jobs = dict(zip(("megatron", "torch"), both(folders["mistral"]), strict=True))
    reader = next(name for name in jobs if name != writer)
    trained, _, _ = run(jobs[writer], range(1), save=tmp_path)
    finish_folder(tmp_path, folders["mistral"])
    read, _, _ = run(jobs[reader], range(1, 1), pipeline=1, restore=str(tmp_path))
    assert_bitwise(read, trained)
    left, right = moments_of(read), moments_of(trained)
    assert [name for name in right if not torch.equal(left[name], right[name])] == []
    if writer == "megatron":
        resumed, _, _ = run(jobs[writer], range(1, 2), restore=str(tmp_path))
        straight, _, _ = run(jobs[writer], range(2))
        assert weights_of(resumed).keys() == weights_of(straight).keys()
        assert_bitwise(resumed, straight)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gemma2", {}, "model_type 'gemma2': spec.training.backend megatron takes llama, .*; use torch"),
        ("qwen3_moe", {"attention_bias": True}, "it has model.layers.0.self_attn"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "embedding is 'yarn'"),
        ("llama", {"attention_bias": True}, "it has model.layers.0.self_attn"),
        ("llama", {"mlp_bias": True}, "down_proj.bias"),
    ],
)
def test_a_model_that_megatron_would_compute_otherwise_is_refused(
    family: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = models.write_policy(tmp_path / family, family, **changes)
    job, _ = both(folder)
    with pytest.raises(WorkError, match=says) as caught:
        on_ranks(1, lambda rank, peers: trainer_of(job, serial(job, 1, 1), rank, 1, peers))
    assert caught.value.failure.field == "spec.models.actor.path"


def test_adapters_are_refused_by_the_name_of_their_field(folders: dict[str, Path]) -> None:
    job, _ = both(folders["llama"], lora={"rank": 4})
    with pytest.raises(WorkError, match=r"adapters are trained by spec.training.backend torch") as caught:
        on_ranks(1, lambda rank, peers: trainer_of(job, serial(job, 1, 1), rank, 1, peers))
    assert caught.value.failure.field == "spec.training.lora"
