"""Table of the modules that provide rewards, by the member that a reward of `spec.models` sets.

A module has `load_reward(entry, spec, device, home)`. Rule: importing this module loads no source.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import torch

from rlhf_api.algorithms import Task
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.inference.group_comparisons import GroupScorer
from rlhf_workers.inference.model_scorer import ModelScorer
from rlhf_workers.inference.rewards.batched_calls import BatchedReward
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.inference.rewards.reward_source import GroupRewardSource, RewardSource

REWARDS: Final[Mapping[str, str]] = {
    "function": "rlhf_workers.inference.rewards.function",
    "model": "rlhf_workers.inference.rewards.model",
    "endpoint": "rlhf_workers.inference.rewards.endpoint",
    "judge": "rlhf_workers.inference.rewards.judge",
    "environment": "rlhf_workers.inference.rewards.environment",
}
"""Module by kind of reward: the member that a reward of `spec.models` sets."""


def load_reward(
    task: Task, spec: RLHFJobSpec, device: torch.device, home: torch.device
) -> ModelScorer | GroupScorer | RewardCalls:
    """Return the reward of a task, ready to use: a model on `home` that scores on `device`, or a running source.

    Raises WorkError for an unusable one.
    """
    entry = spec.models.reward_of(task)
    module = import_module(REWARDS[entry.reward.kind])
    loaded: ModelScorer | GroupScorer | RewardSource = module.load_reward(entry, spec, device, home)
    if not isinstance(loaded, RewardSource):
        return loaded
    source: RewardSource = loaded
    if entry.reward.calls == "Batch" and isinstance(loaded, GroupRewardSource):
        source = BatchedReward(loaded, entry.reward.batch_size)
    calls = RewardCalls(source)
    calls.start()
    return calls
