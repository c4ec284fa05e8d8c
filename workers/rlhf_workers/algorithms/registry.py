"""Module and class of each algorithm, by its member name in `spec.algorithm`."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

import torch

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.algorithms.base import Algorithm, context_of

IMPLEMENTATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ppo": "rlhf_workers.algorithms.ppo:ProximalPolicyOptimization",
        "safeRlhf": "rlhf_workers.algorithms.safe_rlhf:SafeReinforcementLearning",
        "plugin": "rlhf_workers.algorithms.plugin:PluginAlgorithm",
        "dapo": "rlhf_workers.algorithms.dapo:DynamicSamplingPolicyOptimization",
        "grpo": "rlhf_workers.algorithms.grpo:GroupRelativePolicyOptimization",
        "rloo": "rlhf_workers.algorithms.rloo:ReinforceLeaveOneOut",
        "reinforcePlusPlus": "rlhf_workers.algorithms.reinforce_plus_plus:ReinforceWithGlobalNormalization",
        "remax": "rlhf_workers.algorithms.remax:ReinforceAgainstGreedy",
        "gspo": "rlhf_workers.algorithms.gspo:GroupSequencePolicyOptimization",
        "cispo": "rlhf_workers.algorithms.cispo:ClippedImportanceSamplingPolicyOptimization",
        "sft": "rlhf_workers.algorithms.sft:SupervisedFineTuning",
        "rewardModel": "rlhf_workers.algorithms.reward_model:RewardModelTraining",
        "dpo": "rlhf_workers.algorithms.dpo:DirectPreferenceOptimization",
        "onlineDpo": "rlhf_workers.algorithms.online_dpo:OnlineDirectPreferenceOptimization",
    }
)
"""Member of `spec.algorithm` -> `module:class`, a subclass of `Algorithm`."""


def build_algorithm(spec: RLHFJobSpec, device: torch.device) -> Algorithm:
    """Return a job's algorithm in its initial state. Raises WorkError if the class of a plug-in cannot be used."""
    module, _, name = IMPLEMENTATIONS[spec.algorithm.name].partition(":")
    implementation: type[Algorithm] = getattr(import_module(module), name)
    return implementation(context_of(spec, graph_of(spec), device))
