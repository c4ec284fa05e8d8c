"""The jobs of the long tail's benchmark: their workers, their models, and what each is to show."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from benchmarks.long_tail_policy import PROMPT, write_policy, write_scorer
from benchmarks.paced_worker import Pace

MAX_TOKENS, ROWS = 1024, 48
SMALL = {"hidden_size": 32, "num_hidden_layers": 1}


@dataclass(frozen=True)
class Scenario:
    """Workers, samples, and what scoring costs."""

    scorer: dict[str, int]
    """Sizes of the reference model."""
    workers: int = 2
    batch: int = 96
    layers: int = 4
    """Of the policy."""
    pace: Pace | None = None
    """None: workers are as fast as their core."""

    @property
    def pools(self) -> range:
        """Smaller than all workers."""
        return range(1, self.workers)


def paced(token: float, workers: int = 2, batch: int = 96) -> Scenario:
    """Workers of a stated speed: a decode step of one sample with 512 keys 6.1 ms, of 48 with as many 10.9 ms; scoring
    5 ms a pass and `token` seconds a token."""
    return Scenario(SMALL, workers, batch, layers=2, pace=Pace(0.006, 5e-5, 1e-7, 0.005, token))


SCENARIOS = {
    "A": Scenario({"hidden_size": 256, "num_hidden_layers": 12}),
    "B": Scenario(SMALL),
    "C": Scenario({"hidden_size": 256, "num_hidden_layers": 6}),
    "paced-A": paced(1.3e-3),
    "paced-B": paced(2e-6),
    "paced-C": paced(0.65e-3),
    "paced-D": paced(1.3e-3, workers=4, batch=192),
}


def write_job(folder: Path, scenario: Scenario, iterations: int) -> Path:
    """Models, prompts, reward and the resolved manifest."""
    write_policy(folder / "policy", scenario.layers)
    write_scorer(folder / "reference", **scenario.scorer)
    (folder / "prompts.jsonl").write_text((json.dumps({"prompt": PROMPT}) + "\n") * scenario.batch)
    (folder / "reward.py").write_text("def score(prompt, response, record):\n    return float(len(response) % 7)\n")
    spec: dict[str, Any] = {
        "algorithm": {"grpo": {"miniBatchSize": scenario.batch, "groupSize": 2}},
        "iterations": iterations,
        "seed": 11,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reference": {"path": str(folder / "reference")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": str(folder / "prompts.jsonl"), "shuffle": False},
        "rollout": {"batchSize": scenario.batch, "maxPromptTokens": 8, "maxResponseTokens": MAX_TOKENS},
        "generation": {"replicas": scenario.workers, "maxBatchSize": ROWS},
        "inference": {"replicas": 0, "incremental": "Off"},
        "training": {"microBatchSize": 8, "optimizer": {"learningRate": 1e-30}},
        "fusion": {"interStage": {"mode": "Auto", "balance": "Off"}},
    }
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "long-tail"}, "spec": spec}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    return manifest
