"""Which folder a run uses, and which it rejects."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from rlhf_api.job import RLHFJob
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RunFolder, RunPaths, choose_run_dir, newest_first

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
JOB = RLHFJob.model_validate(
    yaml.safe_load(
        """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: tiny}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: policy}, reward: {function: {module: rewards}}}
  prompts: {path: prompts.jsonl}
"""
    )
)


def test_a_new_run_is_named_after_job_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_run_dir(JOB, None, NOW, resume=False) == tmp_path / "runs" / "tiny-20260304-050607"
    assert choose_run_dir(JOB, Path("here"), NOW, resume=True) == tmp_path / "here"


def test_resume_finds_the_latest_run_of_this_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="no run of job 'tiny'"):
        choose_run_dir(JOB, None, NOW, resume=True)
    for name in ("tiny-20260101-000000", "tiny-20260102-000000", "tiny-large-20270101-000000"):
        (tmp_path / "runs" / name / "journal").mkdir(parents=True)
    (tmp_path / "runs" / "tiny-20280101-000000").mkdir()
    assert choose_run_dir(JOB, None, NOW, resume=True).name == "tiny-20260102-000000"


def test_a_folder_with_a_run_needs_resume_and_the_other_way_round(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no such folder"):
        RunFolder(RunPaths(tmp_path / "new", tmp_path), resume=True)
    (tmp_path / "old" / "journal").mkdir(parents=True)
    with pytest.raises(RunError, match="holds a run already; give --resume"):
        RunFolder(RunPaths(tmp_path / "old", tmp_path), resume=False)
    RunFolder(RunPaths(tmp_path / "old", tmp_path), resume=True).release()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    first = RunFolder(RunPaths(tmp_path / "run", tmp_path), resume=False)
    with pytest.raises(RunError, match="another `rlhf run` is using this folder"):
        RunFolder(RunPaths(tmp_path / "run", tmp_path), resume=False)
    first.release()
    RunFolder(RunPaths(tmp_path / "run", tmp_path), resume=False).release()


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="--run-dir") as refused:
        RunFolder(RunPaths(tmp_path / "file" / "run", tmp_path), resume=False)
    assert refused.value.exit_code == 23


def test_runs_of_a_job_with_a_longer_name_are_not_those_of_a_job(tmp_path: Path) -> None:
    for folder, job in (("ppo-1", "ppo"), ("ppo-2", "ppo"), ("ppo-large-1", "ppo-large")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "job.json").write_text(json.dumps({"metadata": {"name": job}}))
    (tmp_path / "ppo-0").mkdir()
    assert [path.name for path in newest_first(tmp_path, "ppo")] == ["ppo-2", "ppo-1", "ppo-0"]
    assert [path.name for path in newest_first(tmp_path, "ppo-large")] == ["ppo-large-1"]
