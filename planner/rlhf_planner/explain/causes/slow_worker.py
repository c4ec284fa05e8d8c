"""A slow worker: one generation worker takes longer than the others for the same steps.

The gain is that of a replay at the pace of the others.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.decode_costs import decode_costs
from rlhf_planner.explain.finding import Finding, gained, spent
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.replays import generation, meets

SLOW: Final = 1.25
"""Smallest factor by which a slow worker's steps take longer."""


class SlowWorker:
    """See the module."""

    name = "slow worker"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        costs, samples, settings = decode_costs(last.steps), last.samples, last.settings
        if costs is None or samples is None or settings.generation_workers < 2:
            return None
        slowest = max(costs.paces, key=lambda name: costs.paces[name])
        pace = costs.paces[slowest]
        if pace < SLOW:
            return None
        others = max(
            (end for end, at in zip(samples.finished, samples.workers, strict=True) if at != _index(slowest)),
            default=0.0,
        )
        waits = max(0.0, max(samples.finished) - others)
        summary = (
            f"{slowest} takes {pace:.2g} times as long for the same steps as the others, and generation waits "
            f"{waits:.3g} s ({waits / max(last.generation, 1e-9):.0%}) for it alone; balance is {settings.balance}"
        )
        remedy = f"let {slowest} run on a node or GPU as fast as the others'"
        paces = [costs.paces.get(f"generation-{index}", 1.0) for index in range(settings.generation_workers)]
        replayed = max(generation(samples, costs, settings.max_batch_size, paces))
        if not meets(replayed, max(samples.finished)):
            why = "a replay of the recording does not match the measurement"
            return spent(self.name, facts[-1:], waits, summary, why, remedy=remedy)
        even = [1.0 if f"generation-{index}" == slowest else value for index, value in enumerate(paces)]
        saved = last.generation * (1 - max(generation(samples, costs, settings.max_batch_size, even)) / replayed)
        return gained(self.name, facts[-1:], saved, summary, "replayed at the pace of the others", remedy=remedy)


def _index(worker: str) -> int:
    number = worker.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
