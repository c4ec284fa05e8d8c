"""Too few generation workers: samples wait for a row.

The gain is that of a replay with twice as many workers. The cost of workers is not considered.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.generation_queue import queued_generation
from rlhf_planner.explain.iteration_profile import IterationProfile

TIMES: Final = 2
"""Factor on the number of generation workers that the finding suggests."""


class FewGenerationWorkers:
    """See the module."""

    name = "too few generation workers"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        queued = queued_generation(last)
        if queued is None:
            return None
        present = last.settings.generation_workers
        workers = TIMES * present
        saved = last.generation * (1 - queued.share(last.settings.max_batch_size, workers))
        waited = queued.last_leased / max(queued.samples.finished)
        summary = (
            f"samples wait for a row of {present} generation worker{'s' * (present > 1)} for the first {waited:.0%} of "
            f"generation ({queued.last_leased:.3g} s)"
        )
        how = "generation replayed with as many workers of the same speed"
        field = "spec.generation.replicas"
        return gained(self.name, facts[-1:], saved, summary, how, field=field, value=str(workers))
