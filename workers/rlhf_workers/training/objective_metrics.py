"""The metrics of an iteration's objectives: the counts of every rank, summed over the group.

Rule: all ranks call this together, with the same objectives in the same order. Must never change what is trained.
"""

import logging
from collections.abc import Mapping
from typing import Final

from rlhf_workers.algorithms.objectives import MISMATCH_WARNING, Objective
from rlhf_workers.training.communication.communicator import Communicator
from rlhf_workers.training.parallel.rank_layout import RankLayout

log = logging.getLogger(__name__)

Objectives = Mapping[str, Objective]
"""Model -> objective."""
Norms = dict[str, list[float]]
"""Model -> gradient norm of each of its steps, before clipping."""

LOSS_SUM: Final = "loss_sum"
"""Suffix of objective metrics that are sums over the steps; reports show their mean."""


def objective_metrics(
    objectives: Objectives, norms: Norms, layout: RankLayout, communicator: Communicator
) -> dict[str, float]:
    """Return the metrics of the models' objectives, and their mean gradient norms."""
    metrics: dict[str, float] = {}
    everyone = tuple(range(layout.world))
    for model, objective in objectives.items():
        if not layout.speaks(model):  # another rank has counted the same samples
            objective.statistics.sums.zero_()
        communicator.all_reduce_sum(objective.statistics.sums, everyone)
        communicator.all_reduce_max(objective.statistics.maxima, everyone)
        metrics |= objective.metrics()
        steps = max(1, len(norms[model]))
        for name in [name for name in metrics if name.endswith(LOSS_SUM)]:
            metrics[name.removesuffix("_sum")] = metrics.pop(name) / steps
        metrics[f"gradient_norm/{model}"] = sum(norms[model]) / steps
    return metrics


def say_mismatch(policy: str, metrics: Mapping[str, float]) -> None:
    """Log a warning if the log-probabilities of generation and training differ on average by more than
    MISMATCH_WARNING."""
    mismatch = f"{policy}/mismatch"
    if metrics.get(mismatch, 0.0) > MISMATCH_WARNING:
        log.warning(
            "log-probabilities of generation and training differ by %.3g on average (largest %.3g): the ratio of "
            "the policy loss is biased by as much",
            metrics[mismatch],
            metrics[f"{mismatch}_max"],
        )
