"""Recovery: training ranks died, and the iteration waited for their replacements.

Rule: the seconds are the measured ones; no gain is named.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, mean_seconds, spent
from rlhf_planner.explain.iteration_profile import IterationProfile


class Recovery:
    """See the module."""

    name = "recovery after faults"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        seconds = mean_seconds(facts, "Recovering")
        returned = sum(profile.returned for profile in facts)
        summary = (
            f"{seconds:.3g} s of an iteration are spent on waiting for training ranks that came back; {returned:.0f} "
            "leases were taken back from lost workers"
        )
        why = "losses other than waiting are not measured"
        remedy = "see why they died: rlhf describe, or events.jsonl of the run"
        return spent(self.name, facts, seconds, summary, why, remedy=remedy)
