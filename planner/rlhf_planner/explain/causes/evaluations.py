"""Evaluations: the next iteration waits until an evaluation is finished.

The gain is the time of one evaluation, spread over more iterations. Rule: only time in which the iteration waited for
nothing else counts.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.iteration_profile import IterationProfile

TIMES: Final = 10
"""Factor by which the finding suggests to increase the interval."""


class SeldomEvaluations:
    """See the module."""

    name = "evaluations"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        settings = facts[-1].settings
        every = settings.evaluation_every
        waits = [profile.evaluation_waited for profile in facts if profile.evaluation_waited is not None]
        if not every or not waits:
            return None
        each = sum(waits) / len(waits)
        summary = f"an evaluation holds the job up for {each:.3g} s, every {every} iteration{'s' * (every > 1)}"
        how = "the time of one evaluation, spread over more iterations"
        saved = each / every - each / (TIMES * every)
        value = str(TIMES * every)
        return gained(self.name, facts, saved, summary, how, field="spec.evaluation.every", value=value)
