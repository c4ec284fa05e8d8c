"""Training of adapters: gradients, layouts, precision, publishing, checkpoints, and compatibility with PEFT."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.support.training.gradient_comparison import assert_same_gradients
from tests.support.training.training_ranks import (
    Alone,
    assert_bitwise,
    gradients_of,
    make_batch,
    make_job,
    run,
    serial,
    split_backward,
    trainer_of,
    weights_of,
)

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlhf_coordinator.storage import checkpoint as checkpoint_folders
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends.torch_backend import TorchBackend
from rlhf_workers.training.stages import adapters
from rlhf_workers.training.trainer import Trainer

FAMILIES = ("llama", "qwen2", "gemma2")
LORA = {"rank": 3, "alpha": 6.0}
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set adapters as after some training: no B is zero."""
    begun = adapters.put_in

    def put_in(stage: Any, settings: Any, seed: int, model: str) -> None:
        begun(stage, settings, seed, model)
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(adapters._begin(parameter.shape, f"B {model} {name}") * 0.3)

    monkeypatch.setattr(adapters, "put_in", put_in)


def lora_job(actor: Path, critic: Path | None = None, lora: dict[str, Any] | None = None, **changes: Any) -> RLHFJob:
    training = {**changes.pop("training", {}), "lora": LORA if lora is None else lora}
    return make_job(actor, critic, training=training, **changes)


def alone(job: RLHFJob) -> Trainer:
    return trainer_of(job, serial(job, 1, 1), 0, 1, Alone())


def published(trainer: Trainer, model: str) -> dict[str, torch.Tensor]:
    return dict(TorchBackend(trainer).published(model))


def merged_folder(source: Path, tensors: dict[str, torch.Tensor], target: Path) -> Path:
    """Return a copy of `source` with other weights, and with a value head if it has one."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    whole = load_file(source / "model.safetensors")
    save_file({**whole, **{name: value.contiguous() for name, value in tensors.items()}}, target / "model.safetensors")
    return target


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("learned")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_an_adapter_is_the_projection_of_the_whole_models(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """At W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW', with dL/dW' by full training of W'."""
    job, batch = lora_job(folders[family], folders[family]), make_batch(abstained=(3,))
    trainer = alone(job)
    merged = {
        model: merged_folder(folders[family], published(trainer, model), tmp_path / model)
        for model in ("actor", "critic")
    }
    dense_job = make_job(merged["actor"], merged["critic"])
    dense = gradients_of(dense_job, serial(dense_job, 1, 1), 1, batch)
    weights, expected = weights_of([trainer]), {}
    for name, value in weights.items():
        of = name.replace(".lora_A", "").replace(".lora_B", "")
        if ".lora_A." in name:
            expected[name] = 2.0 * weights[name.replace("lora_A", "lora_B")].T @ dense[of]
        elif ".lora_B." in name:
            expected[name] = 2.0 * dense[of] @ weights[name.replace("lora_B", "lora_A")].T
        else:
            assert value.shape == dense[name].shape, "a value head is trained whole"
            expected[name] = dense[name]
    assert len(expected) == 2 * 2 * 4 * len(MATRICES) + 1
    assert_same_gradients(gradients_of(job, serial(job, 1, 1), 1, batch), expected, 5e-5)


@pytest.mark.full(quick=1)
@pytest.mark.usefixtures("learned")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_pipelines_replicas_and_recomputation_give_the_same_gradients(family: str, folders: dict[str, Path]) -> None:
    job, batch = lora_job(folders[family], folders[family]), make_batch()
    whole = gradients_of(job, serial(job, 1, 1), 1, batch)
    for pipeline, data in ((2, 1), (4, 1), (2, 2)):
        assert_same_gradients(gradients_of(job, serial(job, pipeline, data), pipeline * data, batch), whole, 2e-6)
    again = lora_job(folders[family], folders[family], training={"activationCheckpointing": True})
    assert_same_gradients(gradients_of(again, serial(again, 2, 1), 2, batch), whole, 2e-6)
    split = split_backward(serial(job, 2, 1))
    assert_same_gradients(gradients_of(job, split, 2, batch), whole, 2e-6)


@pytest.mark.full
@pytest.mark.usefixtures("learned")
def test_bfloat16_holds_frozen_matrices_in_it_and_computes_near_the_same_gradients(folders: dict[str, Path]) -> None:
    batch, folder = make_batch(), folders["llama"]
    exact, low = (lora_job(folder, folder, training={"precision": kind}) for kind in ("Float32", "BFloat16"))
    trainer = alone(low)
    frozen = {name: value for name, value in trainer.stages["actor", 0].named_parameters() if not value.requires_grad}
    assert {value.dtype for value in frozen.values() if value.ndim > 1} == {torch.bfloat16}
    assert {value.dtype for value in frozen.values() if value.ndim < 2} == {torch.float32}
    assert {value.dtype for value in weights_of([trainer]).values()} == {torch.float32}
    table = serial(exact, 2, 1)
    wanted, found = (gradients_of(job, table, 2, batch) for job in (exact, low))
    for name, expected in wanted.items():
        cosine = torch.nn.functional.cosine_similarity(found[name].flatten(), expected.flatten(), dim=0)
        assert cosine > 0.97 or expected.norm() < 1e-4, name


def test_only_adapters_have_gradients_moments_and_change(folders: dict[str, Path]) -> None:
    """A critic trained in full at the same time, with `models: Policy`, is the same as without adapters."""
    folder = folders["qwen2"]
    job = lora_job(folder, folder, {**LORA, "models": "Policy", "targetModules": ["q_proj", "down_proj"]})
    (trainer,), _, _ = run(job, range(2), pipeline=1)
    (full,), _, _ = run(make_job(folder, folder), range(2), pipeline=1)
    optimizer = trainer.optimizers["actor", 0]
    assert all(".lora_" in name and ("q_proj" in name or "down_proj" in name) for name in optimizer.owned)
    assert len(optimizer.owned) == 4 * 2 * 2
    assert len(optimizer.gradients) == sum(value.numel() for value in optimizer.parameters.values())
    source = load_file(folder / "model.safetensors")
    stage = dict(trainer.stages["actor", 0].named_parameters())
    assert all(torch.equal(stage[name], value) for name, value in source.items())
    assert all(bool(stage[name].any()) for name in optimizer.owned), "every B has left zero"
    critics = [{k: v for k, v in weights_of([t]).items() if k.startswith("critic:")} for t in (trainer, full)]
    assert critics[0].keys() == critics[1].keys()
    assert all(torch.equal(critics[0][name], critics[1][name]) for name in critics[0])


def test_before_training_the_published_model_is_the_folders_and_layouts_begin_alike(folders: dict[str, Path]) -> None:
    folder = folders["qwen2"]
    job = lora_job(folder, folder)
    whole = alone(job)
    source = load_file(folder / "model.safetensors")
    assert all(torch.equal(published(whole, "actor")[name], value) for name, value in source.items())
    split, _, _ = run(job, range(0), pipeline=2)
    assert_bitwise(split, [whole])
    assert_bitwise([alone(lora_job(folder, folder))], [whole])
    other = weights_of([alone(lora_job(folder, folder, seed=6))])
    assert all(not torch.equal(other[name], value) for name, value in weights_of([whole]).items() if "lora_A" in name)


@pytest.mark.usefixtures("learned")
def test_the_published_model_says_what_the_adapters_say(folders: dict[str, Path]) -> None:
    """Greedy tokens of the merged model equal those of frozen weights with adapters."""
    job = lora_job(folders["qwen2"])
    trainer = trainer_of(job, serial(job, 1, 1, ("actor",)), 0, 1, Alone())
    stage = trainer.stages["actor", 0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2"], attn_implementation="eager")
    merged = published(trainer, "actor")
    model.load_state_dict({**merged, "lm_head.weight": merged["model.embed_tokens.weight"]})
    assert any(not torch.equal(value, merged[name]) for name, value in stage.named_parameters() if name in merged)
    tokens = torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        for _ in range(24):
            ours = stage.logits(stage(stage.embed(tokens)))[0, -1]
            theirs = model(tokens).logits[0, -1]
            assert torch.allclose(ours, theirs, atol=1e-4)
            assert int(ours.argmax()) == int(theirs.argmax())
            tokens = torch.cat([tokens, ours.argmax().view(1, 1)], 1)


# ---------------------------------------------------------------- checkpoints


def saved(job: RLHFJob, source: Path, folder: Path, pipeline: int = 2) -> Path:
    """Return the checkpoint of one iteration after the coordinator has finished it."""
    temporary = checkpoint_folders.prepare(folder, 1)
    _, _, files = run(job, range(1), pipeline=pipeline, save=temporary)
    results = [pb.CheckpointResult(files=files)]
    sources = {
        role: checkpoint_folders.SourceFolder(str(source), f"spec.models.{role}.path") for role in ("actor", "critic")
    }
    checkpoint = checkpoint_folders.finish(temporary, folder, 1, results, sources, {})
    assert checkpoint_folders.verify(checkpoint.folder) is None
    return checkpoint.folder


@pytest.mark.full
def test_resuming_adapters_is_exact_for_any_number_of_stages(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["qwen2"]
    job = lora_job(source, source)
    folder = saved(job, source, tmp_path)
    names = sorted(file.name for file in (folder / "actor").iterdir())
    assert {ADAPTER_CONFIG, ADAPTER_WEIGHTS, "config.json", "tokenizer.json"} <= set(names)
    assert not [name for name in names if name.startswith(("model", "adapter-stage"))]
    straight, metrics, _ = run(job, range(2))
    resumed, after, _ = run(job, range(1, 2), restore=str(folder))
    assert after == metrics[1:]
    assert_bitwise(straight, resumed)
    one_stage, _, _ = run(job, range(1, 1), pipeline=1, restore=str(folder))
    two_stages, _, _ = run(job, range(1, 1), pipeline=2, restore=str(folder))
    assert_bitwise(one_stage, two_stages)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 4}, "spec.training.lora.rank: is 4, and .* was saved with 3: use 3"),
        ({"alpha": 3.0}, "spec.training.lora.alpha: is 3.0"),
        ({"targetModules": ["q_proj"]}, "spec.training.lora.targetModules"),
        (None, "spec.training.lora: is not set, and .* holds adapters"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    change: dict[str, Any] | None, says: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders["llama"]
    folder = saved(lora_job(source, source), source, tmp_path, pipeline=1)
    other = make_job(source, source) if change is None else lora_job(source, source, {**LORA, **change})
    with pytest.raises(WorkError, match=says):
        run(other, range(1, 2), pipeline=1, restore=str(folder))


def test_a_checkpoint_without_adapters_is_refused_by_a_job_with_them(folders: dict[str, Path], tmp_path: Path) -> None:
    source = folders["llama"]
    folder = saved(make_job(source, source), source, tmp_path, pipeline=1)
    with pytest.raises(WorkError, match="it was saved without adapters"):
        run(lora_job(source, source), range(1, 2), pipeline=1, restore=str(folder))


def test_peft_loads_a_checkpoint_and_says_what_the_published_model_says(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders["llama"]
    job = lora_job(source, source)
    folder = saved(job, source, tmp_path)
    (trainer,), _, _ = run(job, range(1, 1), pipeline=1, restore=str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    plain = model(torch.arange(3, 20)[None]).logits
    adapted = peft.PeftModel.from_pretrained(model, str(folder / "actor")).eval()
    ours = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    ours.load_state_dict(published(trainer, "actor"))
    with torch.no_grad():
        tokens = torch.arange(3, 20)[None]
        assert torch.allclose(adapted(tokens).logits, ours(tokens).logits, atol=1e-4)
        assert not torch.allclose(plain, ours(tokens).logits, atol=1e-2)
    merged = adapted.merge_and_unload().state_dict()
    assert all(torch.allclose(merged[name], value, atol=1e-6) for name, value in published(trainer, "actor").items())
    assert json.loads((folder / "actor" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(source)
