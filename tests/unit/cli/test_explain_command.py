"""`rlhf explain`: output for people and programs from the facts in a run folder."""

import json
from pathlib import Path

import pytest
import yaml
from tests.support.jobs.explained_runs import recorded_facts
from tests.support.manifests.header_job import write_header_job

from rlhf_api import manifest
from rlhf_cli.explain import explain_run
from rlhf_cli.local.errors import RunError
from rlhf_coordinator.device_plan import REPLANNING_KEY
from rlhf_coordinator.reports.trackers.facts_jsonl import FILE, KEPT, FactsJsonl, read_facts

SLOW = {"Generating": 6.0, "Publishing": 2.0, "Checkpointing": 4.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "journal").mkdir()
    tracker = FactsJsonl(tmp_path, 0)
    for iteration in range(2 * KEPT):
        tracker.facts(recorded_facts(iteration=iteration, total=12.0, phases=SLOW, checkpoint_every=1))
    return tmp_path


def test_people_see_phases_and_the_largest_loss_first(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    text = capsys.readouterr().out
    assert "12 s each" in text
    assert text.index("1. checkpoints") < text.index("2. weight publishing")
    assert "spec.checkpoints.every to 10" in " ".join(text.split())


def test_a_run_that_chooses_long_rounds_says_why(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "no long rounds: the best way, 2 surplus prompts, is simulated to gain 1.0%"
    (run_dir / "journal").mkdir(exist_ok=True)
    (run_dir / "journal" / "job.json").write_text(json.dumps({"longRounds": {"reason": reason}}))
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    assert f"rounds: {reason}" in capsys.readouterr().out
    assert explain_run(run_dir, everything=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["longRounds"] == reason


def test_programs_see_the_same_as_numbers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_run(run_dir, everything=True, as_json=True) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["iterations"] == list(range(KEPT, 2 * KEPT)), "the last ones are kept"
    first, second = content["findings"]
    assert first["gain"] == pytest.approx(12 / (12 - 3.6))
    assert second["gain"] is None


def write_run_job(run_dir: Path, gpus: int) -> None:
    """Write job.json of a run whose processes have so many GPUs each."""
    spec = {
        "algorithm": {"ppo": {"miniBatchSize": 16}},
        "models": {"actor": {"path": str(run_dir / "policy")}, "reward": {"function": {"module": "rewards"}}},
        "prompts": {"path": str(run_dir / "prompts.jsonl")},
        "rollout": {"batchSize": 32, "maxPromptTokens": 10, "maxResponseTokens": 64},
        "generation": {"replicas": 1, "maxBatchSize": 1, "gpusPerReplica": gpus},
        "inference": {"replicas": 4, "gpusPerReplica": gpus},
        "training": {"microBatchSize": 4, "gpusPerReplica": gpus},
    }
    written = yaml.safe_load(write_header_job(run_dir, spec).read_text())
    job = manifest.resolve(manifest.parse_stored(written), run_dir)
    (run_dir / "job.json").write_text(json.dumps(manifest.dump(job)))


def test_the_plan_of_a_run_is_compared_with_the_best_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run_job(run_dir, 1)
    assert explain_run(run_dir, everything=False, as_json=True) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["devices"] == 6
    assert plan["own_seconds"] > 1.05 * plan["best_seconds"]
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{plan['own_seconds'] / plan['best_seconds']:.2f}x as fast as this plan on up to 6 devices" in text
    assert "rlhf plan JOB --devices 6 --write PLAN" in text


def test_the_last_decision_about_the_plan_is_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain_run(run_dir, everything=False, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["planDrift"] == ""
    facts = {REPLANNING_KEY: {"words": "iterations take 2 s instead of the predicted 1 s: the plan stays"}}
    (run_dir / "journal" / "job.json").write_text(json.dumps(facts))
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.endswith("plan for spec.devices: iterations take 2 s instead of the predicted 1 s: the plan stays")


def test_processes_that_share_cores_are_not_compared(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run_job(run_dir, 0)
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    assert "plan: not compared: processes without GPUs share cores" in " ".join(capsys.readouterr().out.split())


def test_a_run_without_a_readable_job_says_why_no_plan_is_compared(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "job.json").write_text("{")
    assert explain_run(run_dir, everything=False, as_json=False) == 0
    assert "plan: not compared: job.json cannot be read" in capsys.readouterr().out


def test_a_restart_goes_on_and_takes_its_first_iteration_again(run_dir: Path) -> None:
    tracker = FactsJsonl(run_dir, KEPT + 1)
    tracker.facts(recorded_facts(iteration=KEPT + 1, total=3.0))
    facts = read_facts(run_dir / FILE)
    assert [profile.iteration for profile in facts] == [KEPT, KEPT + 1]
    assert facts[-1].total == 3.0


def test_lines_of_another_version_and_torn_ones_are_left_out(run_dir: Path) -> None:
    line = recorded_facts(iteration=99).model_dump() | {"version": 2}
    with (run_dir / FILE).open("a") as file:
        file.write(json.dumps(line) + '\n{"version": 1, "iter')
    assert [profile.iteration for profile in read_facts(run_dir / FILE)] == list(range(KEPT, 2 * KEPT))


def test_a_folder_without_a_run_and_a_run_without_facts_say_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no such folder"):
        explain_run(tmp_path / "none", everything=False, as_json=False)
    (tmp_path / "journal").mkdir()
    with pytest.raises(RunError, match=r"facts.jsonl has no iteration"):
        explain_run(tmp_path, everything=False, as_json=False)
