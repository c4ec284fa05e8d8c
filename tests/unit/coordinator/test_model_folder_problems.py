"""Model folders that cannot be used are found by `rlhf validate` and by the coordinator, with their fields."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.models import write_policy, write_reward_model

from rlhf_api.names import ExitCode
from rlhf_api.weight_files import INDEX
from rlhf_cli.load_job import Target, load_documents
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_folder_problems import check_model_folders

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
