"""`rlhf plan --devices` prints the best plans, writes a manifest that validates, and refuses what it cannot plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.manifests.header_job import rlhf, write_header_job

from rlhf_api import manifest
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, PassFormula

SPEC = {
    "algorithm": {"ppo": {"miniBatchSize": 16}},
    "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
    "prompts": {"path": "prompts.jsonl"},
    "rollout": {"batchSize": 32, "maxPromptTokens": 10, "maxResponseTokens": 64},
    "generation": {"replicas": 3, "maxBatchSize": 16},
    "training": {"microBatchSize": 4},
}
TINY = ("--devices", "1", "--device-memory", "0.001")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_header_job(tmp_path, SPEC)


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return rlhf(monkeypatch, "plan", "job.yaml", *arguments)


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_best_plans_are_printed_with_sources_and_a_picture(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--devices", "4") == 0
    said = capsys.readouterr().out
    assert "Plans of up to 4 devices" in said
    assert "own" in said
    assert "the job's own plan needs 5 devices" in said
    assert "generation" in said
    assert "note: no --device-memory: memory limits no plan" in said
    assert "assumed: a roofline of one CPU core" in said
    assert "config.json of actor, critic states no known shape" in said


def test_the_best_plan_is_written_as_a_manifest_that_validates(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--devices", "6", "--device-memory", "1", "--json", "--write", "best.yaml") == 0
    found = answer(capsys)
    best = found["plans"][0]
    assert found["devices"] == 6
    assert best["devices"] <= 6
    assert best["gain"] == pytest.approx(found["own"]["seconds"] / best["seconds"])
    assert [each["seconds"] for each in found["plans"]] == sorted(each["seconds"] for each in found["plans"])
    assert {stage["source"] for stage in best["stages"].values()} == {"assumed"}
    written = manifest.load(job.parent / "best.yaml")
    assert written.spec.placement == best["placement"]
    assert written.spec.generation.replicas == best["generation"]["replicas"]
    assert written.spec.training.parallelism.ranks <= 6
    assert written.spec.prompts.path == "prompts.jsonl", "as the user wrote it"
    assert "seed" not in yaml.safe_load((job.parent / "best.yaml").read_text())["spec"]
    assert rlhf(monkeypatch, "plan", "best.yaml", "--devices", "6", "--device-memory", "1", "--json") == 0
    again = answer(capsys)
    assert again["own"]["seconds"] == pytest.approx(best["seconds"])
    assert again["own"]["problem"] == ""


def test_a_plan_says_which_fields_it_leaves_out(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template = '{"spec": {"containers": [{"name": "worker", "image": "mine"}]}}'
    options = ("--devices", "2", "--set", f"spec.training.template={template}")
    assert plan(monkeypatch, *options, "--write", "best.yaml") == 0
    assert "Colocated plans leave out spec.training.template" in capsys.readouterr().out
    written = manifest.load(job.parent / "best.yaml").spec
    assert bool(written.training.template) == (written.placement == "Dedicated")


def test_costs_of_a_run_and_of_a_file_count(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = job.parent / "runs" / "tiny-20260101-000000" / "journal"
    journal.mkdir(parents=True)
    stage = StageCosts(DecodeLines((1,), (1.0,), (0.0,)), 16, score=PassFormula(per_sample=3.0), score_batch=1)
    (journal / "job.json").write_text(json.dumps({"base": 0, JOB_KEY: {"costs": stage.document()}}))
    assert plan(monkeypatch, "--devices", "4", "--json") == 0
    learned = answer(capsys)["own"]
    assert learned["stages"]["generate"]["seconds"] > 32
    times = [{"tokens": 1, "seconds": 100.0}]
    document = {"layers": [{"role": role, "source": "measured", "times": times} for role in ("actor", "critic")]}
    (job.parent / "costs.json").write_text(json.dumps(document))
    assert plan(monkeypatch, "--devices", "4", "--costs", "costs.json", "--json") == 0
    measured = answer(capsys)["own"]
    assert measured["stages"]["train"]["seconds"] > 1000 * learned["stages"]["train"]["seconds"]
    (job.parent / "costs.json").rename(journal.parent / "costs.json")
    assert plan(monkeypatch, "--devices", "4", "--json") == 0
    found = answer(capsys)
    assert found["own"]["stages"]["train"]["seconds"] == measured["stages"]["train"]["seconds"]
    assert any("costs of training are measured" in note for note in found["notes"])
    facts = (journal / "job.json").read_bytes()
    (journal / "job.json").unlink()
    assert plan(monkeypatch, "--devices", "4", "--json") == 0
    alone = answer(capsys)["own"]["stages"]["train"]
    assert alone["seconds"] == measured["stages"]["train"]["seconds"], "a run may have measured training alone"
    (journal / "job.json").write_bytes(facts)
    (journal.parent / "costs.json").write_text("{")
    assert plan(monkeypatch, "--devices", "4", "--json") == 0
    assert answer(capsys)["own"] == learned, "an unreadable file teaches nothing"


def test_without_devices_the_layouts_of_the_job_are_listed_as_before(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--json", "--device-memory", "1") == 0
    assert answer(capsys)["training"]["layout"]["pipeline"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--costs", "costs.json"), "needs --devices N"),
        (("--write", "best.yaml"), "needs --devices N"),
        (("--devices", "0"), "'--devices': Input should be greater than or equal to 1"),
        (("--devices", "4", "--picture", "a.svg"), "draws one plan"),
        (("--devices", "4", "--costs", "none.json"), "--costs none.json: No such file"),
        (("--devices", "4", "--costs", "job.yaml"), "--costs job.yaml: the document"),
        (("--devices", "4", "--write", "job.yaml"), "is the manifest itself"),
        (("--devices", "4", "--write", "best.txt"), "must end in .yaml or .yml"),
        (("--devices", "4", "--write", "policy/best.yaml"), "relative paths of a manifest start at its folder"),
        (
            (*TINY, "--set", "spec.rollout.maxResponseTokens=100000"),
            "no plan of up to so many devices of 0.001 GiB fits",
        ),
        (("--devices", "4", "--set", "spec.models.actor.path=org/name"), "the models of actor, critic are not on this"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert plan(monkeypatch, *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
