"""How an iteration runs: its phases in order, what each waits for, and what is decided in one look at the state.

  phase          what runs                                              goes on when
  Starting       workers register, become what they are, load weights   samples are leased, or ranks train
  Generating     samples are leased, decoded, balanced; what is         no response is unfinished
                 finished is scored; the long tail consolidates
  Scoring        what is left to score, by every worker that can        every sample has all of its fields
  Training       the ranks train on the batch                           every rank holds the next version, or its policy
  Publishing     generation and inference workers load that version     who takes part in the next iteration has it
  Checkpointing  ranks write a checkpoint, where one is due             it is complete: the next iteration begins
  Recovering     training is needed, and its group restarts             the group is there again
A job ends as Complete after its last iteration, and as Failed or Stopped from anywhere.

Level-triggered: `decide` looks at the whole state and says what is missing; it remembers nothing, so it makes no
difference whether a message was lost, a worker came back, or the coordinator itself was restarted. Deciding again
without a change decides nothing new: what was sent is pending, and what was leased is in the ledger.
Rule: pure. Facts are derived once (`derived_state`), then each module decides its part from them, from top to bottom.
Training starts only when every sample is scored.
"""

from dataclasses import dataclass

from rlhf_coordinator.scheduling import (
    consolidation,
    critic_overlap,
    dispatch,
    evaluation,
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
    """All that was decided on one state: the loop carries it out, status and metrics report it."""

    phase: str = "Starting"
    """The phase of a job that has not ended."""
    consolidation: Consolidation = NO_CONSOLIDATION
    """Where the tail of generation is, and who scores meanwhile."""
    waits_for_evaluation: bool = False
    """The iteration waits for the evaluation, and for nothing else of its own."""
    decisions: tuple[Decision, ...] = ()
    """What to do, in this order; empty when nothing is missing."""


def decide(context: JobContext, state: JobState, now: float) -> SchedulerOutput:
    """Return what to do now. `now`: seconds of the monotonic clock that the state's times are of."""
    facts = derive(context, state, now)
    failure = iteration_end.failure(context, state, now)
    decisions = _decisions(context, state, now, facts) if failure is None else (Finish("Failed", failure),)
    waiting = evaluation.waits(context, state, facts)
    return SchedulerOutput(phase(state, facts), facts.consolidation, waiting, decisions)


def _decisions(context: JobContext, state: JobState, now: float, facts: DerivedState) -> tuple[Decision, ...]:
    """One iteration, from top to bottom; what is not possible yet decides nothing."""
    tail = facts.consolidation
    if cut := oversampling.decide(state.ledger):
        # Prompts that were begun beyond those of the batch; the rest is decided on what is left.
        return tuple(cut)
    dispatched = dispatch.decide(context, state, now, facts)
    return (
        # Whoever keeps the job waiting for too long restarts.
        *overdue(context, state, now),
        # The training group forms, or restarts; it trains when the whole batch is scored.
        *training_group.decide(context, state, now, facts.group),
        # The critics of the iteration before are trained, where its policy was published first.
        *critic_overlap.decide(context, state, facts),
        # Every worker becomes what it is to be, and loads the weights of the job's version.
        *roles_and_weights.decide(context, state, now, facts),
        # Samples move to the pool, or from a full worker to one that would run dry; costs are measured once.
        *consolidation.decide(state, tail, facts.ready, facts.measures),
        # Who decodes, or is about to, is told what others decoded of the same prompts, to draft by.
        *sibling_sharing.decide(context, state, now, dispatched),
        # Queued samples are leased to who decodes, finished ones to who scores.
        *dispatched,
        # Who scores and has nothing to score begins with unfinished samples.
        *incremental_dispatch.decide(context, state, now, facts.scorers),
        # Who has nothing of the batch decodes and judges what the evaluation asks for.
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
        if state.overlaps_training:  # its own training comes later: that of the one before is waited for
            return ("Publishing" if group.version == state.iteration else "Training") if group.formed else without_group
        begun = group.version == state.iteration or group.train_under_way or group.measures
        return "Training" if begun else without_group
    group_ready = group.version == state.version
    if not facts.published:
        return "Publishing" if group.policy_version == state.version else without_group
    if facts.checkpoint_due and state.checkpoint.stage == "idle" and not group_ready:
        return without_group
    return "Checkpointing"
