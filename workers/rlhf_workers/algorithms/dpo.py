"""Direct preference optimisation on pairs. See `rlhf_api.algorithms.dpo` for its fields."""

from typing import cast

import torch

from rlhf_api.algorithms.dpo import PreferenceFields
from rlhf_workers.algorithms.base import Algorithm, mini_batch_mask
from rlhf_workers.algorithms.objectives import Objective
from rlhf_workers.algorithms.pair_objectives import PREFERENCE, LogRatioObjective, pair_mean_weights, with_preference
from rlhf_workers.losses.pairs import dpo_loss, ipo_loss
from rlhf_workers.training.batches.training_batch import TrainingBatch


class DirectPreferenceOptimization(Algorithm):
    """A loss from the log-ratio of the better response to the reference minus that of the worse response."""

    prepared = (PREFERENCE,)

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        return with_preference(batch, self.first_is_better(batch))

    def first_is_better(self, batch: TrainingBatch) -> torch.Tensor:
        """Return whether the first response of each pair is the better one, bool [B / 2]; always true unless
        overridden."""
        return torch.ones(len(batch.prompts) // 2, dtype=torch.bool)

    def token_weights(self, batch: TrainingBatch, rows: list[int]) -> dict[str, torch.Tensor]:
        return dict.fromkeys(self.context.graph.trained, pair_mean_weights(mini_batch_mask(batch, rows)))

    def objectives(self) -> dict[str, Objective]:
        context, beta = self.context, cast(PreferenceFields, self.context.fields).beta
        (reference,) = context.graph.compared_fields
        return {
            role: LogRatioObjective(role.value, self.pair_loss, beta, reference, context.temperature, context.device)
            for role in context.graph.trained
        }

    def pair_loss(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from the log-ratios of its responses."""
        fields = cast(PreferenceFields, self.context.fields)
        if fields.loss == "IPO":
            return ipo_loss(chosen - rejected, fields.beta)
        return dpo_loss(chosen - rejected, fields.beta, fields.label_smoothing)
