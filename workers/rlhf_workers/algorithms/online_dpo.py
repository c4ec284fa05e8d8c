"""Online direct preference optimisation: the response with the higher reward is the better one, the first on a tie.

A pair with a response without a reward is not trained on.
"""

from dataclasses import replace

import torch

from rlhf_workers.algorithms.dpo import DirectPreferenceOptimization
from rlhf_workers.training.batches.training_batch import TrainingBatch


class OnlineDirectPreferenceOptimization(DirectPreferenceOptimization):
    """See `rlhf_api.algorithms.online_dpo` for its fields."""

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        valid_pairs = batch.valid.view(-1, 2).all(dim=1).repeat_interleave(2)
        return super().prepare(replace(batch, mask=batch.mask & valid_pairs[:, None]))

    def first_is_better(self, batch: TrainingBatch) -> torch.Tensor:
        first, second = batch.rewards.view(-1, 2).unbind(dim=1)
        return first >= second

    def batch_metrics(self, batch: TrainingBatch) -> dict[str, float]:
        first, second = batch.rewards.view(-1, 2).unbind(dim=1)
        valid_pairs = batch.valid.view(-1, 2).all(dim=1)
        ties = float(((first == second) & valid_pairs).sum()) / max(1, int(valid_pairs.sum()))
        return super().batch_metrics(batch) | {"reward/tied_pairs": ties}
