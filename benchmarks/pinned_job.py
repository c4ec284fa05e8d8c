"""A job of the long-tailed policy with real workers pinned to cores, and its coordinator in the process that measures.

Prompts are all the same, the reward costs nothing, the learning rate changes no token: what iterations differ in is
what a benchmark sets. The coordinator is here so that it can be told, every iteration anew, which setting's turn it is.
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
    **spec: Any,
) -> Path:
    """Reference model (of these sizes), prompts, reward and the resolved manifest, whose path is returned.

    The policy is in `folder`/policy already. `spec` adds to the manifest: generation, inference, fusion.
    """
    write_scorer(folder / "reference", **reference)
    (folder / "prompts.jsonl").write_text((json.dumps({"prompt": PROMPT}) + "\n") * batch)
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
        "prompts": {"path": str(folder / "prompts.jsonl"), "shuffle": False},
        "rollout": {"batchSize": batch, "maxPromptTokens": 8, "maxResponseTokens": max_tokens},
        "training": {"microBatchSize": 8, "optimizer": {"learningRate": 2e-12}},
        **spec,
    }
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": content}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    return manifest


def run_job(manifest: Path, groups: Sequence[str], **pinned: Any) -> Path:
    """Runs a job with a worker of each of `groups` (`pinned`: what else `pinned_workers` takes); its run folder.

    Raises SystemExit when it fails.
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
