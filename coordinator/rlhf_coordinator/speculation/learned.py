"""Learned statistics of drafts: collected from the observations of workers, checked, and stored with the job.

It also reports switches of drafting.
"""

import logging
from typing import Any, Final

from rlhf_common import control_pb2 as pb
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.speculation.summary import is_on, switched
from rlhf_coordinator.state.speculation_state import DraftTotals
from rlhf_planner.speculation.learned_drafts import FACTS_KEY, LearnedDrafts
from rlhf_planner.speculation.learned_messages import counts_of, passes_of

log = logging.getLogger(__name__)

SAY_SECONDS: Final = 600.0
"""Least seconds from a recorded switch of drafting to the next."""


def observe(run: JobRun, observation: pb.Observation) -> None:
    """Add the observation of a worker's steps. Raises ValueError for impossible values."""
    if observation.WhichOneof("work") != "speculation":
        return
    message, state = observation.speculation, run.state.speculation
    _check(run, message)
    state.learned = state.learned.observed(counts_of(message.learned), passes_of(message.learned))
    _add(run.totals.drafts, message)
    if observation.iteration == run.state.iteration:
        _add(state.iteration, message)


def iteration_ended(run: JobRun, now: float) -> None:
    """Age and store what was learned; report a switch of drafting, at most one in SAY_SECONDS."""
    state = run.state.speculation
    if not state.learned:
        return
    state.learned = state.learned.aged()
    run.journal.write_job(run.journal.job() | {FACTS_KEY: state.learned.document()})
    on = is_on(state.iteration)
    if on is None or on is state.on or (state.on is not None and now - state.said_at < SAY_SECONDS):
        return
    if on or state.on is not None:
        text = switched(run.state.iteration, state.iteration, on=on)
        log.info(text)
        run.event("speculation-switched", text)
        state.say(text, now, on=on)
    else:
        state.on, state.said_at = on, now


def restore_learned_drafts(run: JobRun) -> None:
    """Restore what an earlier coordinator stored, if it is valid and speculation is not disabled."""
    written: Any = run.journal.job().get(FACTS_KEY)
    if written is None or run.context.spec.generation.speculation.mode == "Disabled":
        return
    try:
        run.state.speculation.learned = LearnedDrafts.from_document(written)
    except ValueError as error:
        log.warning("the gain of drafts is learned again: %s", error)


def _check(run: JobRun, message: pb.SpeculationObservation) -> None:
    speculation = run.context.spec.generation.speculation
    for count in message.learned.counts:
        if count.drafter not in speculation.loaded_drafters:
            drafters = ", ".join(speculation.loaded_drafters)
            raise ValueError(f"drafts of {count.drafter[:64]!r}, must be of {drafters}")
        if not 0 <= count.position < speculation.max_tokens:
            raise ValueError(f"a draft's position {count.position}, must be below {speculation.max_tokens}")
        if not count.accepted <= count.judged <= count.drafted:
            raise ValueError(f"drafts: {count.accepted} accepted, {count.judged} judged, {count.drafted} drafted")
    if message.drafted_steps > message.steps or message.probes > message.steps or message.samples < message.steps:
        raise ValueError(f"{message.steps} steps of {message.samples} samples, {message.drafted_steps} with drafts")


def _add(totals: DraftTotals, message: pb.SpeculationObservation) -> None:
    totals.steps += message.steps
    totals.drafted_steps += message.drafted_steps
    totals.probes += message.probes
    totals.samples += message.samples
    totals.tokens += message.tokens
    totals.seconds += message.seconds
    totals.draft_seconds += message.draft_seconds
    totals.verify_seconds += message.verify_seconds
    totals.regret_seconds += message.regret_seconds
    for count in message.learned.counts:
        totals.drafted[count.drafter, count.position] += round(count.drafted)
        totals.accepted[count.drafter, count.position] += round(count.accepted)
