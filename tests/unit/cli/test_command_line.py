"""Exit codes and messages of `rlhf`: a user's mistake gives one message and no traceback."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.manifests.header_job import rlhf, write_header_job
from tests.support.model_folders.models import write_policy

SPEC = {
    "algorithm": {"grpo": {"groupSize": 2, "miniBatchSize": 8}},
    "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
    "prompts": {"path": "prompts.jsonl"},
    "rollout": {"batchSize": 8, "maxPromptTokens": 10, "maxResponseTokens": 30},
    "generation": {"replicas": 2, "maxBatchSize": 4},
    "training": {"microBatchSize": 4, "parallelism": {"pipeline": 2}},
}

INSTANCE = {
    "devices": 1,
    "pipelines": [
        {"name": "actor", "stageDevices": [0], "microbatches": 1, "forward": 1, "backward": 2, "activation": 1}
    ],
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_header_job(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "missing.yaml"], 2, "missing.yaml"),
        (["run", "job.yaml", "--set", "spec.iterations=0"], 2, "spec.iterations"),
        (["run", "job.yaml", "--set", "iterations=1"], 2, "--set 'iterations=1'"),
        (["run", "job.yaml", "--set", "spec.prompts.path=gone.jsonl"], 22, "spec.prompts.path"),
        (["run", "job.yaml", "--set", "spec.models.actor.path=./gone"], 21, "spec.models.actor.path"),
        (
            ["run", "job.yaml", "--set", "spec.models.reward.function.file=gone.py"],
            2,
            "spec.models.reward.function.file",
        ),
        (["run", "job.yaml", "--set", "spec.training.gpusPerReplica=64"], 2, "spec.training.gpusPerReplica"),
        (["run", "job.yaml", "--resume"], 2, "no run of job 'tiny'"),
        (
            ["run", "job.yaml", "--resume", "--run-dir", "gone"],
            2,
            "--resume --run-dir {here}/gone: there is no such folder",
        ),
        (["run", "job.yaml", "--resume", "--run-dir", "empty"], 2, "there is no run in it"),
        (["run", "job.yaml", "--resume", "--run-dir", "job.yaml"], 2, "is a file, not a folder"),
        (["run", "job.yaml", "--run-dir", "job.yaml"], 2, "--run-dir {here}/job.yaml: is a file; give a folder"),
        (
            ["run", "job.yaml", "--set", "spec.iterations=[1"],
            2,
            "--set 'spec.iterations=[1': the value is not valid YAML",
        ),
        (["run", "empty"], 2, "empty: 1 problem"),
        (["validate", "bytes.yaml"], 2, "bytes.yaml: 1 problem"),
        (["validate", "broken.json"], 2, "broken.json: 1 problem"),
        (
            ["plan", "job.yaml", "--set", "spec.generation.template={spec: {hostNetwork: true}}"],
            2,
            "spec.generation.template.spec.hostNetwork\n  given  true\n  must be false",
        ),
        (["run", "job.yaml", "--port", "99999"], 2, "99999"),
        (["frobnicate"], 2, "frobnicate"),
        (["validate", "job.yaml", "--for", "moon"], 2, "'moon' is no place to run: use cluster or local"),
        (["plan", "job.yaml", "--picture", "plan.pdf"], 2, "--picture plan.pdf: must end in .svg or .png"),
        (["plan", "job.yaml", "--picture", "gone/plan.svg"], 2, "--picture gone/plan.svg: there is no folder gone"),
        (["schedule", "solve", "--instance", "gone.json"], 2, "gone.json"),
        (["schedule", "solve", "--instance", "broken.json"], 2, "--instance broken.json: not JSON"),
        (["schedule", "solve", "--instance", "other.json"], 2, "--instance other.json: devices"),
        (["schedule", "solve", "--instance", "other.json", "--cache", "job.yaml"], 2, "'job.yaml' is a file"),
        (["schedule", "solve", "--instance", "other.json", "--picture", "a.pdf"], 2, "--picture a.pdf: must end in"),
        (
            ["schedule", "check", "--instance", "instance.json", "--schedule", "other.json"],
            2,
            "--schedule other.json: dev",
        ),
        (["samples", "gone"], 2, "RUN gone: there is no such folder; {here}/runs has no runs either"),
        (["samples", "empty"], 2, "RUN empty: there is no run in it"),
        (["samples", "job.yaml"], 2, "RUN job.yaml: is a file, not a folder"),
        (["samples", "--best", "0"], 2, "--best 0: give a number of at least 1"),
        (["samples", "--iteration", "-1"], 2, "--iteration -1: give a number of at least 0"),
        (["samples", "--sample", "1", "--worst", "2"], 2, "--sample 1: means one sample"),
        (["samples", "--parquet", "all.parquet", "--iteration", "1"], 2, "leave out the other options"),
        (["samples", "--parquet", "gone/all.parquet"], 2, "--parquet gone/all.parquet: there is no folder gone"),
        (["get", "--kubeconfig", "gone"], 2, "--kubeconfig gone: there is no such file"),
        (["get", "--kubeconfig", "empty"], 2, "--kubeconfig empty: is a folder"),
    ],
)
def test_mistakes(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    (job.parent / "empty").mkdir()
    (job.parent / "bytes.yaml").write_bytes(b"\xff\xfe")
    (job.parent / "broken.json").write_text("{")
    (job.parent / "other.json").write_text("{}")
    (job.parent / "instance.json").write_text(json.dumps(INSTANCE))
    assert rlhf(monkeypatch, *arguments) == code
    captured = capsys.readouterr()
    said = " ".join((captured.err + captured.out).split())
    assert " ".join(message.format(here=job.parent).split()) in said
    assert "Traceback" not in said


@pytest.mark.parametrize("written", ["", "{", "[]", '{"spec": {}}'])
def test_a_run_whose_job_cannot_be_read_is_not_resumed(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    (job.parent / "run" / "journal").mkdir(parents=True)
    (job.parent / "run" / "job.json").write_text(written)
    assert rlhf(monkeypatch, "run", "job.yaml", "--resume", "--run-dir", "run") == 2
    assert "run/job.json is no job that can be read: resume by the version of rlhf that wrote it" in (
        capsys.readouterr().err
    )


def test_a_port_in_use_is_named(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert rlhf(monkeypatch, "run", "job.yaml", "--port", str(port)) == 24
    assert f"--port {port}: the address 127.0.0.1:{port} is in use" in capsys.readouterr().err


def test_validate_and_version(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert rlhf(monkeypatch, "validate", "job.yaml") == 0
    job.write_text(job.read_text() + "  checkpoints: {path: checkpoints}\n")
    assert rlhf(monkeypatch, "validate", "job.yaml") == 2, "in pods nothing is mounted there"
    write_policy(Path("policy"))
    assert rlhf(monkeypatch, "validate", "job.yaml", "--for", "local") == 0
    job.write_text(job.read_text().replace("batchSize: 8", "batchSize: eight"))
    assert rlhf(monkeypatch, "validate", "job.yaml", "--json") == 2
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["problems"][0]["field"] == "spec.rollout.batchSize"
    assert rlhf(monkeypatch, "version") == 0
    assert capsys.readouterr().out.strip()


def test_plan_says_what_would_run_where(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlhf(monkeypatch, "plan", "job.yaml", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    processes = {process["name"]: process for process in plan["processes"]}
    assert list(processes) == [
        "coordinator",
        "generation-0",
        "generation-1",
        "inference-0",
        "training-0",
        "training-1",
    ]
    # 4 samples x 40 tokens x 2 (key, value) x 2 layers x 2 heads x 8 wide x 4 bytes.
    # A generation worker that fusion releases scores, so that its device has the reference, too.
    assert processes["generation-0"]["memory"] == {
        "weights": 4000, "key-value cache": 4 * 40 * 64 * 4, "reference weights": 4000
    }  # fmt: skip
    assert processes["training-0"]["memory"] == {"weights": 2000, "gradients": 2000, "optimizer": 4000}
    assert plan["job"]["spec"]["models"]["actor"]["path"] == str(job.parent / "policy")
    assert len({process["port"] for process in plan["processes"]}) == 6
    assert not (job.parent / "runs").exists()
    assert rlhf(monkeypatch, "plan", "job.yaml", "--set", "spec.models.actor.path=org/name") == 0
    assert "actor unknown (not on this disk)" in capsys.readouterr().out


def test_help_needs_nothing_heavy() -> None:
    code = "import sys, rlhf_cli.main as m; print([n for n in sys.modules if '.' not in n])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for heavy in ("torch", "grpc", "pydantic", "numpy", "kubernetes", "kopf", "matplotlib", "transformers", "yaml"):
        assert f"'{heavy}'" not in loaded
