"""Scoring that waits for the whole batch: no response is scored before the last one is finished.

The gain is that of a replay of the scoring queue in which each response is scored as soon as it is finished.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.replays import scoring_end


class ScoringOverlap:
    """See the module."""

    name = "scoring waits for the whole batch"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        samples = last.samples
        if samples is None or not samples.scored or last.settings.overlap != "Disabled":
            return None
        if not last.settings.inference_workers:
            return None
        generated, scored = max(samples.finished), max(samples.scored)
        apart = max(0.0, scored - generated) / len(samples.scored)
        saved = scored - max(generated, scoring_end(samples.finished, apart, apart))
        summary = (
            f"{scored - generated:.3g} s ({(scored - generated) / last.total:.0%} of the iteration) of scoring begin "
            "when the last response is finished; overlap is Disabled"
        )
        how = "its queue replayed with each response scored when it is finished"
        field = "spec.inference.overlap"
        return gained(self.name, facts[-1:], saved, summary, how, field=field, value="Enabled")
