"""Cuts off surplus prompts of an iteration that began more than its batch has (`spec.rollout.oversample`).

Once as many prompts are finished as the batch has, all others are cut off. Rule: pure; one decision per iteration, and
the remaining prompts are the batch. A prompt with a failed sample stays only if it is needed. The cut is journaled,
because it depends on timing; a replay reads it from the journal.
"""

from rlhf_coordinator.scheduling.decisions import CutGroups
from rlhf_coordinator.state.ledger import Ledger


def decide(ledger: Ledger) -> list[CutGroups]:
    """Return the prompts to cut off; empty while too few are finished, or when nothing is left to cut off."""
    more = ledger.groups_to_cut
    if not more:
        return []
    groups = len(ledger.samples) // ledger.group_size
    finished = ledger.finished_groups()
    if len(finished) < groups - more:
        return []
    failed = {group: any(sample.failed for sample in ledger.members_of(group)) for group in finished}
    remaining = set(sorted(finished, key=lambda group: (failed[group], group))[: groups - more])
    return [CutGroups(tuple(group for group in range(groups) if group not in remaining))]
