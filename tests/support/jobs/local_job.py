"""A small deterministic job with real components for tests and benchmarks: tiny models, prompts, reward, manifest."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.support import algorithms
from tests.support.model_folders import models

PROCESSES = ("coordinator", "generation-0", "generation-1", "inference-0", "training-0", "training-1")
"""Every process of the job."""

HOLD = "hold"
"""File beside a reward: `<record of iterations>\\n<iterations>`. A response waits for its score once that many
iterations are recorded, so that on a machine of any speed the job does not end before the test has finished.
"""
HELD = f"""\
import functools
import pathlib
import time

HOLD = pathlib.Path(__file__).with_name({HOLD!r})


def is_held():
    try:
        record, iterations = HOLD.read_text().splitlines()
        return pathlib.Path(record).read_text().count("\\n") >= int(iterations)
    except FileNotFoundError:
        return False


def held(score):
    @functools.wraps(score)
    def score_when_let_go(*given, **named):
        while is_held():
            time.sleep(0.02)
        return score(*given, **named)

    return score_when_let_go


"""
"""Code before a reward that is `@held`; it returns the same value, later."""
HELD_SECONDS = 3600
"""Time-out of a call in seconds: it waits as long as a fault takes."""

REWARD = f'''{HELD}\
@held
def score(prompt, response, record):
    """Share of characters of the response that are digits: varied, and quick to learn."""
    return sum(character.isdigit() for character in response) / max(1, len(response))
'''

EPOCHS = {"ppo": 2}
"""Passes over a batch by algorithm; 1 for others."""


def write_job(
    folder: Path,
    *,
    algorithm: str = "ppo",
    iterations: int = 8,
    seed: int = 3,
    batch: int = 16,
    responses: int = 24,
    every: int = 4,
    engine: str = "torch",
    learning_rate: float = 1e-3,
    family: str = "llama",
) -> Path:
    """Write models, prompts, reward and job.yaml below `folder`; the checkpoints go to the run folder.

    With engine vllm the heads have the size that vLLM serves on a CPU, and the job is not deterministic.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models.write_policy(folder / "policy", family, **({"head_dim": 32} if engine == "vllm" else {}))
    rng = random.Random(seed)
    texts = ("".join(rng.choice("abcdef012345") for _ in range(rng.randint(2, 10))) for _ in range(40))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    (folder / "reward.py").write_text(REWARD)
    chosen = algorithms.member(algorithm, epochs=EPOCHS.get(algorithm, 1))
    spec: dict[str, Any] = {
        "algorithm": chosen,
        "iterations": iterations,
        "seed": seed,
        "deterministic": engine != "vllm",
        "models": {
            "actor": {"path": "policy"},
            "critic": {"path": "policy"},
            **algorithms.judges(chosen, {"function": {"file": "reward.py"}, "timeoutSeconds": HELD_SECONDS}),
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": batch, "maxPromptTokens": 16, "maxResponseTokens": responses},
        "generation": {"replicas": 2, "maxBatchSize": 8, "engine": engine},
        "inference": {"replicas": 1},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 4, "optimizer": {"learningRate": learning_rate}},
        "runPolicy": {"backoffLimit": 1000},
    }
    if not algorithms.has_critic(chosen):
        del spec["models"]["critic"]
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "tiny"}, "spec": spec}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    return manifest


@contextmanager
def edited_spec(manifest: Path) -> Iterator[dict[str, Any]]:
    """Yield the spec of a manifest, and write its changes."""
    job = yaml.safe_load(manifest.read_text())
    yield job["spec"]
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
