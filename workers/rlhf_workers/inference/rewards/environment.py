"""Rewards that an environment returned during decoding; they arrive with the sample.

Rule: a response without an episode is a failure, never a zero; an episode without rewards abstains.
"""

import torch

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.rewards import GivenReward
from rlhf_common.samples import ScoringSample
from rlhf_workers.inference.rewards.reward_source import Judgment, RewardError, judgment


def load_reward(
    entry: GivenReward, spec: RLHFJobSpec, device: torch.device, home: torch.device
) -> "EnvironmentRewardSource":
    """Return the source of a reward's `environment`; it needs no device."""
    return EnvironmentRewardSource(f"{entry.field}.environment")


class EnvironmentRewardSource:
    """A RewardSource that reads the episode of a sample."""

    def __init__(self, field: str) -> None:
        self._field = field

    async def start(self) -> None:
        """See RewardSource."""

    async def score(self, sample: ScoringSample) -> Judgment:
        """Return the environment's reward and metrics."""
        if sample.episode is None:
            message = "the response came without an episode: the coordinator's image may be too old"
            raise RewardError("RewardInvalid", message, self._field)
        metrics = {**sample.episode.metrics, "turns": float(sample.episode.turns)}
        return judgment(sample.episode.reward, metrics, self._field)

    async def close(self) -> None:
        """See RewardSource."""
