"""Jobs of the plan search: a small Llama for every role, and figures that are easy to compute with."""

from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_planner.device_memory import ModelSize
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.roofline import Device
from rlhf_planner.plan_search.cost_figures import assumed_figures
from rlhf_planner.plan_search.workload import Workload
from rlhf_planner.transformer_shape import TransformerShape

SHAPE = TransformerShape("llama", 64, 8, 8, 4, 8, 128, 256, False)
PARAMETERS = 8 * SHAPE.layer_parameters(False) + 2 * 256 * 64
SIZE = ModelSize(PARAMETERS, 2 * 8 * 4 * 8, layers=8, key_value_heads=4)
ROUND = assumed_figures(Device("round", 1e9, 1e10, None, 1e8, 1e7, 1e-5), 1e8, (1e-5, 1e-4), 4)
"""A device of 1 GB/s and 10 Gflop/s, 100 MB/s to its host and in a node of 4, 10 MB/s between nodes."""
PPO = {"ppo": {"miniBatchSize": 16, "epochs": 1}}
GRPO = {"grpo": {"miniBatchSize": 16, "groupSize": 4}}


def plan_document(algorithm: dict[str, Any] | None = None, gpus: int = 0, **groups: Any) -> dict[str, Any]:
    """Return a manifest's data for 32 samples of up to 8 + 32 tokens; `groups` are further fields of its spec."""
    spec = {
        "algorithm": algorithm or PPO,
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": 32, "maxPromptTokens": 8, "maxResponseTokens": 32},
        "generation": {"replicas": 2, "maxBatchSize": 8, "gpusPerReplica": gpus},
        "inference": {"replicas": 1, "gpusPerReplica": gpus},
        "training": {"microBatchSize": 4, "gpusPerReplica": gpus},
    }
    for name, fields in groups.items():
        spec[name] = {**spec.get(name, {}), **fields} if isinstance(fields, dict) else fields
    return {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "small"}, "spec": spec}


def plan_workload(document: dict[str, Any], size: ModelSize = SIZE) -> Workload:
    """Return the workload of a manifest's data, every model of one size."""
    spec = RLHFJob.model_validate(document).spec
    roles = ("actor", "critic", "reference", "cost_critic")
    samples = spec.rollout.batch_size
    return Workload(
        spec, dict.fromkeys(roles, size), dict.fromkeys(roles, SHAPE), LengthModel.prior(32), (8,) * samples
    )
