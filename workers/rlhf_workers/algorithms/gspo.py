"""Group sequence policy optimisation: GRPO's advantages, and ratios that are geometric means over a response.

Source: Zheng et al., "Group Sequence Policy Optimization" (2025).
"""

from typing import Final, cast

import torch

from rlhf_api.algorithms.gspo import GSPO
from rlhf_workers.algorithms.base import AlgorithmContext
from rlhf_workers.algorithms.grpo import GroupRelativePolicyOptimization
from rlhf_workers.losses.ppo import LOG_RATIO_LIMIT, PolicyLoss, clipped_surrogate
from rlhf_workers.training.batches.training_batch import MicroBatch

TOKEN_LOG_RATIO_LIMIT: Final = 10.0
"""Upper limit in nats of the token form's log-ratio, beyond which the gradient is 0."""


class GroupSequencePolicyOptimization(GroupRelativePolicyOptimization):
    """See `rlhf_api.algorithms.gspo` for its fields."""

    def __init__(self, context: AlgorithmContext) -> None:
        super().__init__(context)
        self.ratio_level = cast(GSPO, context.fields).ratio_level

    def surrogate(self, log_p: torch.Tensor, microbatch: MicroBatch) -> PolicyLoss:
        fields = self.fields
        tokens = microbatch.sum_by_sample(torch.ones_like(log_p)).clamp(min=1)
        moved = microbatch.sum_by_sample(log_p - self.old_of(microbatch)) / tokens
        if self.ratio_level == "Sequence":
            of_token = moved.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[microbatch.samples]
        else:
            own = torch.where(
                log_p.isfinite(), log_p - log_p.detach(), 0.0
            )  # value 0, with the gradient of the token itself
            of_token = own + moved.detach()[microbatch.samples]
            of_token = of_token.clamp(-LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)
        ratio, advantages = torch.exp(of_token), microbatch.fields["advantages"]
        return clipped_surrogate(ratio, advantages, fields.clip_range, self.clip_range_high, fields.dual_clip)
