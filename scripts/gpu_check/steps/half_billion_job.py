"""A whole PPO job of a policy of half a billion parameters, made on the spot: every group on the one device at once.

The critic starts from the policy with a fresh value head, and the reference is the policy's first weights, so one
folder is read three times. bfloat16 products, float32 master weights, as a job with GPUs has them.
"""

from dataclasses import dataclass
from typing import Any

import torch

from gpu_check.local_jobs import REWARD, judge, manifest, run_job
from gpu_check.random_models import HALF_BILLION, TINY, LlamaShape, write_model, write_prompts
from gpu_check.step import CheckedMachine, CheckStep, Report

MISMATCH = {"Float32": 2e-3, "BFloat16": 0.5}
"""Of log-probabilities: bfloat16 has three digits, and a random model's logits are of the order of one."""


@dataclass(frozen=True)
class PolicyJobSizes:
    """Of the job."""

    shape: LlamaShape
    iterations: int
    batch: int
    response: int
    micro_batch: int


def run(machine: CheckedMachine, sizes: PolicyJobSizes, report: Report) -> None:
    """Makes the model, runs the job, judges it."""
    make_files(machine, sizes, report)
    spec = spec_of(machine, sizes)
    outcome = run_job(machine, report, manifest("half-billion", spec), machine.scratch)
    judge(report, outcome, spec, MISMATCH["BFloat16" if machine.cuda else "Float32"], "shared device")


def make_files(machine: CheckedMachine, sizes: PolicyJobSizes, report: Report) -> None:
    """Writes policy, prompts and reward into the step's folder."""
    dtype = torch.bfloat16 if machine.cuda else torch.float32
    report.say("making the policy")
    count = write_model(machine.scratch / "policy", sizes.shape, dtype, device=machine.device, fast=True)
    report.figure("parameters", count)
    write_prompts(machine.scratch / "prompts.jsonl", 4 * sizes.batch)
    (machine.scratch / "reward.py").write_text(REWARD)


def spec_of(machine: CheckedMachine, sizes: PolicyJobSizes) -> dict[str, Any]:
    """Return the job: every group on the one device."""
    gpus = {"gpusPerReplica": 1} if machine.cuda else {}
    return {
        "algorithm": {"ppo": {"klCoefficient": 0.02, "epochs": 1, "miniBatchSize": sizes.batch // 2}},
        "iterations": sizes.iterations,
        "seed": 7,
        "models": {
            "actor": {"path": "policy"},
            "reward": {"function": {"file": "reward.py", "name": "score"}},
        },
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": sizes.batch, "maxPromptTokens": 8, "maxResponseTokens": sizes.response},
        "generation": {"replicas": 1, "maxBatchSize": sizes.batch, **gpus},
        "inference": {"replicas": 1, **gpus},
        "training": {"microBatchSize": sizes.micro_batch, **gpus},
    }


STEP = CheckStep(
    "half_billion_job",
    "a whole PPO job with a policy of 0.5 billion parameters, all groups on one GPU at once",
    run,
    small=PolicyJobSizes(TINY, iterations=2, batch=16, response=16, micro_batch=4),
    gpu=PolicyJobSizes(HALF_BILLION, iterations=3, batch=64, response=128, micro_batch=16),
    limit_seconds=120,
    gpu_gigabytes=40,
)
