"""Describes speculation in words: for the status, for events, for `rlhf describe`.

Rule: pure; it describes counts.
"""

from typing import Final

from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.state.speculation_state import DraftTotals, SpeculationState

ENOUGH_STEPS: Final = 64
"""Steps from which it is judged whether drafting was on."""
ON_SHARE: Final = 0.02
"""Share of steps with drafts, without probes, from which drafting counts as on."""


def is_on(totals: DraftTotals) -> bool | None:
    """Return whether the share of steps with drafts, without probes, is at least ON_SHARE; None with too few steps."""
    if totals.steps < ENOUGH_STEPS:
        return None
    return max(0, totals.drafted_steps - totals.probes) >= ON_SHARE * totals.steps


def describe(spec: RLHFJobSpec, state: SpeculationState) -> str:
    """Describe drafting in the last iteration, or in this one if the last has no steps."""
    mode = spec.generation.speculation.mode
    if mode == "Disabled":
        return "Disabled"
    totals = shown(state)
    if not totals.steps:
        return f"{mode}: nothing was decoded with drafts in view yet"
    if is_on(totals) is False:
        return f"{mode}, off: plain steps are faster; {_accepted(totals)}"
    return f"{mode}: {_gain(totals)}; {_accepted(totals)}"


def switched(iteration: int, totals: DraftTotals, *, on: bool) -> str:
    """Describe a switch of drafting in an iteration."""
    if on:
        return f"iteration {iteration}: speculation is on: {_gain(totals)}; {_accepted(totals)}"
    return f"iteration {iteration}: speculation is off, because plain steps are faster: {_accepted(totals)}"


def shown(state: SpeculationState) -> DraftTotals:
    """Return the counts of the last iteration, or those of this one if the last has no steps."""
    return state.before if state.before.steps else state.iteration


def _gain(totals: DraftTotals) -> str:
    return f"{totals.tokens_per_step:.2f} tokens per step, drafts in {totals.drafted_share:.0%} of the steps"


def _accepted(totals: DraftTotals) -> str:
    drafted = totals.drafted.total()
    if not drafted:
        return "nothing was drafted"
    parts = []
    for drafter in sorted({name for name, _ in totals.drafted}):
        of_drafter, accepted = totals.of_drafter(drafter)
        parts.append(f"{drafter} {accepted / max(1, of_drafter):.0%} of {of_drafter}")
    return f"{totals.acceptance:.0%} of {drafted} drafted tokens were accepted ({', '.join(parts)})"
