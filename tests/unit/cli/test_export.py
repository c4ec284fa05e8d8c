"""`rlhf export` writes a Hugging Face folder with exactly the weights, a model card without local details, and an
upload."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tests.support.model_folders import models
from tests.support.model_folders.model_hub import TOKEN, model_hub

from rlhf_api.job import RLHFJob
from rlhf_cli.hub.export import ExportOptions, export
from rlhf_cli.hub.model_card import is_hub_id
from rlhf_cli.local.errors import RunError
from rlhf_common import control_pb2 as pb
from rlhf_coordinator.storage import checkpoint

SPEC: dict[str, Any] = {
    "algorithm": {"ppo": {"miniBatchSize": 8}},
    "iterations": 2,
    "seed": 7,
    "models": {"reward": {"endpoint": {"url": "https://user:s3cret@judge.internal/score"}}},
    "prompts": {"path": "/home/someone/prompts.jsonl"},
    "rollout": {"batchSize": 8, "temperature": 0.8, "topP": 0.9, "maxResponseTokens": 30},
    "training": {"microBatchSize": 4},
}


def described(folder: Path, file: Path) -> pb.CheckpointFile:
    """Return a rank's description of a file that it has written."""
    content = file.read_bytes()
    return pb.CheckpointFile(
        path=str(file.relative_to(folder)), bytes=len(content), sha256=hashlib.sha256(content).hexdigest(),
        model="actor", parameters=list(load_file(file)),
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run with two checkpoints of two stages each; the first is the best."""
    policy, path = models.write_policy(tmp_path / "models" / "policy", "llama", seed=1), tmp_path / "run/checkpoints"
    (policy / "generation_config.json").unlink(missing_ok=True)
    weights = load_file(policy / "model.safetensors")
    for version in (1, 2):
        folder = checkpoint.prepare(path, version)
        (folder / "actor").mkdir()
        halves = sorted(weights)[::2], sorted(weights)[1::2]
        for stage, names in enumerate(halves):
            file = folder / f"actor/model-stage-{stage:05d}.safetensors"
            save_file({name: weights[name] * version for name in names}, file)
        files = [described(folder, file) for file in sorted((folder / "actor").iterdir())]
        sources = {"actor": checkpoint.SourceFolder(str(policy), "spec.models.actor.path")}
        checkpoint.finish(folder, path, version, [pb.CheckpointResult(files=files)], sources, {})
    checkpoint.name_best(path, 1, 0.75)
    spec = {**SPEC, "checkpoints": {"path": str(path)}}
    spec["models"] = {**SPEC["models"], "actor": {"path": str(policy)}, "critic": {"path": str(policy)}}
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    run = tmp_path / "run"
    (run / "job.json").write_text(RLHFJob.model_validate(job).model_dump_json(by_alias=True, exclude_none=True))
    (run / "metrics.jsonl").write_text("")
    summary = {"weight_version": 2, "reward_first": 0.125, "reward_last": 0.5, "samples": 16, "seconds": 3.5}
    (run / "summary.json").write_text(json.dumps(summary))
    return run


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_folder_loads_with_the_very_weights_its_tokenizer_and_how_it_was_sampled(
    run_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    assert export(ExportOptions(run_dir, target)) == 0
    assert {item.name for item in target.iterdir()} >= {
        "README.md", "config.json", "generation_config.json", "tokenizer.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json",
    }  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    source = load_file(tmp_path / "models/policy/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value * 2) for name, value in source.items())
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.8, 0.9)
    assert model.generation_config.max_new_tokens == 30
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer.decode(tokenizer("1+1=").input_ids) == "1+1="
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() * 4 for value in source.values())
    assert not list(tmp_path.glob(".tmp-*"))


def test_files_of_sub_folders_come_too(run_dir: Path, tmp_path: Path) -> None:
    actor = run_dir / "checkpoints/iteration-000002/actor"
    (actor / "additional_chat_templates").mkdir()
    (actor / "additional_chat_templates/rag.jinja").write_text("{{ documents }}")
    assert export(ExportOptions(run_dir, tmp_path / "export")) == 0
    assert (tmp_path / "export/additional_chat_templates/rag.jinja").read_text() == "{{ documents }}"


def test_the_card_says_what_the_run_was_and_nothing_of_the_machine(run_dir: Path, tmp_path: Path) -> None:
    export(ExportOptions(run_dir, tmp_path / "newest"))
    front, text = card_of(tmp_path / "newest")
    assert front == {"library_name": "transformers", "tags": ["rlhf", "ppo"], "pipeline_tag": "text-generation"}
    for words in ("| base model | policy |", "| iterations | 2 of 2 |", "| seed | 7 |", "reward: endpoint", "0.125"):
        assert words in text
    assert not [word for word in ("s3cret", "judge.internal", "someone", str(tmp_path)) if word in text]
    assert "evaluation" not in text
    export(ExportOptions(run_dir, tmp_path / "best", best=True))
    _, text = card_of(tmp_path / "best")
    assert "| iterations | 1 of 2 |" in text
    assert "the best of the run | 0.75 |" in text
    assert "0.125" not in text, "rewards are those of the whole run, which this is not the end of"


@pytest.mark.parametrize("source", ["/models/policy", "policy", "./policy", "../x/policy", "a/b/c", "~me/policy"])
def test_a_path_is_no_hub_id(source: str) -> None:
    assert not is_hub_id(source)
    assert is_hub_id("team/tiny-policy")


def damage(run_dir: Path) -> None:
    file = run_dir / "checkpoints/iteration-000002/actor/model-stage-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), {}, r"RUN .*there is no run in it"),
        (lambda run: (run / "job.json").unlink(), {}, r"RUN .*job.json cannot be read"),
        (lambda run: (run / "job.json").write_text("{}"), {}, r"job.json is not of this version .*use the version"),
        (lambda run: None, {"iteration": 5}, r"--iteration 5: .* no checkpoint of iteration 5; it has 1, 2"),
        (lambda run: (run / "checkpoints/best.json").unlink(), {"best": True}, "--best: .*names no best checkpoint"),
        (lambda run: None, {"best": True, "iteration": 1}, "--best and --iteration: give one"),
        (damage, {}, "model-stage-00001.safetensors has another SHA-256; give another by --iteration"),
        (lambda run: None, {"push": "tiny"}, "--push 'tiny': must be OWNER/NAME"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(
    run_dir: Path, tmp_path: Path, change: Any, options: dict[str, Any], message: str
) -> None:
    change(run_dir)
    with pytest.raises(RunError, match=message):
        export(ExportOptions(run_dir, tmp_path / "export", **options))
    assert not (tmp_path / "export").exists()


def test_a_folder_with_something_in_it_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(RunError, match="is not empty"):
        export(ExportOptions(run_dir, tmp_path / "full"))
    assert [item.name for item in (tmp_path / "full").iterdir()] == ["mine"]


def pushed(run_dir: Path, target: Path, address: str, token: str) -> subprocess.CompletedProcess[str]:
    """Run `rlhf export --push` as a process, because huggingface_hub reads its environment at import."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_ENDPOINT": address, "HF_TOKEN": token, "HF_HOME": str(target.with_name("hf"))}
    command = [sys.executable, "-m", "rlhf_cli.main", "export", str(run_dir), "--to", str(target), "--push"]
    return subprocess.run(
        [*command, "team/tiny"], env=inherited | own, capture_output=True, text=True, timeout=180, check=False
    )


@pytest.mark.full
def test_an_upload_brings_a_hub_what_is_in_the_folder(run_dir: Path, tmp_path: Path) -> None:
    with model_hub() as hub:
        refused = pushed(run_dir, tmp_path / "refused", hub.address, "hf_another")
        done = pushed(run_dir, tmp_path / "export", hub.address, TOKEN)
    assert done.returncode == 0, done.stderr
    assert f"uploaded to {hub.address}/team/tiny" in done.stdout.replace("\n", "")
    assert hub.private == {"team/tiny": True}
    assert hub.messages == ["tiny, iteration 2"]
    assert hub.files == {item.name: item.read_bytes() for item in (tmp_path / "export").iterdir()}
    assert refused.returncode == 1
    assert "--push team/tiny: the hub does not know the token; set HF_TOKEN" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "hf_another" not in refused.stderr
