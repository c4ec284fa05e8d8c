"""Weight publishing: workers wait for the new weights.

The gain is unknown because no faster link was measured.
"""

from collections.abc import Sequence

from rlhf_planner.explain.finding import Finding, mean_seconds, spent
from rlhf_planner.explain.iteration_profile import IterationProfile


class Publishing:
    """See the module."""

    name = "weight publishing"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        seconds = mean_seconds(facts, "Publishing")
        sharing = facts[-1].settings.weight_sharing
        summary = f"all workers wait {seconds:.3g} s for new weights; weightSharing is {sharing}"
        why = "that link is not measured"
        if sharing == "Disabled":
            field = "spec.training.weightSharing"
            return spent(self.name, facts, seconds, summary, why, field=field, value="Auto")
        remedy = "look at the link between the training ranks and the workers, or train adapters (spec.training.lora)"
        return spent(self.name, facts, seconds, summary, why, remedy=remedy)
