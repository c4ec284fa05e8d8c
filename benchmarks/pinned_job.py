"""A job with the long-tailed policy, real workers pinned to cores, and its coordinator in the measuring process.

All prompts are the same, the reward costs next to nothing, and the learning rate is too small to change tokens. So
iterations differ in the benchmark's settings. The coordinator runs here so that the benchmark can change its settings
for every iteration.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from benchmarks.long_tail_policy import PROMPT, write_scorer
from benchmarks.pinned_workers import pinned_workers
from tests.support.loopback import free_address

from rlhf_common.names import Env
from rlhf_coordinator import __main__ as coordinator


def write_job(
    folder: Path,
    name: str,
    *,
    iterations: int,
    batch: int,
    max_tokens: int,
    reference: Mapping[str, int],
    prompts: Sequence[str] = (),
    length_window: int = 0,
    **spec: Any,
) -> Path:
    """Write a reference model (of these sizes), prompts, reward and the resolved manifest; return the manifest's path.

    The policy must exist in `folder`/policy. `prompts`: lines of the prompt file; PROMPT for each sample if empty.
    `length_window`: iterations of a sorted window. `spec` is added to the manifest: generation, inference, fusion.
    """
    write_scorer(folder / "reference", **reference)
    lines = prompts or [PROMPT] * batch
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in lines))
    (folder / "reward.py").write_text("def score(prompt, response, record):\n    return float(len(response) % 7)\n")
    content = {
        "algorithm": {"grpo": {"miniBatchSize": batch, "groupSize": 2}},
        "iterations": iterations,
        "seed": 11,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reference": {"path": str(folder / "reference")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": str(folder / "prompts.jsonl"), "shuffle": False, "lengthWindow": length_window},
        "rollout": {"batchSize": batch, "maxPromptTokens": 8, "maxResponseTokens": max_tokens},
        "training": {"microBatchSize": 8, "optimizer": {"learningRate": 2e-12}},
        **spec,
    }
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": content}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    return manifest


def run_job(manifest: Path, groups: Sequence[str], **pinned: Any) -> Path:
    """Run a job with a worker for each of `groups`; return its run folder.

    `pinned` are further arguments of `pinned_workers`. Raises SystemExit if the job fails.
    """
    folder, address = manifest.parent, free_address()
    run_dir = folder / "run"
    os.environ |= {Env.JOB_FILE: str(manifest), Env.RUN_DIR: str(run_dir), Env.LISTEN: address}
    with pinned_workers(folder, address, groups, **pinned):
        run, restored = coordinator.prepare()
        outcome = asyncio.run(coordinator.run_job(run, restored, None))
    if outcome.failure is not None:
        raise SystemExit(f"{outcome.phase}: {outcome.failure}; logs in {folder}")
    return run_dir
