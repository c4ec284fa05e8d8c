"""Drafting ahead: idle generation workers decode samples of the next iteration, as drafts for them.

Work of the batch and of the evaluation comes first. A worker's drafts end before any other command that it gets: it
withdraws them between two steps, so no command waits for more than a step.
Rule: pure. If a worker dies, its lease ends, and the reported tokens stay.
"""

from collections.abc import Collection, Sequence
from typing import Final

from rlhf_api.algorithms import most_samples
from rlhf_common.names import Group
from rlhf_coordinator.scheduling.decisions import CloseIteration, Decision, DraftAhead, EndDrafts, Finish, Migrate
from rlhf_coordinator.scheduling.derived_state import DerivedState
from rlhf_coordinator.state.ahead_state import MAX_TOKENS
from rlhf_coordinator.state.job_state import JobContext, JobState

SLOT_SHARE: Final = 2
"""Divisor of a worker's batch: a draft never takes the last slots, which samples that move need."""


def is_enabled(context: JobContext) -> bool:
    """Return whether the job drafts ahead."""
    return context.graph.generates and context.spec.generation.speculation.ahead != "Disabled"


def ends(
    context: JobContext, state: JobState, now: float, facts: DerivedState, others: Sequence[Decision]
) -> list[Decision]:
    """Return the ends of drafts whose worker is not free any more, or gets one of the `others` decisions."""
    if not state.ahead.since:
        return []
    free = set(free_workers(context, state, now, facts))
    if any(isinstance(decision, CloseIteration | Finish) for decision in others):
        free = set()
    free -= _addressed(others)
    return [EndDrafts(worker) for worker in sorted(state.ahead.since) if worker not in free]


def leases(
    context: JobContext, state: JobState, now: float, facts: DerivedState, others: Sequence[Decision]
) -> list[Decision]:
    """Return leases of drafts for workers that are free and get none of the `others` decisions.

    Nothing is drafted for an iteration that does not come, while drafts do not pay, and beyond MAX_TOKENS.
    """
    drafts = state.ahead.upcoming
    if not is_enabled(context) or state.stop is not None or context.last(state.iteration):
        return []
    if not state.ahead.pays or drafts.iteration != state.iteration + 1:
        return []
    free = [name for name in free_workers(context, state, now, facts) if now >= state.ahead.not_before.get(name, 0.0)]
    addressed = _addressed(others)
    room = {name: _capacity(context) - len(drafts.on(name)) for name in free if name not in addressed}
    if not any(count > 0 for count in room.values()) or drafts.tokens >= MAX_TOKENS:
        return []
    assigned: dict[str, list[int]] = {}
    for index in drafts.waiting(most_samples(context.spec)):
        name = max(room, key=lambda worker: room[worker])
        if room[name] <= 0:
            break
        assigned.setdefault(name, []).append(index)
        room[name] -= 1
    return [DraftAhead(name, tuple(samples)) for name, samples in assigned.items()]


def free_workers(context: JobContext, state: JobState, now: float, facts: DerivedState) -> list[str]:
    """Return the generation workers that have nothing to do for the batch or for an evaluation.

    While the tail consolidates these are released workers; a worker that may score waits for unscored samples.
    """
    ledger, evaluation = state.ledger, state.evaluation
    if facts.measures or ledger.queued(1) or ledger.isolated() or evaluation.unfinished or state.stop is not None:
        return []
    scorers: Collection[str] = {worker.name for worker in (*facts.scorers, *facts.early_scorers)}
    scores = scorers if ledger.unscored() or ledger.open_groups() else ()
    asked = {item.worker for item in state.incremental.asked.values()}
    tail = facts.consolidation
    return [
        worker.name
        for worker in state.fleet.in_group(Group.GENERATION)
        if worker.idle
        and now >= worker.not_before
        and Group.GENERATION in worker.roles
        and worker.heartbeat.decodes_ahead
        and (worker.draws_by_request or not context.spec.algorithm.fields.greedy_baseline)
        and context.graph.policy in worker.versions
        and worker.name in facts.serving
        and worker.name not in scores
        and worker.name not in asked
        and (ledger.all_generated or not tail.begun or worker.name not in tail.pool)
        and not (ledger.decoding_on(worker.name) or ledger.arriving_on(worker.name) or ledger.scoring_on(worker.name))
    ]


def _capacity(context: JobContext) -> int:
    """Return the most drafts of a worker."""
    return max(1, context.spec.generation.max_batch_size // SLOT_SHARE)


def _addressed(decisions: Sequence[Decision]) -> set[str]:
    """Return the workers that decisions address, other than those about their drafts and hints."""
    names = {str(getattr(decision, "worker", "")) for decision in decisions}
    names |= {decision.source for decision in decisions if isinstance(decision, Migrate)}
    return names | {decision.destination for decision in decisions if isinstance(decision, Migrate)}
