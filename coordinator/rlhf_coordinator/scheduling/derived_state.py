"""The facts behind the decisions, derived from the state once per round of decisions.

Rule: pure; one frozen value for one state and one time.
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
    """Facts about a job in one state at one time."""

    group: TrainingGroup
    serving: frozenset[str]
    """Names of the workers whose device currently serves decoding and scoring; training has that of the other ranks."""
    can_score: bool
    """Whether generation workers also have the scoring models."""
    ready: tuple[Worker, ...]
    """Idle generation workers that can decode: they have their roles, the policy's current version and the device."""
    measures: bool
    """Whether the costs of generation and inference are measured now."""
    consolidation: Consolidation
    decoders: tuple[Worker, ...]
    """Workers of `ready` that may get samples: none while costs are measured, the pool once the tail consolidates."""
    scorers: tuple[Worker, ...]
    """Current workers that may get scoring tasks: those of the inference group, and released generation workers."""
    early_scorers: tuple[Worker, ...]
    """Additional workers that may get tasks of models that are not trained, while a critic update is pending."""
    published: bool
    """Whether the iteration is trained or handed on, and `readiness.is_published` holds."""
    checkpoint_due: bool
    """Whether a checkpoint of the job's version is wanted and does not exist."""


def derive(context: JobContext, state: JobState, now: float) -> DerivedState:
    """Return the facts about a state. `now`: seconds of the state's monotonic clock."""
    possible = fusion_possible(context, state)
    can_score = generation_can_score(context, state, possible)
    serving = readiness.serving_workers(state)
    current = {
        group: readiness.current_workers(context, state, state.fleet.in_group(group), group, serving)
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
            readiness.early_scorers([*state.fleet.in_group(Group.INFERENCE), *released], scorers, serving)
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
