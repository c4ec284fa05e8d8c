"""The phases of an iteration, and the decisions of one round.

Level-triggered: `decide` reads the whole state and returns what is missing. Rule: pure; it remembers nothing.
"""

from dataclasses import dataclass

from rlhf_coordinator.scheduling import (
    consolidation,
    critic_overlap,
    dispatch,
    drafting_ahead,
    evaluation,
    gradient_streaming,
    incremental_dispatch,
    iteration_end,
    oversampling,
    roles_and_weights,
    sibling_sharing,
    training_group,
)
from rlhf_coordinator.scheduling.consolidation import NO_CONSOLIDATION, Consolidation
from rlhf_coordinator.scheduling.decisions import Decision, Finish
from rlhf_coordinator.scheduling.derived_state import DerivedState, derive
from rlhf_coordinator.scheduling.waits import overdue
from rlhf_coordinator.state.job_state import JobContext, JobState


@dataclass(frozen=True)
class SchedulerOutput:
    """The decisions on one state, and what status and metrics report about it."""

    phase: str = "Starting"
    """Phase of a job that has not ended."""
    consolidation: Consolidation = NO_CONSOLIDATION
    """State of the generation tail, and the workers that score meanwhile."""
    waits_for_evaluation: bool = False
    """Whether the iteration waits only for the evaluation."""
    decisions: tuple[Decision, ...] = ()
    """Decisions in order; empty when nothing is missing."""
    awaited_tokens: float | None = None
    """Length that unfinished responses must reach before surplus prompts can be cut off by counts; None without."""


def decide(context: JobContext, state: JobState, now: float) -> SchedulerOutput:
    """Return what to do now. `now`: seconds of the state's monotonic clock.

    A failure that ends the job, or a cut of prompts, comes without other decisions.
    """
    facts = derive(context, state, now)
    failure = iteration_end.failure(context, state, now)
    choice = oversampling.decide(state.ledger, context.spec.rollout.cut_by)
    if failure is not None:
        decisions: tuple[Decision, ...] = (Finish("Failed", failure),)
    else:
        # Prompts begun beyond those of the batch are cut; later decisions see the remaining ones.
        decisions = choice.cuts or _decisions(context, state, now, facts)
    waiting = evaluation.waits(context, state, facts)
    return SchedulerOutput(phase(state, facts), facts.consolidation, waiting, decisions, choice.awaited_tokens)


def _decisions(context: JobContext, state: JobState, now: float, facts: DerivedState) -> tuple[Decision, ...]:
    """Return the decisions of one round, from top to bottom; steps that are not possible yet add nothing."""
    others = _work(context, state, now, facts)
    # Drafts of the next iteration end before their worker gets anything else, and begin where nothing else is left.
    return (
        *drafting_ahead.ends(context, state, now, facts, others),
        *others,
        *drafting_ahead.leases(context, state, now, facts, others),
    )


def _work(context: JobContext, state: JobState, now: float, facts: DerivedState) -> tuple[Decision, ...]:
    """Return the decisions about the batch, the evaluation and the iteration."""
    tail = facts.consolidation
    dispatched = dispatch.decide(context, state, now, facts)
    return (
        # Overdue waits restart workers, or fail the job.
        *overdue(context, state, now),
        # The training group forms, or restarts; it trains when the whole batch is scored.
        *training_group.decide(context, state, now, facts.group),
        # Ranks compute gradients of complete prompts while others decode.
        *gradient_streaming.decide(context, state, facts.group),
        # The critics of the previous iteration are trained, where its policy was published first.
        *critic_overlap.decide(context, state, facts),
        # Every worker gets its role, and loads the weights of the job's version.
        *roles_and_weights.decide(context, state, now, facts),
        # Samples move to the pool, or between workers; costs are measured.
        *consolidation.decide(state, tail, facts.ready, facts.measures),
        # Workers that decode, or are about to, get sibling tokens of the same prompts as draft hints.
        *sibling_sharing.decide(context, state, now, dispatched),
        # Queued samples are leased for decoding, finished ones for scoring.
        *dispatched,
        # Idle scoring workers begin with unfinished samples.
        *incremental_dispatch.decide(context, state, now, facts.scorers),
        # Workers without work of the batch decode and score the evaluation.
        *evaluation.decide(context, state, now, facts),
        # Trained, published, checkpointed: the iteration is closed; or the job stops, or ranks leave.
        *iteration_end.decide(context, state, now, facts),
    )


def phase(state: JobState, facts: DerivedState) -> str:
    """Return the phase of a job that has not ended."""
    group = facts.group
    without_group = "Recovering" if state.ever_ready else "Starting"
    if not state.trained:
        if not state.ledger.all_generated:
            return "Generating" if state.ever_ready else "Starting"
        if not state.ledger.all_scored:
            return "Scoring"
        if state.overlaps_training:  # its own training comes later; it waits for that of the previous iteration
            return ("Publishing" if group.version == state.iteration else "Training") if group.formed else without_group
        begun = group.version == state.iteration or group.train_under_way or group.measures
        return "Training" if begun else without_group
    group_ready = group.version == state.version
    if not facts.published:
        return "Publishing" if group.policy_version == state.version else without_group
    if facts.checkpoint_due and state.checkpoint.stage == "idle" and not group_ready:
        return without_group
    return "Checkpointing"
