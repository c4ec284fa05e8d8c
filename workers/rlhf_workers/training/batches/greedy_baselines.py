"""Removes greedy responses from the batch before training: their rewards become the baselines of the others. Pure.

Rule: if a greedy response has no reward, the other responses to its prompt are masked out, as if they had abstained.
"""

import torch

from rlhf_workers.training.batches.training_batch import TrainingBatch


def without_greedy(batch: TrainingBatch, per_prompt: int) -> TrainingBatch:
    """Return the B samples to train on, out of B + B / (per_prompt - 1).

    The last of `per_prompt` consecutive samples is greedy; its reward becomes the `baselines` [B] of the others.
    """
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
        baselines=torch.where(valid, batch.rewards[greedy], 0.0),
    )
