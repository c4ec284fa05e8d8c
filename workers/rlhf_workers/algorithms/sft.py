"""Supervised fine-tuning: the negative log-likelihood of the file's responses, mean over the tokens of a mini-batch.

Tokens outside a response are in no mask. See `rlhf_api.algorithms.sft`.
"""

import torch

from rlhf_workers.algorithms.base import Algorithm
from rlhf_workers.algorithms.objectives import TokenLosses
from rlhf_workers.training.batches.training_batch import MicroBatch, TrainingBatch


class SupervisedFineTuning(Algorithm):
    """-sum(m x) / sum(m), x the log-probability of a response token and m its mask."""

    prepared = ()

    def prepare(self, batch: TrainingBatch) -> TrainingBatch:
        return batch

    def policy_loss(self, log_p: torch.Tensor, entropy: torch.Tensor, microbatch: MicroBatch) -> TokenLosses:
        return -log_p, None
