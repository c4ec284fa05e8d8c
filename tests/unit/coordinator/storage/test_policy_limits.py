"""Properties of a policy before its weights are loaded: vocabulary, longest sequence, and stop tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.model_folders.models import VOCABULARY, build_config, build_tokenizer
from tests.support.training.training_ranks import make_job
from transformers import AutoConfig

from rlhf_api.job import RLHFJobSpec
from rlhf_common.model_files.model_limits import context_length
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.job_prompts import PromptReader
from rlhf_coordinator.storage.policy_limits import PolicyLimits, read_policy_limits


def folder_of(tmp_path: Path, tokenizer: Any = None, generation: Any = None, **changes: Any) -> Path:
    """Write a policy without weights."""
    build_config("llama", **changes).save_pretrained(tmp_path)
    (tokenizer or build_tokenizer()).save_pretrained(tmp_path)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def spec_of(folder: Path, **rollout: Any) -> RLHFJobSpec:
    return make_job(folder, rollout={"batchSize": 4, **rollout}).spec


def limits_of(folder: Path, **rollout: Any) -> PolicyLimits:
    return read_policy_limits(spec_of(folder, **rollout), build_tokenizer())


def test_limits_are_those_of_tokenizer_configuration_and_manifest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, generation={"eos_token_id": [1, 5]}, eos_token_id=9)
    limits = limits_of(folder, stopTokenIds=[7], stop=["\n"])
    assert limits == PolicyLimits(VOCABULARY, 512, frozenset({1, 5, 7}), ("\n",), unknown=2, generates=True)


@pytest.mark.parametrize(("config", "stops"), [(9, {1, 9}), ([8, 9], {1, 8, 9}), (None, {1})])
def test_without_a_generation_config_the_models_own_end_holds(tmp_path: Path, config: Any, stops: set[int]) -> None:
    assert limits_of(folder_of(tmp_path, eos_token_id=config)).stops == stops


@pytest.mark.parametrize("wrong", ["[]", "{"])
def test_a_damaged_configuration_is_named(tmp_path: Path, wrong: str) -> None:
    (folder_of(tmp_path) / "generation_config.json").write_text(wrong)
    with pytest.raises(JobError, match=r"its config.json or generation_config.json cannot be read") as error:
        limits_of(tmp_path)
    assert error.value.failure.exit_code == ExitCode.BAD_MODEL


def test_an_end_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    folder = folder_of(tmp_path, tokenizer)
    with pytest.raises(JobError, match=f"'<end>' of its tokenizer has the id {VOCABULARY}, and the model has"):
        read_policy_limits(spec_of(folder), tokenizer)
    folder_of(tmp_path, tokenizer, vocab_size=VOCABULARY + 14)
    assert read_policy_limits(spec_of(folder), tokenizer).vocabulary == VOCABULARY + 14, "a padded vocabulary"


def test_a_stop_token_that_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"{VOCABULARY} is no token of the policy, which has {VOCABULARY}") as error:
        limits_of(folder_of(tmp_path), stopTokenIds=[3, VOCABULARY])
    assert (error.value.failure.field, error.value.failure.exit_code) == ("spec.rollout.stopTokenIds", ExitCode.USAGE)


def test_the_start_reads_prompts_by_these_limits(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<tag>"], special_tokens=True)
    folder, path = folder_of(tmp_path / "policy", tokenizer), tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1"}\n{"prompt": "1<tag>"}\n')
    job = make_job(folder, prompts={"path": str(path)}, rollout={"maxPromptTokens": 8, "maxResponseTokens": 8})
    with pytest.raises(JobError, match=r"prompts.jsonl line 2 has the token '<tag>' under 'prompt'"):
        PromptReader(job.spec).training()


ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "fields", "length"),
    [
        ("gpt2", {"n_positions": 64}, 64),
        ("opt", {"max_position_embeddings": 64}, 64),
        ("bloom", {}, None),
        ("qwen2", {"max_position_embeddings": 256, "rope_scaling": ROPE}, 1024),
        ("qwen2", {"max_position_embeddings": 4096, "rope_scaling": ROPE}, 4096),
        ("llama", {"max_position_embeddings": 131072, "rope_scaling": {**ROPE, "rope_type": "linear"}}, 131072),
        ("gemma3", {"text_config": {"model_type": "gemma3_text", "max_position_embeddings": 96}}, 96),
    ],
)
def test_the_longest_sequence_of_a_family(
    tmp_path: Path, kind: str, fields: dict[str, Any], length: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **fields}))
    assert context_length(AutoConfig.from_pretrained(tmp_path).get_text_config()) == length


def test_tools_that_a_reward_model_does_not_read_are_warned_of(tmp_path: Path) -> None:
    policy, reward = build_tokenizer(), build_tokenizer()
    policy.chat_template = "{{ tools | tojson if tools }}{{ messages[0].content }}"
    folder, judge = folder_of(tmp_path / "policy", policy), tmp_path / "reward"
    prompts = tmp_path / "prompts.jsonl"
    job = make_job(folder, prompts={"path": str(prompts), "chatTemplate": True}, rollout={"maxResponseTokens": 8})
    document = job.spec.model_dump(by_alias=True, exclude_none=True)
    document["models"] = {"actor": {"path": str(folder)}, "reward": {"model": {"path": str(judge)}}}
    spec = RLHFJobSpec.model_validate(document)

    def warnings(template: str, tools: list[dict[str, str]]) -> str:
        reward.chat_template = template
        reward.save_pretrained(judge)
        prompts.write_text(json.dumps({"prompt": "1", "tools": tools}) + "\n")
        return "".join(PromptReader(spec).training()[0].warnings)

    wanted = f"{judge} has a chat template that does not write the tools of prompts"
    assert wanted in warnings("{{ messages[0].content }}", [{"name": "add"}])
    assert wanted not in warnings("{{ messages[0].content }}", [])
    assert wanted not in warnings("{{ tools }}{{ messages[0].content }}", [{"name": "add"}])
