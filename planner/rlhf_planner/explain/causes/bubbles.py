"""Bubbles: pipeline ranks wait for each other because stages are uneven or micro-batches few.

The gain is unknown because no other split was measured.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, mean_seconds, spent
from rlhf_planner.explain.iteration_profile import IterationProfile


class Bubbles:
    """See the module."""

    name = "pipeline bubbles"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        share = sum(profile.training.get("bubble_share", 0.0) for profile in facts) / len(facts)
        settings, seconds = facts[-1].settings, mean_seconds(facts, "Training")
        if settings.pipeline < 2 or not 0 < share <= 1:
            return None
        summary = (
            f"ranks idle for {share:.0%} of {seconds:.3g} s of training, in a pipeline of {settings.pipeline} stages; "
            f"intraStage is {settings.intra_stage}"
        )
        if settings.intra_stage == "Disabled":
            why = "mode Auto measures its schedules at the start of a job"
            field = "spec.fusion.intraStage.mode"
            return spent(self.name, facts, share * seconds, summary, why, field=field, value="Auto")
        why = "stages and micro-batches of other sizes were not measured"
        remedy = "give a mini-batch more micro-batches (spec.training.microBatchSize), or the pipeline fewer stages"
        return spent(self.name, facts, share * seconds, summary, why, remedy=remedy)
