"""Extends the search beyond the devices that it can cover exhaustively, by Metropolis tries.

Rule: pure; the number of tries is fixed and no clock is read, so the same seed gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import numpy as np

from rlhf_planner.plan_search.device_plan import Placement
from rlhf_planner.plan_search.iteration_forecast import PlanForecast
from rlhf_planner.plan_search.rollout_choices import RolloutWorkers
from rlhf_planner.plan_search.search import BEST, EXHAUSTIVE, SPARE, Candidate, PlanSearch, counts_up_to

Choice = TypeVar("Choice")

TRIES: Final = 24
"""Maximum number of tries on each rung."""
TEMPERATURE: Final = 0.02
"""Relative loss at which a slower plan is accepted with probability 1/e."""
STEPS: Final = (0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0)
"""Factors by which a try changes the number of workers of a group."""


def find_plans(search: PlanSearch, devices: int, seed: int = 0, exhaustive: int = EXHAUSTIVE) -> list[PlanForecast]:
    """Return the best plans of up to so many devices that validation accepts, the fastest first.

    Up to `exhaustive` devices no plan is tried at random.
    """
    found = search.exhaustive(min(devices, exhaustive))
    for rung in counts_up_to(devices, exhaustive):
        if rung > exhaustive:
            found = _best([*found, *_climb(search, found, rung, np.random.default_rng((seed, rung)))])
    return search.forecasts(found)


def _best(candidates: list[Candidate]) -> list[Candidate]:
    """Return the fastest candidates, each once."""
    found = dict.fromkeys(sorted(candidates, key=lambda each: each.order))
    return list(found)[: BEST * SPARE]


def _climb(
    search: PlanSearch, start: list[Candidate], rung: int, randomness: np.random.Generator
) -> Iterator[Candidate]:
    """Yield the candidates that are tried on a rung."""
    current = start[0] if start else None
    tried: set[tuple[Placement, RolloutWorkers]] = set()
    for _ in range(TRIES):
        placement, workers = _proposal(search, current, rung, randomness)
        if (placement, workers) in tried:
            continue
        tried.add((placement, workers))
        candidate = search.candidate(placement, workers, rung)
        if candidate is None:
            continue
        yield candidate
        if current is None or _accepted(candidate.seconds / current.seconds - 1, randomness):
            current = candidate


def _accepted(loss: float, randomness: np.random.Generator) -> bool:
    return loss <= 0 or randomness.random() < math.exp(-loss / TEMPERATURE)


def _pick(randomness: np.random.Generator, choices: Sequence[Choice]) -> Choice:
    return choices[int(randomness.integers(len(choices)))]


def _proposal(
    search: PlanSearch, current: Candidate | None, rung: int, randomness: np.random.Generator
) -> tuple[Placement, RolloutWorkers]:
    """Return a placement and workers near the current ones, lowered to leave a device for training if possible."""
    placement: Placement = current.placement if current else search.placements[0]
    sizes = search.rollouts.tensor_sizes
    workers = current.workers if current else RolloutWorkers(1, 0, sizes[0], search.own.plan.max_batch_size)
    generation, inference, tensor = workers.generation_workers, workers.inference_workers, workers.engine_tensor
    if randomness.random() < 0.2:
        placement = _pick(randomness, search.placements)
    if randomness.random() < 0.2:
        wanted = _pick(randomness, sizes)
        generation, tensor = max(1, generation * tensor // wanted), wanted
    if placement == "Colocated" and search.workload.on_gpus and 1 in sizes:
        generation, tensor = generation * tensor, 1
    if randomness.random() < 0.7:
        generation = max(1, round(generation * _pick(randomness, STEPS)))
    if randomness.random() < 0.5:
        inference = round(inference * _pick(randomness, STEPS)) if inference else _pick(randomness, (0, 1, 2, 4, 8))
    scorers = search.rollouts.inference_counts((inference,))
    inference = inference if inference in scorers else scorers[0]
    generation = _within(search, replace(workers, generation_workers=generation, inference_workers=inference,
                                         engine_tensor=tensor), placement, rung)  # fmt: skip
    batches = list(search.rollouts.batch_sizes(placement, generation, inference, tensor))
    batch = _pick(randomness, batches) if batches else workers.max_batch_size
    return placement, RolloutWorkers(generation, inference, tensor, batch)


def _within(search: PlanSearch, workers: RolloutWorkers, placement: Placement, rung: int) -> int:
    """Return the number of generation workers, lowered so that all workers and a rank fit the devices, if possible."""
    each = search.rollouts.devices(replace(workers, generation_workers=1, inference_workers=0))
    scorers = search.rollouts.devices(replace(workers, generation_workers=0))
    left = rung - scorers - (1 if placement == "Dedicated" else 0)
    count = max(1, min(workers.generation_workers, left // each))
    return search.rollouts.generation_counts((count,))[0]
