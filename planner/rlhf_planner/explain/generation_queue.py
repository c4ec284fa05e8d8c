"""What more rows, or more workers, would gain where samples wait to be decoded: generation, replayed.

Owns what the causes `few_generation_workers` and `small_batches` share. Rule: the replay as it was must come near to
what was measured, or nothing is concluded.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rlhf_planner.explain.decode_costs import DecodeCosts, decode_costs
from rlhf_planner.explain.iteration_profile import IterationProfile, SampleFacts
from rlhf_planner.explain.replays import generation, meets

WAITS: Final = 0.1
"""Share of generation after which the last sample is leased, from which on samples wait for a row."""


class QueuedGeneration(NamedTuple):
    """An iteration in which samples waited, and what it takes to replay it."""

    samples: SampleFacts
    costs: DecodeCosts
    paces: list[float]
    replayed: float
    """Seconds of generation, as it was."""
    last_leased: float
    """When the last sample was leased, in seconds."""

    def share(self, rows: int, workers: int) -> float:
        """Return the share of generation that is left with so many rows on each of so many workers; new workers are as
        fast as the median one."""
        paces = self.paces + [1.0] * (workers - len(self.paces))
        return max(generation(self.samples, self.costs, rows, paces)) / self.replayed


def queued_generation(facts: IterationProfile) -> QueuedGeneration | None:
    """Return the last iteration where samples waited to be decoded; None where none did, or its replay does not meet
    what was measured."""
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
    """Return the place of the first choice that gains `enough` of what the best one does."""
    most = 1 - min(shares)
    return next(place for place, share in enumerate(shares) if 1 - share >= enough * most or place == len(choices) - 1)
