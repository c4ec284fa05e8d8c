"""The facts that everything is decided from, derived from the state once per round of decisions.

Owns what more than one decision asks: what the training group is and holds, who can decode, who can score, where the
tail goes, whether the weights are published, whether a checkpoint is due.
Rule: pure; one frozen value for one state and one time. Decisions read the facts and the state, and do not derive these
facts again. Status and metrics read what came of them (`iteration.SchedulerOutput`).
"""

from dataclasses import dataclass

from rlhf_common.names import Group
from rlhf_coordinator.scheduling import readiness
from rlhf_coordinator.scheduling.consolidation import (
    Consolidation,
    consolidate,
    fusion_possible,
    generation_can_score,
    measures_costs,
)
from rlhf_coordinator.scheduling.training_group import TrainingGroup, observe
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.state.worker import Worker


@dataclass(frozen=True)
class DerivedState:
    """What is true of a job in one state at one time."""

    group: TrainingGroup
    serving: frozenset[str]
    """Names of the workers whose device decoding and scoring have now; training has that of the other ranks."""
    can_score: bool
    """Generation workers hold the scoring models too."""
    ready: tuple[Worker, ...]
    """Generation workers that can decode: role, weights and device are there."""
    measures: bool
    """The costs of generation and inference are measured now."""
    consolidation: Consolidation
    decoders: tuple[Worker, ...]
    """Who of `ready` may be given samples: nobody while costs are measured, the pool once the tail consolidates."""
    scorers: tuple[Worker, ...]
    """Who may be given scoring tasks: of the inference group, and released generation workers."""
    early_scorers: tuple[Worker, ...]
    """Who, while critics are behind, may be given the scoring tasks that need none: the rest of those who score."""
    published: bool
    """Nothing is left to do by the iteration's weights, and those of the next one are with whoever takes part in it."""
    checkpoint_due: bool
    """A checkpoint of the job's version is wanted and does not exist."""


def derive(context: JobContext, state: JobState, now: float) -> DerivedState:
    """Return the facts of a state. `now`: seconds of the monotonic clock that the state's times are of."""
    possible = fusion_possible(context, state)
    can_score = generation_can_score(context, state, possible)
    serving = readiness.serving_workers(state)
    current = {
        group: readiness.current_workers(context, state, state.fleet.of(group), group, serving)
        for group in (Group.GENERATION, Group.INFERENCE)
    }
    ready = tuple(worker for worker in current[Group.GENERATION] if not can_score or Group.INFERENCE in worker.roles)
    measures = measures_costs(context, state, possible)
    tail = consolidate(context, state, now, ready, can_score)
    decoders = () if measures else ready
    if tail.begun:
        decoders = tuple(worker for worker in decoders if worker.name in tail.pool)
    group = observe(state, serving)
    done = state.trained or state.batch_handed_on
    released = [state.fleet.workers[name] for name in tail.released]
    scorers = (
        *current[Group.INFERENCE],
        *readiness.current_workers(context, state, released, Group.INFERENCE, serving),
    )
    return DerivedState(
        group=group,
        serving=serving,
        can_score=can_score,
        ready=ready,
        measures=measures,
        consolidation=tail,
        decoders=decoders,
        scorers=scorers,
        early_scorers=(
            readiness.early_scorers([*state.fleet.of(Group.INFERENCE), *released], scorers, serving)
            if group.critic_update_pending
            else ()
        ),
        published=done and readiness.is_published(context, state, current, group.critic_update_pending),
        checkpoint_due=_checkpoint_due(context, state),
    )


def _checkpoint_due(context: JobContext, state: JobState) -> bool:
    settings = context.spec.checkpoints
    if settings is None or state.checkpoint.newest >= state.version:
        return False
    if state.stop is not None:
        return state.stop.checkpoint and state.may_be_saved
    return state.trained and (settings.due(state.version) or context.last(state.iteration))
