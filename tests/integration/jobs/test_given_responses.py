"""Jobs that generate nothing, as real processes: killed and resumed, they end with the same weights.

The next job accepts these weights as a model folder.
"""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.support import algorithms
from tests.support.model_folders import models
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(1800)

SECONDS = 300.0
"""Seconds for one wait."""
ALGORITHMS = ("sft", "dpo")
"""The simplest algorithm without generation, and the one with most parts: pairs, and a reference scored by inference
workers.
"""


def write_job(folder: Path, algorithm: str) -> Path:
    """Write a model, its data file, and job.yaml: the response, or the better one, is the prompt reversed."""
    folder.mkdir(parents=True)
    models.write_policy(folder / "policy", "llama")
    rng, lines = random.Random(3), []
    for _ in range(40):
        prompt = "".join(rng.choice("abc012") for _ in range(4))
        lines.append({"prompt": prompt, "response": prompt[::-1], "chosen": prompt[::-1], "rejected": prompt + "f"})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec: dict[str, Any] = {
        "algorithm": algorithms.member(algorithm, epochs=1),
        "iterations": 8,
        "deterministic": True,
        "models": {"actor": {"path": "policy"}},
        "prompts": {"path": "data.jsonl"},
        "rollout": {"batchSize": 16, "maxPromptTokens": 16, "maxResponseTokens": 16},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "optimizer": {"learningRate": 2e-3}},
        "checkpoints": {"path": "checkpoints", "every": 3, "keep": 9},
        "runPolicy": {"backoffLimit": 1000},
    }
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "given"}, "spec": spec}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def start(manifest: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "rlhf_cli.main",
        "run",
        str(manifest),
        "--run-dir",
        str(manifest.parent / "run"),
        *more,
    ]
    with (manifest.parent / "output.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def lines_of(manifest: Path) -> list[dict[str, Any]]:
    file = manifest.parent / "run" / "metrics.jsonl"
    whole = file.read_text().rpartition("\n")[0] if file.exists() else ""  # a line may be incomplete
    return [json.loads(line) for line in whole.splitlines()]


def finish(process: subprocess.Popen[bytes], manifest: Path) -> None:
    assert process.wait(SECONDS) == 0, (manifest.parent / "output.txt").read_text()[-3000:]


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_job_of_given_responses_is_killed_and_resumed_to_the_same_weights(algorithm: str, tmp_path: Path) -> None:
    whole, killed = write_job(tmp_path / "whole", algorithm), write_job(tmp_path / "killed", algorithm)
    finish(start(whole), whole)
    process, deadline = start(killed), time.monotonic() + SECONDS
    while len(lines_of(killed)) < 4:
        assert process.poll() is None, (killed.parent / "output.txt").read_text()[-3000:]
        assert time.monotonic() < deadline, "waited for the fourth iteration"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # its children end with it
    process.wait(SECONDS)
    finish(start(killed, "--resume"), killed)
    folders = [manifest.parent / "checkpoints" / "iteration-000008" / "actor" for manifest in (whole, killed)]
    first, second = (
        {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()} for folder in folders
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [line["loss"] for line in lines_of(whole)]
    assert losses[-1] < losses[0]
    _, info = AutoModelForCausalLM.from_pretrained(folders[0], output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
