"""A whole PPO job of the quickstart's size: coordinator, generation, inference, training, checkpoints.

On a GPU it is the quickstart itself (its warmed-up policy, its reward), whose reward has to rise; in small, three
iterations of a model that nobody trained.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_check.local_jobs import REWARD, judge, manifest, run_job
from gpu_check.random_models import TINY, write_model, write_prompts
from gpu_check.step import CheckedMachine, CheckStep, Report

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
MISMATCH = 2e-3
"""Of log-probabilities in float32: the engine and the trainer sum in other orders."""


@dataclass(frozen=True)
class QuickstartSizes:
    """Of the job."""

    iterations: int
    batch: int
    warmed_up: bool
    """The policy of the quickstart, which knows how to add; it takes a minute of a CPU."""
    gain: float
    """The reward of the last tenth of the iterations is to be higher than that of the first by so much."""


def run(machine: CheckedMachine, sizes: QuickstartSizes, report: Report) -> None:
    """Runs the job and judges it."""
    folder = machine.scratch
    if sizes.warmed_up:
        report.say("warming the quickstart's policy up")
        prepare = [sys.executable, str(QUICKSTART / "prepare.py"), "--folder", str(folder / "assets")]
        subprocess.run(prepare, check=True)
        (folder / "reward.py").write_text((QUICKSTART / "reward.py").read_text())
    else:
        for name in ("policy", "critic"):
            write_model(folder / "assets" / name, TINY, torch.float32)
        write_prompts(folder / "assets" / "prompts.jsonl", 4 * sizes.batch)
        (folder / "reward.py").write_text(REWARD)
    spec = spec_of(machine, sizes)
    outcome = run_job(machine, report, manifest("quickstart-ppo", spec), folder)
    judge(report, outcome, spec, MISMATCH, "quickstart")
    if sizes.warmed_up and outcome.summary:
        first, last = outcome.summary["reward_first"], outcome.summary["reward_last"]
        report.check("the reward rises", last >= first + sizes.gain, f"from {first:.3f} to {last:.3f}")


def spec_of(machine: CheckedMachine, sizes: QuickstartSizes) -> dict[str, Any]:
    """Return the job: every group on the one device."""
    gpus = {"gpusPerReplica": 1} if machine.cuda else {}
    return {
        "algorithm": {"ppo": {"klCoefficient": 0.01, "clipRange": 0.2, "epochs": 1, "miniBatchSize": sizes.batch // 2}},
        "iterations": sizes.iterations,
        "seed": 7,
        "models": {
            "actor": {"path": "assets/policy"},
            "critic": {"path": "assets/critic"},
            "reward": {"function": {"file": "reward.py", "name": "score"}},
        },
        "prompts": {"path": "assets/prompts.jsonl"},
        "rollout": {"batchSize": sizes.batch, "maxPromptTokens": 8, "maxResponseTokens": 12},
        "generation": {"replicas": 1, "maxBatchSize": sizes.batch, **gpus},
        "inference": {"replicas": 1, **gpus},
        "training": {
            "microBatchSize": sizes.batch // 4,
            "precision": "Float32",
            "optimizer": {"schedule": "Linear", "learningRate": 3.0e-4, "criticLearningRate": 1.0e-3},
            **gpus,
        },
    }


STEP = CheckStep(
    "quickstart_ppo",
    "a whole PPO job of the quickstart's size runs, loses nothing, and learns",
    run,
    small=QuickstartSizes(iterations=3, batch=32, warmed_up=False, gain=0.0),
    gpu=QuickstartSizes(iterations=60, batch=128, warmed_up=True, gain=0.1),
    limit_seconds=120,
)
