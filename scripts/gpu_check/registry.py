"""The steps by importance: when time runs short, the end of the list is left out.

Rule: `machine` is first, since others relate their figures to its limits.
"""

import importlib
from typing import Any

from gpu_check.step import CheckStep

ORDER = (
    "machine",
    "decode",
    "scoring",
    "deterministic",
    "weights",
    "kv_migration",
    "offload",
    "colocated",
    "moments",
    "quickstart_ppo",
    "half_billion_job",
    "half_billion_colocated",
    "train_step",
    "packing",
    "context",
    "megatron",
    "pipelines",
    "planner_truth",
    "tests",
    "kernels",
    "vllm",
    "speculation",
)


def load(name: str) -> CheckStep[Any]:
    """Return a step; whatever its imports raise."""
    step: CheckStep[Any] = importlib.import_module(f"gpu_check.steps.{name}").STEP
    if step.name != name:
        raise ValueError(f"steps/{name}.py: STEP.name is {step.name!r}, it must be {name!r}")
    return step
