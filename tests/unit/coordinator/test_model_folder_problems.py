"""`rlhf validate` and the start of a coordinator find unusable model folders and name the field."""

import json
import re
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from tests.support.model_folders.models import build_tokenizer, write_policy, write_reward_model
from transformers import AutoModelForCausalLM

from rlhf_api.job import RLHFJobSpec
from rlhf_cli.load_job import Target, load_documents
from rlhf_common.model_files.weight_files import INDEX
from rlhf_common.names import ADAPTER_CONFIG, ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folder_problems import check_model_folders
from rlhf_coordinator.model_sizes import read_shapes, read_size

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: tiny}
spec:
  algorithm: {ppo: {}}
  models:
    actor: {path: policy}
    rewards:
    - {name: model, model: {path: reward}}
    - {name: judge, judge: {model: {path: judge}, template: "is it right? {response}"}}
  prompts: {path: prompts.jsonl}
  rollout: {maxPromptTokens: 8, maxResponseTokens: 8}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    for name, write in (("policy", write_policy), ("reward", write_reward_model), ("judge", write_policy)):
        write(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "job.yaml").write_text(MANIFEST)
    return tmp_path / "job.yaml"


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("policy", "spec.models.actor.path"),
        ("reward", "spec.models.rewards[0].model.path"),
        ("judge", "spec.models.rewards[1].judge.model.path"),
    ],
)
def test_a_folder_that_cannot_be_used_is_found_before_anything_starts(manifest: Path, model: str, field: str) -> None:
    [valid] = load_documents(manifest.read_text(), Target.LOCAL, manifest.parent)
    assert valid.errors == []
    folder = manifest.parent / model
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors"}}))
    [loaded] = load_documents(manifest.read_text(), Target.LOCAL, manifest.parent)
    assert [(problem.field, problem.value) for problem in loaded.errors] == [(field, str(folder))]
    assert loaded.errors[0].line is not None
    assert loaded.errors[0].message.startswith("it holds no model-00001-of-00001.safetensors")
    check_model_folders(loaded.resolved.spec)  # workers may mount it
    save_file({"x": torch.ones(1)}, folder / "model-00001-of-00001.safetensors")
    with pytest.raises(JobError, match=f"it holds model.safetensors beside {INDEX}") as failed:
        check_model_folders(loaded.resolved.spec)
    failure = failed.value.failure
    assert (failure.reason, failure.field, failure.exit_code) == ("ModelCorrupt", field, ExitCode.BAD_MODEL)


def test_what_is_not_on_this_machine_is_left_to_the_workers(manifest: Path) -> None:
    for target in (Target.LOCAL, Target.CLUSTER):
        [loaded] = load_documents(MANIFEST, target, Path("/nowhere"))
        assert loaded.errors == []


def problems_of(manifest: Path) -> list[tuple[str, str]]:
    """Return the problems from `rlhf validate --for local`; the start of the coordinator reports the first one."""
    [loaded] = load_documents(manifest.read_text(), Target.LOCAL, manifest.parent)
    if loaded.errors:
        with pytest.raises(JobError) as failed:
            check_model_folders(loaded.resolved.spec)
        assert failed.value.failure.field == loaded.errors[0].field
        assert loaded.errors[0].message in failed.value.failure.message
    return [(problem.field, problem.message) for problem in loaded.problems]


@pytest.mark.parametrize("model", ["policy", "reward", "judge"])
def test_a_model_with_the_configuration_of_adapters_is_refused(manifest: Path, model: str) -> None:
    (manifest.parent / model / ADAPTER_CONFIG).write_text('{"peft_type": "LORA"}')
    [(field, message)] = problems_of(manifest)
    assert field.endswith("path")
    assert message.startswith(f"it holds {ADAPTER_CONFIG}: transformers would add adapters to this model")
    assert "remove the file if the adapters are merged already" in message


def test_adapters_in_the_place_of_a_model_are_refused(manifest: Path) -> None:
    folder = manifest.parent / "policy"
    (folder / ADAPTER_CONFIG).write_text("{}")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    [(field, message)] = problems_of(manifest)
    assert field == "spec.models.actor.path"
    assert message.startswith(f"it holds {ADAPTER_CONFIG}: the folder holds adapters and no model; give the folder of")


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({}, "", ""),
        (
            {"init_lora_weights": "pissa"},
            "spec.training.lora.adapter",
            "has init_lora_weights: 'pissa': with it, PEFT changes",
        ),
        ({"r": 8}, "spec.training.lora.rank", "is 3, and .* was saved with 8: use 8"),
        ({"target_modules": ["q_proj"]}, "spec.training.lora.targetModules", r"was saved with \['q_proj'\]"),
    ],
)
def test_adapters_to_start_from_are_checked_before_anything_starts(
    manifest: Path, changes: dict[str, object], field: str, says: str
) -> None:
    adapter = manifest.parent / "adapter"
    model = AutoModelForCausalLM.from_pretrained(manifest.parent / "policy")
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(str(adapter))
    file = adapter / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    lora = "  training: {lora: {rank: 3, alpha: 6, targetModules: [q_proj, v_proj], adapter: adapter}}\n"
    manifest.write_text(MANIFEST + lora)
    found = problems_of(manifest)
    assert [name for name, _ in found] == [field] * bool(field)
    assert all(re.search(says, message) for _, message in found)


def test_an_adapter_file_with_more_than_factors_is_refused(manifest: Path) -> None:
    adapter = manifest.parent / "adapter"
    model = AutoModelForCausalLM.from_pretrained(manifest.parent / "policy")
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(model, settings).save_pretrained(str(adapter))
    file = adapter / ADAPTER_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": None}))
    lora = "  training: {lora: {rank: 3, alpha: 6, targetModules: [q_proj], adapter: adapter}}\n"
    manifest.write_text(MANIFEST + lora)
    [(field, message)] = problems_of(manifest)
    assert field == "spec.training.lora.adapter"
    assert "holds base_model.model.lm_head.weight, which is neither lora_A.weight nor lora_B.weight" in message


def with_reader(manifest: Path, role: str) -> Path:
    """Add a separate reference or critic as `role` of the manifest; return its folder."""
    folder = write_policy(manifest.parent / role, seed=3)
    manifest.write_text(MANIFEST.replace("    actor:", f"    {role}: {{path: {role}}}\n    actor:"))
    return folder


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_a_model_that_reads_other_tokens_than_the_policy_is_refused(manifest: Path, role: str) -> None:
    folder = with_reader(manifest, role)
    assert problems_of(manifest) == []
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    names = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    content["model"]["vocab"] |= {names[7]: 8, names[8]: 7}
    file.write_text(json.dumps(content))
    [(field, message)] = problems_of(manifest)
    assert field == f"spec.models.{role}.path"
    assert f"differs from that of spec.models.actor.path ({manifest.parent / 'policy'})" in message
    assert f"the policy's token 7 is {names[7]!r}, and its tokenizer gives it the number 8" in message
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert problems_of(manifest) == [], "a folder without a tokenizer says nothing"


def test_more_tokens_than_the_policy_has_are_no_difference_to_a_model_that_reads(manifest: Path) -> None:
    folder = with_reader(manifest, "reference")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(folder)
    assert problems_of(manifest) == []
    tokenizer.save_pretrained(manifest.parent / "policy")
    build_tokenizer().save_pretrained(folder)
    [(_, message)] = problems_of(manifest)
    assert "is 'more', and its tokenizer does not have it" in message


def test_another_chat_template_of_a_model_that_reads_the_policys_tokens_is_warned_of(manifest: Path) -> None:
    folder = with_reader(manifest, "reference")
    manifest.write_text(manifest.read_text().replace("prompts: {path", "prompts: {chatTemplate: true, path"))
    for path, template in (
        (folder, "1{{ messages[0].content }}"),
        (manifest.parent / "policy", "2{{ messages[0].content }}"),
    ):
        tokenizer = build_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(path)
    [loaded] = load_documents(manifest.read_text(), Target.LOCAL, manifest.parent)
    assert loaded.errors == []
    [warning] = loaded.problems
    text = "has another chat template than the actor, and reads prompts in that one"
    assert (warning.field, text in warning.message) == ("spec.models.reference.path", True)
    written = manifest.read_text().replace("chatTemplate: true", "chatTemplateFile: chat.jinja, chatTemplate: true")
    for template, other in (("1", "critic"), ("2", "reference")):
        (manifest.parent / "chat.jinja").write_text(template + "{{ messages[0].content }}")
        [warning] = load_documents(written, Target.LOCAL, manifest.parent)[0].problems
        text = "has another chat template than spec.prompts.chatTemplateFile"
        assert (warning.field, text in warning.message) == (f"spec.models.{other}.path", True)


@pytest.mark.parametrize(
    "damage",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": float("inf")},
        {"hidden_size": float("nan")},
        {"hidden_size": None},
        {"text_config": "x"},
    ],
)
def test_a_config_with_impossible_values_states_no_shape(tmp_path: Path, damage: dict[str, object]) -> None:
    models = {"actor": {"path": str(tmp_path)}, "reward": {"function": {"module": "rewards"}}}
    prompts = {"path": "prompts.jsonl"}
    spec = RLHFJobSpec.model_validate({"algorithm": {"grpo": {}}, "models": models, "prompts": prompts})
    write_policy(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert set(read_shapes(spec)) == {"actor"}
    assert read_size(tmp_path) is not None
    (tmp_path / "config.json").write_text(json.dumps(config | damage))
    assert read_shapes(spec) == {}
    assert read_size(tmp_path) is None
