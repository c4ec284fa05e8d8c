"""Which module gives rewards of which kind: by the member of `spec.models.reward` that is set.

A module has `load_reward(spec, device, home)`. What scores on the compute thread is a ModelScorer; what is awaited is a
RewardSource, run by RewardCalls. Rule: importing this module loads no source; a worker pays only for the one that its
job names. Everything that can be wrong with a function, an address or a folder is found here, before the first sample.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Final

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_workers.inference.model_scorer import ModelScorer
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.inference.rewards.reward_source import RewardSource

REWARDS: Final[Mapping[str, str]] = {
    "function": "rlhf_workers.inference.rewards.function",
    "model": "rlhf_workers.inference.rewards.model",
    "endpoint": "rlhf_workers.inference.rewards.endpoint",
}
"""Member of `spec.models.reward` -> module."""


def load_reward(spec: RLHFJobSpec, device: torch.device, home: torch.device) -> ModelScorer | RewardCalls:
    """Return what gives the job's rewards, ready: a model loaded on `home`, which scores on `device`, or a source that
    runs. WorkError names the field of what cannot be."""
    module = import_module(REWARDS[spec.models.reward.kind])
    loaded: ModelScorer | RewardSource = module.load_reward(spec, device, home)
    if not isinstance(loaded, RewardSource):
        return loaded
    calls = RewardCalls(loaded)
    calls.start()
    return calls
