"""Low acceptance: verifying drafts costs more than the accepted tokens save.

The gain is that of decoding without drafts, by the row cost fitted to the observed steps. If that fit does not
reproduce the measured time, the finding has the time of drafting and no gain. Applies to mode Fixed.
"""

from collections.abc import Sequence

import numpy as np

from rlhf_planner.explain.finding import Finding, gained, spent
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.replays import meets
from rlhf_planner.inter_stage.fitted_costs import non_negative


class LowAcceptance:
    """See the module."""

    name = "useless drafts"

    def find(self, facts: Sequence[IterationProfile]) -> Finding | None:
        """See `finding.LossCause`."""
        last = facts[-1]
        drafts, rows = last.drafts, [row for row in last.steps if row.steps >= 1 and row.rows > 0 and row.seconds > 0]
        if drafts is None or not drafts.drafted or not drafts.samples or last.settings.speculation != "Fixed":
            return None
        wide = 1 + drafts.drafted / drafts.samples
        features = np.array([[1.0, row.rows * (wide if row.verified else 1.0)] for row in rows])
        if len(rows) < 2:
            return None
        drafting = min(1.0, drafts.draft_seconds / max(drafts.seconds, 1e-9))
        seconds = np.array([row.seconds / row.steps * (1 - drafting) for row in rows])
        counts = np.array([row.steps for row in rows])
        fit = non_negative(features, seconds, counts)
        step, a_row = fit
        taken = sum(row.seconds for row in rows)
        summary = (
            f"of {drafts.drafted:,.0f} drafted tokens {drafts.accepted / drafts.drafted:.0%} were right, "
            f"{drafts.tokens / drafts.samples:.2f} tokens per step; speculation is Fixed"
        )
        field = "spec.generation.speculation.mode"
        if not meets(float(counts @ features @ fit), float(counts @ seconds)):
            why = "the cost of a row, fitted to the recording, does not match the measurement"
            lost = last.generation * drafting
            return spent(self.name, facts[-1:], lost, summary, why, field=field, value="Disabled")
        plain = sum(row.steps * row.tokens * (step + a_row * row.rows) for row in rows)
        if plain >= taken:
            return None
        saved = last.generation * (1 - plain / taken)
        how = "the same tokens one by one, by the fitted cost of a row"
        return gained(self.name, facts[-1:], saved, summary, how, field=field, value="Disabled")
