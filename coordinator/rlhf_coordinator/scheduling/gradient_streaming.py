"""Which complete prompts ranks add to the gradients of a batch before it is complete (`spec.training.stream`).

A prompt is ready when each of its samples is scored or failed. Ready prompts are journaled in whole chunks, then ranks
compute them. In a deterministic job prompts follow in the order of their numbers, so the order of the sum does not
depend on clocks. The next chunks are chosen when every rank has all earlier ones.

When a rank dies, its group starts again and computes the journaled chunks in their order. When the coordinator dies,
its successor reads them from the journal and asks each rank for them; a rank answers at once for chunks that it has.
Rule: pure. No step is taken here, and none before the batch is complete.
"""

from collections.abc import Sequence

from rlhf_coordinator.scheduling.decisions import Accumulate, Decision, StreamGroups
from rlhf_coordinator.scheduling.training_group import TrainingGroup
from rlhf_coordinator.state.gradient_chunks import groups_per_chunk
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import SampleState


def decide(context: JobContext, state: JobState, group: TrainingGroup) -> Sequence[Decision]:
    """Return the next prompts to journal, or the commands that compute journaled chunks."""
    per_chunk, ledger = groups_per_chunk(context.spec), state.ledger
    ends = state.trained or ledger.all_scored or state.stop is not None
    current = all(rank.trained_version == ledger.iteration for rank in group.ranks)
    if not per_chunk or ends or not group.formed or not current or group.draining:
        return []
    chunks = len(ledger.streamed) // per_chunk
    behind = [rank for rank in group.ranks if rank.chunks_of(ledger.iteration) < chunks]
    if behind:
        return [Accumulate(rank.name, ledger.iteration, chunks) for rank in behind if rank.idle]
    if not all(rank.idle for rank in group.ranks):
        return []
    ready = ready_groups(ledger, in_order=context.spec.deterministic)
    total = len(ledger.streamed) + len(ready)
    chosen = ready[: total // per_chunk * per_chunk - len(ledger.streamed)] if total >= per_chunk else []
    return [StreamGroups(tuple(chosen))] if chosen else []


def ready_groups(ledger: Ledger, *, in_order: bool) -> list[int]:
    """Return the complete prompts without a journaled place, in ascending order. `in_order`: stop at the first that is
    not complete."""
    streamed, ready = set(ledger.streamed), list[int]()
    for group in range(len(ledger.samples) // ledger.group_size):
        if group in streamed:
            continue
        if all(sample.state in (SampleState.SCORED, SampleState.FAILED) for sample in ledger.members_of(group)):
            ready.append(group)
        elif in_order:
            break
    return ready
