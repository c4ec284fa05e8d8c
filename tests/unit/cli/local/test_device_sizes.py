"""`rlhf run` chooses the sizes of a job with `spec.devices` once per run folder and request."""

import json
from pathlib import Path

import pytest
from tests.support.manifests.header_job import write_header_job

from rlhf_api.manifest import dump
from rlhf_api.problems import ManifestError
from rlhf_cli.load_job import LoadedJob, load_resolved
from rlhf_cli.local.device_sizes import with_sizes
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.local_job import check_unchanged
from rlhf_cli.run import RunOptions, run_job

SPEC = {
    "algorithm": {"ppo": {"miniBatchSize": 16}},
    "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
    "prompts": {"path": "prompts.jsonl"},
    "rollout": {"batchSize": 32, "maxPromptTokens": 10, "maxResponseTokens": 64},
    "generation": {"maxBatchSize": 16},
    "training": {"microBatchSize": 4},
    "devices": {"count": 3},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a job, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    write_header_job(tmp_path, SPEC)
    return tmp_path


def loaded(folder: Path, *overrides: str) -> LoadedJob:
    return load_resolved(folder / "job.yaml", overrides, lambda job: folder / "run")


def sized(folder: Path, *overrides: str) -> tuple[LoadedJob, str]:
    job = loaded(folder, *overrides)
    return with_sizes(job, job.run_paths)


def test_a_plan_is_chosen_once_and_again_only_for_another_request(folder: Path) -> None:
    first, line = sized(folder)
    assert line.startswith("plan for 3 devices: ")
    assert "predicted" in line
    again, same = sized(folder, "spec.iterations=7")
    assert same == f"{line}, as the run folder records"
    assert again.resolved.spec.generation == first.resolved.spec.generation
    assert not first.resolved.spec.awaits_plan
    assert "records" not in sized(folder, "spec.devices.count=4")[1]


def test_a_job_without_devices_has_the_sizes_of_its_manifest(folder: Path) -> None:
    job = loaded(folder, "spec.devices=null")
    assert with_sizes(job, job.run_paths) == (job, "")
    assert not (folder / "run").exists()


def test_a_resumed_run_may_have_other_devices_and_no_other_seed(folder: Path) -> None:
    path = folder / "job.json"
    path.write_text(json.dumps(dump(sized(folder, "spec.devices.count=1")[0].resolved)))
    check_unchanged(path, sized(folder, "spec.devices.count=6")[0].resolved)
    with pytest.raises(ManifestError, match=r"spec\.seed = 9"):
        check_unchanged(path, sized(folder, "spec.devices.count=6", "spec.seed=9")[0].resolved)


def test_a_refused_resume_leaves_the_recorded_plan(folder: Path) -> None:
    sizes, _ = sized(folder)
    run = folder / "run"
    (run / "job.json").write_text(json.dumps(dump(sizes.resolved)))
    record = (run / "journal" / "job.json").read_bytes()
    changes = ("spec.devices.count=6", "spec.seed=9")
    with pytest.raises(ManifestError, match=r"spec\.seed = 9"):
        run_job(RunOptions(folder / "job.yaml", run, resume=True, port=None, plain=True, overrides=changes))
    assert (run / "journal" / "job.json").read_bytes() == record


def test_devices_that_are_too_small_are_named(folder: Path) -> None:
    with pytest.raises(RunError, match=r"^spec\.devices\.count = 3: no plan .* with 1e-06 GiB each"):
        sized(folder, "spec.devices.memory=0.000001")


def test_a_deterministic_job_that_plans_again_keeps_its_training_layout(folder: Path) -> None:
    changes = ("spec.deterministic=true", "spec.devices.replan=Auto")
    with pytest.raises(ManifestError, match=r'spec\.devices\.replan = "Auto": would change the order of sums'):
        loaded(folder, *changes)
    assert sized(folder, *changes, "spec.devices.fixed=[Training]")[1]
    assert sized(folder, changes[1])[1]


def test_a_new_plan_uses_the_figures_of_its_own_run_before_those_of_others(folder: Path) -> None:
    seconds = {"other": 1000.0, "own": 1.0}
    for name, run in (("other", folder / "runs" / "tiny-20260101-000000"), ("own", folder / "run")):
        (run / "journal").mkdir(parents=True)
        times = [{"tokens": 1, "seconds": seconds[name]}]
        layers = [{"role": role, "source": "measured", "times": times} for role in ("actor", "critic")]
        (run / "costs.json").write_text(json.dumps({"layers": layers}))
    own = recorded_seconds(sized(folder)[0])
    (folder / "run" / "costs.json").unlink()
    assert recorded_seconds(sized(folder, "spec.devices.count=4")[0]) > 100 * own


def recorded_seconds(job: LoadedJob) -> float:
    """Return the predicted seconds of training in the journal."""
    facts = json.loads((job.run_paths.run_dir / "journal" / "job.json").read_text())
    return float(facts["devicePlan"]["stages"]["train"]["seconds"])
