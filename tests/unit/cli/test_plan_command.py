"""`rlhf plan` forecasts the gain of fusion from assumptions or from measurements of the last run."""

import json
import shutil
import struct
from pathlib import Path

import pytest
from tests.support.manifests.header_job import rlhf, write_header_job

from rlhf_cli.length_window_plan import LengthWindowPlan
from rlhf_cli.long_rounds_plan import LongRoundsPlan
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.storage.journal import frame
from rlhf_coordinator.storage.journal_pb2 import Record, TokenizedPrompt
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.fitted_costs import DecodeLines, PassFormula
from rlhf_planner.inter_stage.length_window import WindowForecast
from rlhf_planner.inter_stage.long_rounds import RoundsChoice, RoundsWay
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast, SpeculationPoint

RECORDED_FACTS = Path(__file__).parents[2] / "support" / "jobs" / "recorded_facts" / "small-batches.jsonl"
SPEC = {
    "algorithm": {"grpo": {"groupSize": 2, "miniBatchSize": 32}},
    "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
    "prompts": {"path": "prompts.jsonl"},
    "rollout": {"batchSize": 32, "maxPromptTokens": 10, "maxResponseTokens": 64},
    "generation": {"replicas": 3, "maxBatchSize": 16},
    "inference": {"replicas": 0},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_header_job(tmp_path, SPEC)


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return rlhf(monkeypatch, "plan", "job.yaml", *arguments)


def a_run(folder: Path, speculation: SpeculationForecast = NO_SPECULATION) -> None:
    """Create a run that measured 1 s per step, 3 s per score, and had 24 responses of 8 tokens and 8 of 64."""
    costs = StageCosts(
        DecodeLines((1,), (1.0,), (0.0,)), 16, score=PassFormula(per_sample=3.0), score_batch=1, speculation=speculation
    )
    journal = folder / "journal"
    journal.mkdir(parents=True)
    (journal / "job.json").write_text(json.dumps({"base": 0, JOB_KEY: {"costs": costs.document()}}))
    records = [
        Record(finished=pb.FinishedSample(key=pb.SampleKey(sample=index), tokens=pb.Array(data=b"\0" * 4 * length)))
        for index, length in enumerate([8] * 24 + [64] * 8)
    ]
    (journal / "iteration-000000.log").write_bytes(b"".join(frame(record) for record in records))
    prompt = Record(prompt=TokenizedPrompt(line=1, tokens=b"\0" * 4 * 7))
    (journal / "prompts-0.log").write_bytes(frame(prompt))


def test_before_the_first_run_every_assumption_is_said(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch) == 0
    said = capsys.readouterr().out
    assert "without fusion" in said
    assert "assumption: costs are assumed, not measured: a roofline of 1 CPU core per worker" in said
    assert "assumption: response lengths" in said


def test_after_a_run_its_costs_and_lengths_count(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(job.parent / "runs" / "tiny-20260101-000000")
    assert plan(monkeypatch, "--json") == 0
    fusion = json.loads(capsys.readouterr().out)["fusion"]
    assert fusion["assumptions"] == []
    assert fusion["threshold"] > 0
    assert fusion["seconds"] < 0.85 * fusion["offSeconds"]
    assert fusion["offSeconds"] == pytest.approx(64 + 11 * 3, rel=0.05)  # 64 steps, then 32 scores on 3 workers
    assert plan(monkeypatch, "--picture", "fused.svg") == 0
    said = capsys.readouterr().out
    assert "◀ chosen" in said
    assert "assumption" not in said
    assert "Without fusion" in (job.parent / "fused.svg").read_text()


def test_a_journal_file_that_cannot_be_read_is_left_out_and_named(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(job.parent / "runs" / "tiny-20260101-000000")
    journal = job.parent / "runs" / "tiny-20260101-000000" / "journal"
    for name in ("iteration-000001.log", "prompts-1.log"):
        (journal / name).mkdir()  # reading it fails for every user, root included
    assert plan(monkeypatch, "--json") == 0
    assumptions = json.loads(capsys.readouterr().out)["fusion"]["assumptions"]
    assert [text.split(": ", 1)[1] for text in assumptions] == [
        f"{Path('runs/tiny-20260101-000000/journal') / name} cannot be read (Is a directory)"
        for name in ("prompts-1.log", "iteration-000001.log")
    ]


def test_decoding_beside_training_is_forecast_by_the_last_run(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--json") == 0
    assert "no run of this job" in json.loads(capsys.readouterr().out)["overlapTraining"]["missing"]
    folder = job.parent / "runs" / "tiny-20260101-000000"
    a_run(folder)
    times = {"seconds/generation_and_inference": 4.0, "training/train/seconds": 2.0, "seconds/publish": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 0, **times}) + "\n")
    assert plan(monkeypatch, "--json") == 0
    said = json.loads(capsys.readouterr().out)["overlapTraining"]
    assert said == {"mode": "Disabled", "disabledSeconds": 6.5, "enabledSeconds": 4.5}
    assert plan(monkeypatch) == 0
    assert "predicted 6.5 s with overlapTraining Disabled, 4.5 s with Enabled (1.44x)" in capsys.readouterr().out


def test_each_way_of_long_rounds_is_forecast_where_the_job_chooses(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = job.parent / "runs" / "tiny-20260101-000000"
    a_run(run)
    (run / "journal" / "iteration-000099.log").mkdir()
    sizes = ("spec.rollout.batchSize=16", "spec.algorithm.grpo.miniBatchSize=16", "spec.generation.replicas=2")
    settings = [part for setting in ("spec.rollout.longRounds=Auto", *sizes) for part in ("--set", setting)]
    assert plan(monkeypatch, "--json", *settings) == 0
    rounds = json.loads(capsys.readouterr().out)["longRounds"]
    none, *ways = rounds["ways"]
    assert [way["surplusPrompts"] for way in (none, *ways)] == [0, 1, 2, 4]
    assert all(way["samplesPerSecond"] == pytest.approx(none["samplesPerSecond"] / (1 - way["gain"])) for way in ways)
    assert "no run has measured an iteration: training is taken to cost nothing" in rounds["assumptions"]
    assert any("iteration-000099.log cannot be read" in words for words in rounds["assumptions"])
    best = max(ways, key=lambda way: way["gain"])
    worth = best["gain"] > max(0.03, best["standardError"])
    assert rounds["surplusPrompts"] == (best["surplusPrompts"] if worth else 0)


def test_sorted_windows_are_forecast_where_the_job_has_them(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(job.parent / "runs" / "tiny-20260101-000000")
    assert plan(monkeypatch, "--json", "--set", "spec.prompts.lengthWindow=3") == 0
    window = json.loads(capsys.readouterr().out)["lengthWindow"]
    assert window["window"] == 3
    assert window["samplesPerSecond"] == pytest.approx(window["samplesPerSecondInOrder"] / (1 - window["gain"]))
    assert "no run has measured an iteration: training is taken to cost nothing" in window["assumptions"]
    assert plan(monkeypatch, "--json") == 0
    assert "lengthWindow" not in json.loads(capsys.readouterr().out)


def test_a_forecast_of_sorted_windows_stands_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    LengthWindowPlan(WindowForecast(5, 10.0, 12.5, 0.2, 0.01, "windows of 5 iterations"), ("assumed",)).print()
    printed = capsys.readouterr().out
    assert "predicted 10 samples/s in order, 12.5 sorted (1.25x)" in printed
    assert "assumption: assumed" in printed
    LengthWindowPlan(None, missing="the models are not on this disk").print()
    assert "no forecast: the models are not on this disk" in capsys.readouterr().out


def test_the_ways_of_long_rounds_stand_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (RoundsWay(0, 1, 10.0, 0.0, 0.0), RoundsWay(4, 5, 12.5, 0.2, 0.01))
    LongRoundsPlan(RoundsChoice(4, ways, "long rounds with 4 surplus prompts"), ("assumed",)).print()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["none", "1", "10"] in lines
    assert ["4", "5", "12.5", "20.0%", "1.0%"] in lines
    assert ["assumption:", "assumed"] in lines
    LongRoundsPlan(None, missing="the models are not on this disk").print()
    assert "no forecast: the models are not on this disk" in capsys.readouterr().out


def test_a_job_without_the_choice_has_no_forecast_of_long_rounds(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--json") == 0
    assert "longRounds" not in json.loads(capsys.readouterr().out)


def test_what_drafts_give_stands_beside_the_same_job_without_them(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--json", "--set", "spec.generation.speculation.mode=Disabled") == 0
    plain = json.loads(capsys.readouterr().out)["fusion"]
    assert plain["speculation"] is None
    assert plan(monkeypatch, "--json", "--set", "spec.generation.speculation.mode=Auto") == 0
    drafted = json.loads(capsys.readouterr().out)["fusion"]
    assert any("every other drafted token" in words for words in drafted["assumptions"])
    assert drafted["speculation"]["disabled"]["seconds"] == plain["seconds"]
    assert drafted["seconds"] < plain["seconds"]
    gains = [point["gain"] for point in drafted["speculation"]["points"]]
    assert gains[0] > 1.2
    assert min(gains) >= 1, "zero is a candidate"
    forecast = SpeculationForecast((SpeculationPoint(1, 3.0, 1.5, 1.0),))
    a_run(job.parent / "runs" / "tiny-20260101-000000", forecast)
    assert plan(monkeypatch, "--set", "spec.generation.speculation.mode=Auto") == 0
    said = capsys.readouterr().out
    assert "by batch: 1: 3.00 (2.00x)" in said
    assert "with generation.speculation.mode Disabled" in said
    assert "assumption" not in said


def test_memory_of_roles_that_take_turns_is_told_phase_by_phase(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    together = ("--set", "spec.placement=Colocated")
    assert plan(monkeypatch, "--json", *together) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["phases"]["peak"] == "decoding and scoring"
    assert document["phases"]["awake"]["training"] == {"weights": 4000, "gradients": 4000, "optimizer": 8000}
    assert [process["group"] for process in document["processes"]] == ["coordinator", *["generation"] * 3]
    assert plan(monkeypatch, *together) == 0
    assert "training: 16 KiB (weights 3.9 KiB" in capsys.readouterr().out


def test_what_is_not_known_is_said(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(monkeypatch, "--set", "spec.models.actor.path=org/name") == 0
    assert "no forecast: the models of actor" in capsys.readouterr().out
    assert plan(monkeypatch, "--set", "spec.models.actor.path=org/name", "--picture", "x.svg") == 2
    assert "nothing to draw" in capsys.readouterr().err
    assert plan(monkeypatch, "--picture", "x.pdf") == 2
    assert "must end in .svg or .png" in capsys.readouterr().err


def test_a_fixed_plan_is_forecast_as_it_is_set(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("--set", "spec.fusion.interStage={mode: Fixed, threshold: 4, pool: 2}")
    assert plan(monkeypatch, *changes, "--json") == 0
    fusion = json.loads(capsys.readouterr().out)["fusion"]
    assert (fusion["threshold"], fusion["pool"]) == (4, 2)


def test_training_layouts_stand_beside_each_other_and_one_that_does_not_fit_is_told(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ("--set", "spec.training.parallelism.data=2")
    assert plan(monkeypatch, *ranks, "--device-memory", "80") == 0
    said = capsys.readouterr().out
    assert "Training layouts of 2 ranks" in said
    assert "data 2, shard 2" in said
    assert "this job" in said
    assert "does not fit" not in said

    assert plan(monkeypatch, *ranks, "--json", "--device-memory", "0.001") == 0
    training = json.loads(capsys.readouterr().out)["training"]
    assert (training["layout"]["data"], training["layout"]["fits"], training["problem"]) == (2, True, "")
    assert {(layout["pipeline"], layout["data"], layout["shard"]) for layout in training["layouts"]} == {
        (1, 2, 1),
        (1, 2, 2),
        (2, 1, 1),
    }
    assert plan(monkeypatch) == 0
    assert "Training layouts" not in capsys.readouterr().out, "one rank, and no device was named"


def test_moments_in_host_memory_are_told_beside_the_memory_of_the_device(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = ("--set", "spec.training.parallelism.offloadOptimizer=true", "--json")
    assert plan(monkeypatch, *host) == 0
    found = json.loads(capsys.readouterr().out)
    processes = {process["name"]: process for process in found["processes"]}
    moments = processes["training-0"]["memory"]["weights"] * 2
    assert processes["training-0"]["memory_host"] == {"optimizer": moments}
    assert processes["generation-0"]["memory_host"] == {}
    of_layouts = {layout["offloadOptimizer"]: layout["host_memory"] for layout in found["training"]["layouts"]}
    assert of_layouts == {False: 0, True: moments}


def test_a_layout_that_does_not_fit_ends_the_plan_with_what_would(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4000000]}}).encode()
    (job.parent / "policy" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert plan(monkeypatch, "--device-memory", "0.012") == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit: a training rank needs 0.0149 GiB" in said
    assert "and a device has 0.012 GiB: use spec.training.parallelism: data 2, shard 2 (2 ranks that need" in said


def test_a_job_with_a_critic_says_what_its_overlap_would_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    models = {**SPEC["models"], "critic": {"path": "policy"}, "reference": {"path": "policy"}}  # type: ignore[dict-item]
    write_header_job(tmp_path, {**SPEC, "algorithm": {"ppo": {"miniBatchSize": 32}}, "models": models})
    assert plan(monkeypatch) == 0
    assert "no forecast: no run of this job" in capsys.readouterr().out
    run = tmp_path / "runs" / "tiny-20260101-000000"
    run.mkdir(parents=True)
    shutil.copy(RECORDED_FACTS, run / "facts.jsonl")
    assert plan(monkeypatch) == 0
    said = capsys.readouterr().out
    assert "with criticOverlap Disabled" in said
    assert "Auto would choose Enabled; the job has Disabled" in said
    assert "assumption: policy and critics train one after the other" in said
    assert plan(monkeypatch, "--json", "--set", "spec.training.criticOverlap=Auto") == 0
    overlap = json.loads(capsys.readouterr().out)["criticOverlap"]
    assert (overlap["mode"], overlap["auto"]) == ("Auto", "Enabled")
    assert overlap["enabledSeconds"] < overlap["disabledSeconds"]
