"""Metrics of a batch before any step: rewards, lengths, divergence from the reference, groups and advantages.

Rule: mean, deviation and range of no samples are omitted.
"""

from typing import Final

import torch

from rlhf_api.algorithms import Graph
from rlhf_workers.losses.kl import sequence_kl, token_kl
from rlhf_workers.training.batches.training_batch import TrainingBatch

ADVANTAGES: Final = "advantages"
"""Field of a prepared batch whose statistics are metrics, if the algorithm adds it."""


def batch_metrics(batch: TrainingBatch, graph: Graph) -> dict[str, float]:
    """Return the metrics of a batch, prepared or not, without those whose field is missing."""
    metrics = _lengths(batch)
    if graph.reward_fields:
        metrics["reward/abstained"] = float((~batch.valid).sum())
        metrics |= _summary("reward", batch.rewards[batch.valid])
        metrics |= _groups(batch)
    if batch.baselines is not None:
        metrics |= _summary("baseline", batch.baselines[batch.valid])
    for name in graph.reward_fields[1:]:
        if name in batch.judged:
            metrics |= _summary(name, batch.judged[name][batch.valid])
    if ADVANTAGES in batch.fields:
        metrics |= _summary(ADVANTAGES, batch.fields[ADVANTAGES][batch.mask])
    for compared in graph.compared_fields[:1]:
        if graph.generates and compared in batch.fields:
            ours, reference = batch.old, batch.fields[compared]
            metrics[f"{graph.policy}/kl"] = sequence_kl(ours, reference, batch.mask)
            metrics[f"{graph.policy}/kl_per_token"] = token_kl(ours, reference, batch.mask)
    return metrics


def _summary(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return mean, (population) deviation, minimum and maximum of `values` [n]; nothing for an empty tensor."""
    if not len(values):
        return {}
    exact = values.double()
    return {
        f"{name}/mean": float(exact.mean()),
        f"{name}/std": float(exact.std(correction=0)),
        f"{name}/min": float(exact.min()),
        f"{name}/max": float(exact.max()),
    }


def _lengths(batch: TrainingBatch) -> dict[str, float]:
    responses = batch.response_lengths.double()
    prompts = torch.tensor([len(prompt) for prompt in batch.prompts], dtype=torch.float64)
    metrics: dict[str, float] = {}
    for name, lengths in (
        ("prompt_length", prompts),
        ("response_length", responses),
        ("response_length/terminated", responses[batch.finished]),
    ):
        if len(lengths):
            summary = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
            join = "_" if "/" in name else "/"
            metrics |= {f"{name}{join}{of}": float(value) for of, value in summary.items()}
    said = batch.response_lengths > 0
    if said.any():
        metrics["response_length/truncated_share"] = float((said & ~batch.finished).sum() / said.sum())
    return metrics


def _groups(batch: TrainingBatch) -> dict[str, float]:
    """Return the share of groups with equal rewards, among the groups with at least two judged responses."""
    _, group = torch.unique(batch.groups[batch.valid], return_inverse=True)
    if not len(group):
        return {}
    count, rewards = int(group.max()) + 1, batch.rewards[batch.valid].double()
    size = torch.bincount(group, minlength=count)
    least, largest = (
        torch.zeros(count, dtype=torch.float64).scatter_reduce(0, group, rewards, kind, include_self=False)
        for kind in ("amin", "amax")
    )
    compared = size > 1
    if not compared.any():
        return {}
    return {"groups/zero_variance_share": float(((least == largest) & compared).sum() / compared.sum())}
