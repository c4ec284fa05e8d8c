"""Small batches: samples wait for a row, and a larger step would hardly take longer.

The gain is that of a replay with more rows per worker.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.generation_queue import least_with, queued_generation
from rlhf_planner.explain.iteration_profile import IterationProfile

MAX_TIMES: Final = 4
"""Largest factor on maxBatchSize that the finding suggests."""


class SmallBatches:
    """See the module."""

    name = "small batches"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        queued, settings = queued_generation(last), last.settings
        if queued is None or queued.costs.largest < settings.max_batch_size / 2:
            return None
        choices = [times * settings.max_batch_size for times in (2, MAX_TIMES)]
        shares = [queued.share(rows, settings.generation_workers) for rows in choices]
        place = least_with(choices, shares)
        saved = last.generation * (1 - shares[place])
        waited = queued.last_leased / max(queued.samples.finished)
        summary = (
            f"steps decode at most {settings.max_batch_size} samples, and samples wait for a row for the first "
            f"{waited:.0%} of generation ({queued.last_leased:.3g} s)"
        )
        how = "replayed by the cost of a row, extrapolated beyond the steps that were seen, if memory holds them"
        field = "spec.generation.maxBatchSize"
        return gained(self.name, facts[-1:], saved, summary, how, field=field, value=str(choices[place]))
