"""A policy that cannot be split over a worker's devices ends the job before a worker loads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.tensor_split_check import check_tensor_split


def spec(folder: Path, tensor: int) -> RLHFJobSpec:
    content: dict[str, Any] = {
        "algorithm": {"grpo": {}},
        "models": {"actor": {"path": str(folder)}, "reward": {"function": {"module": "rewards"}}},
        "prompts": {"path": "prompts.jsonl"},
        "generation": {"engine": "vllm", "gpusPerReplica": tensor, "parallelism": {"tensor": tensor}},
    }
    return RLHFJobSpec.model_validate(content)


def test_heads_that_do_not_divide_are_told_with_the_field_and_what_would_be_right(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "num_key_value_heads": 2}))
    check_tensor_split(spec(tmp_path, 2))
    with pytest.raises(JobError) as raised:
        check_tensor_split(spec(tmp_path, 4))
    failure = raised.value.failure
    assert (failure.field, failure.exit_code) == ("spec.generation.parallelism.tensor", ExitCode.USAGE)
    assert failure.message == "4: the model's 6 attention heads cannot be split over 4 devices: use 2"


def test_models_that_ranks_train_in_parts_have_heads_for_each_of_them(tmp_path: Path) -> None:
    body = spec(tmp_path, 1).model_dump(by_alias=True, exclude_unset=True)
    critic = tmp_path / "critic"
    critic.mkdir()
    for folder, heads in ((tmp_path, 8), (critic, 2)):
        config = {"num_attention_heads": 8, "num_key_value_heads": heads}
        (folder / "config.json").write_text(json.dumps(config))
    body |= {"algorithm": {"ppo": {}}, "training": {"backend": "megatron", "parallelism": {"tensor": 4}}}
    body["models"]["critic"] = {"path": str(critic)}
    with pytest.raises(JobError) as raised:
        check_tensor_split(RLHFJobSpec.model_validate(body))
    failure = raised.value.failure
    assert failure.field == "spec.training.parallelism.tensor"
    assert failure.message == (
        "4: spec.models.critic.path: the model's 2 key-value heads cannot be split over 4 devices: use 2"
    )

    body["training"]["parallelism"] = {"tensor": 4, "criticTensor": 2}
    check_tensor_split(RLHFJobSpec.model_validate(body))
    body["training"]["parallelism"] = {"pipeline": 8, "tensor": 2, "criticTensor": 8}
    with pytest.raises(JobError, match=r"8: spec\.models\.critic\.path: the model's 2 key-value heads") as raised:
        check_tensor_split(RLHFJobSpec.model_validate(body))
    assert raised.value.failure.field == "spec.training.parallelism.criticTensor"


def test_experts_are_shared_out_over_ranks_that_divide_them(tmp_path: Path) -> None:
    body = spec(tmp_path, 1).model_dump(by_alias=True, exclude_unset=True)
    (tmp_path / "config.json").write_text(json.dumps({"num_local_experts": 8, "num_attention_heads": 8}))
    body["training"] = {"parallelism": {"data": 12, "expert": 4}}
    check_tensor_split(RLHFJobSpec.model_validate(body))
    body["training"] = {"parallelism": {"data": 12, "expert": 3}}
    with pytest.raises(JobError, match=r"8 experts cannot be shared out over 3 ranks: use 1, 2, 4, 8") as raised:
        check_tensor_split(RLHFJobSpec.model_validate(body))
    assert raised.value.failure.field == "spec.training.parallelism.expert"
    body["training"] = {"backend": "megatron", "parallelism": {"tensor": 2}}
    with pytest.raises(JobError, match=r"2: .*: the model's experts cannot be split over 2 ranks: use 1") as raised:
        check_tensor_split(RLHFJobSpec.model_validate(body))
    assert raised.value.failure.field == "spec.training.parallelism.tensor"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_what_cannot_be_read_is_left_to_the_workers(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    check_tensor_split(spec(tmp_path, 4))
