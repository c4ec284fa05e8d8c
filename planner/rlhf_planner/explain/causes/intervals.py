"""Checkpoints and evaluations that the next iteration waits for.

The gain is that of a TIMES longer interval.
"""

from collections.abc import Sequence
from typing import Final

from rlhf_planner.explain.finding import Finding, gained
from rlhf_planner.explain.iteration_profile import IterationProfile

TIMES: Final = 10
"""Factor by which a finding suggests to increase the interval."""


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
        loss = "; a lost rank loses more work"
        return _less_often(self.name, facts, due, every, "a checkpoint", loss, "spec.checkpoints.every")


class SeldomEvaluations:
    """See the module."""

    name = "evaluations"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        every = facts[-1].settings.evaluation_every
        waits = [profile.evaluation_waited for profile in facts if profile.evaluation_waited is not None]
        return _less_often(self.name, facts, waits, every, "an evaluation", "", "spec.evaluation.every")


def _less_often(
    name: str,
    facts: Sequence[IterationProfile],
    seconds: Sequence[float],
    every: int,
    pause: str,
    loss: str,
    field: str,
) -> Finding | None:
    """Return the finding that a job waits at each interval of `every` iterations; None without an interval or waits, or
    if the gain is noise."""
    if not every or not seconds:
        return None
    each = sum(seconds) / len(seconds)
    summary = f"{pause} holds the job up for {each:.3g} s, every {every} iteration{'s' * (every > 1)}"
    how = f"the time of {pause}, spread over more iterations{loss}"
    saved = each / every - each / (TIMES * every)
    return gained(name, facts, saved, summary, how, field=field, value=str(TIMES * every))
