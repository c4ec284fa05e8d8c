"""Seconds of generation and scoring on given workers, simulated on the workload's draws.

In mode Auto a few thresholds and pools are tried, and the fastest counts if it gains MIN_GAIN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from rlhf_planner.inter_stage.choose import MIN_GAIN
from rlhf_planner.inter_stage.costs import StageCosts
from rlhf_planner.inter_stage.fitted_costs import Floats
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.simulate import fuses, simulated_iteration
from rlhf_planner.inter_stage.simulated_generation import SimulatedGeneration, generate
from rlhf_planner.inter_stage.simulated_tail import threshold_state
from rlhf_planner.inter_stage.worker_spans import SimulatedIteration
from rlhf_planner.plan_search.workload import Workload

TAILS: Final = ((0.1, 4), (0.3, 2))
"""(threshold as a share of the batch, generation workers divided by the pool) of the tails that are tried."""
FINISHED: Final = 64
"""Maximum number of finish times that the overlap of critics is computed from."""


@dataclass(frozen=True)
class RolloutForecast:
    """Forecast of a rollout, in seconds; means over the draws unless stated otherwise."""

    seconds: float
    """Seconds until the last sample is scored."""
    generation_seconds: float
    """Seconds until the last sample is generated."""
    threshold: int
    """Threshold R_t in samples; 0 means no consolidation."""
    pool: int
    """Workers that decode the tail."""
    finished: Floats
    """float64 [at most FINISHED], evenly chosen times at which samples of the first draw are generated, rising."""
    scoring_seconds: float
    """Seconds of scoring the first draw, divided by the workers that could score."""


def rollout_forecast(
    workload: Workload, costs: StageCosts, generation_workers: int, inference_workers: int
) -> RolloutForecast:
    """Return the forecast for so many workers."""
    setup = iteration_setup(workload, generation_workers, inference_workers)
    generations = [generate(lengths, setup, costs) for lengths in workload.draws]
    best = _mean(workload, costs, setup, generations, 0, generation_workers)
    limit = best.seconds * (1 - MIN_GAIN)
    if lower_bound(workload, costs, generation_workers, inference_workers) > limit and setup.mode != "Fixed":
        return best
    for threshold, pool in _tails(setup, costs, workload):
        tried = _mean(workload, costs, setup, generations, threshold, pool)
        if setup.mode == "Fixed" or tried.seconds < min(limit, best.seconds):
            best = tried
    return best


def lower_bound(workload: Workload, costs: StageCosts, generation_workers: int, inference_workers: int) -> float:
    """Return seconds below which no forecast for so many workers is.

    No worker is faster than at its best batch, no sample is faster than alone, and all workers share the scoring.
    """
    base, slope = costs.token_tables
    prompt = min(workload.prompts)
    rows = np.arange(1, costs.max_batch_size + 1)
    token = float(((base[1:] + slope[1:] * prompt) / rows).min())
    alone = float((base[1:] + slope[1:] * prompt).min())
    found = []
    for lengths in workload.draws:
        decoded, longest = float(lengths.sum()) * token, float(lengths.max()) * alone
        scored = costs.backlog_seconds(len(lengths), float(sum(workload.prompts) + lengths.sum()))
        shared = (decoded + scored) / (generation_workers + inference_workers)
        found.append(max(decoded / generation_workers, longest, shared))
    return float(np.mean(found))


def iteration_setup(workload: Workload, generation_workers: int, inference_workers: int) -> IterationSetup:
    """Return the simulation's inputs for so many workers."""
    settings = workload.spec.fusion.inter_stage
    return IterationSetup(
        generation_workers,
        inference_workers,
        workload.prompts,
        overlap=workload.spec.inference.overlap != "Disabled",
        mode=settings.mode,
        threshold=settings.threshold,
        pool=settings.pool,
        transfer=settings.transfer,
    )


def _tails(setup: IterationSetup, costs: StageCosts, workload: Workload) -> list[tuple[int, int]]:
    """Return the (threshold, pool) to try: the job's own in mode Fixed, none where no tail is consolidated."""
    if setup.mode == "Disabled" or setup.generation_workers == 1 or not setup.overlap:
        return []
    if setup.mode == "Fixed":
        tails = [(setup.threshold or 0, setup.pool or setup.generation_workers)]
    else:
        longest = max(workload.prompts) + workload.lengths.max_tokens
        tails = []
        for share, divisor in TAILS:
            threshold = max(1, min(setup.batch - 1, round(share * setup.batch)))
            pool = max(costs.least_pool(threshold, longest), setup.generation_workers // divisor)
            tails.append((threshold, pool))
    return [tail for tail in dict.fromkeys(tails) if tail[0] < setup.batch and fuses(*tail, setup)]


def _mean(
    workload: Workload,
    costs: StageCosts,
    setup: IterationSetup,
    generations: list[SimulatedGeneration],
    threshold: int,
    pool: int,
) -> RolloutForecast:
    iterations: list[SimulatedIteration] = []
    for generation in generations:
        state = threshold_state(generation, threshold, workload.lengths, ()) if threshold else None
        iterations.append(simulated_iteration(generation, setup, costs, state, pool, setup.transfer))
    first = iterations[0]
    finished = np.sort(first.finish)
    chosen = np.unique(np.linspace(0, len(finished) - 1, FINISHED).round().astype(np.int64))
    return RolloutForecast(
        seconds=float(np.mean([iteration.seconds for iteration in iterations])),
        generation_seconds=float(np.mean([iteration.finish.max() for iteration in iterations])),
        threshold=threshold,
        pool=pool,
        finished=finished[chosen],
        scoring_seconds=sum(first.scored.busy.values()) / max(1, len(first.scored.busy)),
    )
