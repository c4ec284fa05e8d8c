"""Resuming a run: valid contents of its job file, and fields that must not have changed."""

import json
from pathlib import Path

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_api.manifest import dump
from rlhf_api.problems import ManifestError
from rlhf_cli.local.local_job import check_unchanged

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: resumed}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: /policy}, reward: {function: {module: rewards}}}
  prompts: {path: /prompts.jsonl}
  fusion: {interStage: {mode: Disabled}}
"""


@pytest.fixture
def job() -> RLHFJob:
    return RLHFJob.model_validate(yaml.safe_load(MANIFEST))


def test_a_run_of_the_version_before_goes_on(tmp_path: Path, job: RLHFJob) -> None:
    """Its file may have fields that this version does not know."""
    document = dump(job)
    document["spec"] |= {"gone": 1}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document))
    check_unchanged(path, job)
    document["spec"]["seed"] = 5
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match=r"spec\.seed = 0: cannot be changed"):
        check_unchanged(path, job)
