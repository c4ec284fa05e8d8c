"""Which module gives rewards of which kind: by the member of a reward of `spec.models` that is set.

A module has `load_reward(given, spec, device, home)`. What scores on the compute thread is a ModelScorer, or compares
the responses to a prompt there as a GroupScorer; what is awaited is a RewardSource, run by RewardCalls. Rule: importing
this module loads no source; a worker pays only for those that its job names. Everything that can be wrong with a
function, an address or a folder is found here, before the first sample.
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
"""Member of a reward of `spec.models` -> module."""


def load_reward(
    task: Task, spec: RLHFJobSpec, device: torch.device, home: torch.device
) -> ModelScorer | GroupScorer | RewardCalls:
    """Return what gives the reward of a task, ready: a model loaded on `home`, which scores on `device`, or a source
    that runs. WorkError names the field of what cannot be."""
    given = spec.models.reward_of(task)
    module = import_module(REWARDS[given.reward.kind])
    loaded: ModelScorer | GroupScorer | RewardSource = module.load_reward(given, spec, device, home)
    if not isinstance(loaded, RewardSource):
        return loaded
    source: RewardSource = loaded
    if given.reward.calls == "Batch" and isinstance(loaded, GroupRewardSource):
        source = BatchedReward(loaded, given.reward.batch_size)
    calls = RewardCalls(source)
    calls.start()
    return calls
