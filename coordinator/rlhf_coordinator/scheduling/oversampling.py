"""Which prompts an iteration goes on without, when more were begun than the batch has (`spec.rollout.oversample`).

As soon as the responses to as many prompts as the batch has are finished, all others are cut off. Rule: pure, decided
once in an iteration: what is left is the batch. A prompt of which a sample failed is kept only where it is needed. What
was cut off is journaled, as it follows from who was faster; the loop decides nothing of this kind when it replays.
"""

from rlhf_coordinator.scheduling.decisions import CutGroups
from rlhf_coordinator.state.ledger import Ledger


def decide(ledger: Ledger) -> list[CutGroups]:
    """Return the prompts to cut off; nothing while too few are finished, or when none is to be cut off any more."""
    more = ledger.groups_to_cut
    if not more:
        return []
    groups = len(ledger.samples) // ledger.group_size
    finished = ledger.finished_groups()
    if len(finished) < groups - more:
        return []
    failed = {group: any(sample.failed for sample in ledger.members_of(group)) for group in finished}
    kept = set(sorted(finished, key=lambda group: (failed[group], group))[: groups - more])
    return [CutGroups(tuple(group for group in range(groups) if group not in kept))]
