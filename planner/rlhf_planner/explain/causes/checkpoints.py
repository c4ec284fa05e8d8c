"""Checkpoints: the next iteration waits until a checkpoint is written.

The gain is the time of one checkpoint, spread over more iterations. Rule: time in which the same phase waited for an
evaluation does not count.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.iteration_profile import IterationProfile

TIMES: Final = 10
"""Factor by which the finding suggests to increase the interval."""


class SeldomCheckpoints:
    """See the module."""

    name = "checkpoints"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        every = facts[-1].settings.checkpoint_every
        due = [
            max(0.0, profile.seconds("Checkpointing") - (profile.evaluation_waited or 0.0))
            for profile in facts
            if every and (profile.iteration + 1) % every == 0
        ]
        if not due:
            return None
        each = sum(due) / len(due)
        summary = f"a checkpoint holds the job up for {each:.3g} s, every {every} iteration{'s' * (every > 1)}"
        how = "the time of one checkpoint, spread over more iterations; a lost rank loses more work"
        saved = each / every - each / (TIMES * every)
        value = str(TIMES * every)
        return gained(self.name, facts, saved, summary, how, field="spec.checkpoints.every", value=value)
