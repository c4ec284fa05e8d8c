"""Replays generation with more rows or more workers, for iterations in which samples waited to be decoded.

There is no result if the unchanged replay does not match the measurement.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rlhf_planner.explain.decode_costs import DecodeCosts, decode_costs
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import generation, meets

WAITS: Final = 0.1
"""Share of generation time. Samples count as waiting for a row if the last one is leased at this share or later."""


class QueuedGeneration(NamedTuple):
    """An iteration in which samples waited, with the inputs of its replay."""

    samples: SampleFacts
    costs: DecodeCosts
    paces: list[float]
    replayed: float
    """Seconds of generation in the unchanged replay."""
    last_leased: float
    """Seconds until the last sample was leased."""

    def share(self, rows: int, workers: int) -> float:
        """Return the share of generation time that remains with `rows` rows on each of `workers` workers.

        New workers have pace 1.
        """
        paces = self.paces + [1.0] * (workers - len(self.paces))
        return max(generation(self.samples, self.costs, rows, paces)) / self.replayed


def queued_generation(facts: IterationProfile) -> QueuedGeneration | None:
    """Return the inputs of the replay if samples waited to be decoded.

    Returns None if they did not, if facts are missing, or if the replay does not match the measurement.
    """
    samples, costs, settings = facts.samples, decode_costs(facts.steps), facts.settings
    if samples is None or costs is None or not settings.generation_workers:
        return None
    leased, generated = max(samples.begun), max(samples.finished)
    if leased < WAITS * generated:
        return None
    paces = [costs.paces.get(f"generation-{index}", 1.0) for index in range(settings.generation_workers)]
    replayed = max(generation(samples, costs, settings.max_batch_size, paces))
    return QueuedGeneration(samples, costs, paces, replayed, leased) if meets(replayed, generated) else None


def least_with(choices: Sequence[int], shares: Sequence[float], enough: float = 0.9) -> int:
    """Return the index of the first choice with at least `enough` of the best choice's gain, else the last."""
    most = 1 - min(shares)
    return next(place for place, share in enumerate(shares) if 1 - share >= enough * most or place == len(choices) - 1)
