"""Training of a reward model to score the better response of a pair higher (`rlhf_api.algorithms.reward_model`)."""

from typing import cast

import torch

from rlhf_api.algorithms.reward_model import RewardModel
from rlhf_workers.algorithms.base import Algorithm, mini_batch_mask
from rlhf_workers.algorithms.objectives import Objective
from rlhf_workers.algorithms.pair_objectives import PREFERENCE, ScoreObjective, pair_mean_weights, with_preference
from rlhf_workers.losses.pairs import ranking_loss
from rlhf_workers.training.batches.training_batch import TrainingBatch


class RewardModelTraining(Algorithm):
    """The mean of `ranking_loss` over pairs; the first response of a pair is the better one."""

    prepared = (PREFERENCE,)

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        return with_preference(batch, torch.ones(len(batch.prompts) // 2, dtype=torch.bool))

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.context.graph.trained, pair_mean_weights(mini_batch_mask(batch, rows)))

    def objectives(self) -> dict[str, Objective]:
        roles = self.context.graph.trained
        return {role: ScoreObjective(role.value, self.pair_loss, self.context.device) for role in roles}

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from its scores."""
        fields = cast(RewardModel, self.context.fields)
        return ranking_loss(chosen, rejected, fields.margin, fields.centering_coefficient)
