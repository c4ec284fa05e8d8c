"""Every registered algorithm with fields small enough for tests. A test fails for an algorithm without a row."""

from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ALGORITHMS, ModelRole

REINFORCE: Final = Path(__file__).resolve().parents[2] / "examples" / "your_algorithm" / "reinforce.py"
"""Plug-in of docs/tutorials/your-algorithm.md."""

SMALL: Final[dict[str, dict[str, Any]]] = {
    "ppo": {"miniBatchSize": 8},
    "grpo": {"miniBatchSize": 8, "groupSize": 4},
    "rloo": {"miniBatchSize": 8, "groupSize": 4},
    "reinforcePlusPlus": {"miniBatchSize": 8, "groupSize": 4},
    "remax": {"miniBatchSize": 8, "groupSize": 2},
    "gspo": {"miniBatchSize": 8, "groupSize": 4, "klCoefficient": 0.02},
    "cispo": {"miniBatchSize": 8, "groupSize": 4, "klCoefficient": 0.02},
    "sft": {"miniBatchSize": 8},
    "dapo": {"miniBatchSize": 8, "groupSize": 4},
    "rewardModel": {"miniBatchSize": 8},
    "dpo": {"miniBatchSize": 8},
    "onlineDpo": {"miniBatchSize": 8},
    "safeRlhf": {"miniBatchSize": 8},
    "plugin": {
        "miniBatchSize": 8,
        "file": str(REINFORCE),
        "name": "Reinforce",
        "samplesPerPrompt": 1,
        "models": ["Reference"],  # for the metrics of divergence; the algorithm itself does not read it
    },
}
"""Name -> fields for batches of 16 samples."""


def member(algorithm: str, **more: Any) -> dict[str, Any]:
    """Return `spec.algorithm` of a small job; `more` adds fields."""
    return {algorithm: {**SMALL[algorithm], **more}}


def judges(algorithm: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """Return `source` for every role of `spec.models` that judges responses in a job with this `spec.algorithm`."""
    ((name, fields),) = algorithm.items()
    tasks = ALGORITHMS[name].model_validate(fields).tasks
    return {task.model.manifest_name: source for task in tasks if task.rewards}


def has_critic(algorithm: dict[str, Any]) -> bool:
    """Return whether a job with this `spec.algorithm` needs `spec.models.critic`."""
    ((name, fields),) = algorithm.items()
    tasks = ALGORITHMS[name].model_validate(fields).tasks
    return any(task.model is ModelRole.CRITIC for task in tasks)
