"""The greedy response to each prompt leaves the batch before anything is trained: its reward is the others' baseline.

Rule: pure, after rewards are shaped, which both kinds are alike. A greedy response without a reward is no baseline of
zero: the responses to its prompt are then masked out, as if they had abstained. What is left has the size that the
manifest gives the batch.
Until here a greedy response is a sample of its prompt's group like the others: journaled, moved, failed, cut off and
judged by the group as they are, and shaped by the statistics of the same batch.
"""

import torch

from rlhf_workers.training.batches.training_batch import TrainingBatch


def without_greedy(batch: TrainingBatch, per_prompt: int) -> TrainingBatch:
    """Return the B samples that are trained on, of B + B / (per_prompt - 1): of every `per_prompt` samples in a row the
    last is the greedy one, whose reward becomes the `baselines` [B] of the others."""
    places = torch.arange(len(batch.valid))
    rows = places[places % per_prompt != per_prompt - 1]
    greedy = rows - rows % per_prompt + (per_prompt - 1)
    valid = batch.valid[rows] & batch.valid[greedy]
    return TrainingBatch(
        prompts=tuple(batch.prompts[row] for row in rows.tolist()),
        responses=batch.responses[rows],
        response_lengths=batch.response_lengths[rows],
        mask=batch.mask[rows] & valid[:, None],
        groups=batch.groups[rows],
        rewards=torch.where(valid, batch.rewards[rows], 0.0),
        valid=valid,
        finished=batch.finished[rows],
        fields={name: values[rows] for name, values in batch.fields.items()},
        judged={name: values[rows] for name, values in batch.judged.items()},
        parts={name: values[rows] for name, values in batch.parts.items()},
        unshaped=None if batch.unshaped is None else batch.unshaped[rows],
        baselines=torch.where(valid, batch.rewards[greedy], 0.0),
    )
