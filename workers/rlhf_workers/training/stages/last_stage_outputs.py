"""Outputs of the last stage for the trained tokens of a micro-batch: log-probabilities, values, scores.

Rule: the caller gets the numbers of all trained tokens. A rank with some positions of the rows computes its own and
gets the others from its group; a gradient flows back only through its own.
"""

import torch

from rlhf_workers.losses.log_probabilities import selected_log_probabilities
from rlhf_workers.training.batches.training_batch import MicroBatch
from rlhf_workers.training.stages.pipeline_stage import PipelineStage


def token_log_probabilities(
    stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability, entropy) of each trained token, float32 [n], from normed states [b, L, hidden], or [b,
    l, hidden] for a rank's own positions.
    """
    cut, own, states = microbatch.cut, microbatch.own, hidden.flatten(0, 1)
    if cut is None or own is None:
        logits = stage.logits(states.index_select(0, microbatch.positions))
        return selected_log_probabilities(logits, microbatch.targets, temperature)
    logits = stage.logits(states.index_select(0, own.places))
    pair = selected_log_probabilities(logits, microbatch.targets.index_select(0, own.mine), temperature)
    log_p, entropy = cut.joined(torch.stack(pair, dim=1), own, len(microbatch.targets)).unbind(1)
    return log_p, entropy


def token_values(stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
    """Return the value before each trained token, float32 [n], from states as above."""
    cut, own, states = microbatch.cut, microbatch.own, hidden.flatten(0, 1)
    if cut is None or own is None:
        return stage.values(states.index_select(0, microbatch.positions))
    return cut.joined(stage.values(states.index_select(0, own.places)), own, len(microbatch.positions))


def response_scores(stage: PipelineStage, hidden: torch.Tensor, microbatch: MicroBatch) -> torch.Tensor:
    """Return the score of each sample, float32 [b], at its last trained token, or its first token without any, from
    states as above."""
    cut, states, last = microbatch.cut, hidden.flatten(0, 1), microbatch.last
    if cut is None:
        return stage.scores(states.index_select(0, last))
    own = cut.own(last)
    return cut.joined(stage.scores(states.index_select(0, own.places)), own, len(last))
