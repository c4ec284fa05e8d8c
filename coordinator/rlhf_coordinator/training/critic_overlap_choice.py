"""Critics beside decoding in mode Auto: iterations choose, from learned times of training and decoding.

A choice is made when an iteration begins, and is in its segment's first record.
"""

import logging
import math
from collections.abc import Mapping
from typing import Any, Final

from rlhf_coordinator.job.iteration_metrics import CRITIC_ONLY, CRITICS_SECONDS
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import training_overlap
from rlhf_coordinator.state.critic_overlap_state import CriticOverlapState
from rlhf_planner.critic_overlap_choice import OverlapChoice, SeenIteration, choose
from rlhf_planner.critic_overlap_facts import JOB_KEY, document, read_facts
from rlhf_planner.explain.replays import latency_of, rate_of

log = logging.getLogger(__name__)

SECONDS: Final = "train/seconds"
"""Metric of the ranks: seconds of an iteration's training."""


def restore_measured(run: JobRun, facts: Mapping[str, Any]) -> None:
    """Restore the measurements of earlier processes, if they are valid.

    `facts`: the entry JOB_KEY of the journal's facts.
    """
    if not facts or not training_overlap.may_choose(run.context):
        return
    try:
        run.state.critic_overlap.measured, run.state.critic_overlap.faster = read_facts(facts)
    except ValueError as error:
        log.warning("training with and without the critics' overlap is measured again: %s", error)


def begin_iteration(run: JobRun, iteration: int) -> bool:
    """Choose for a new iteration in mode Auto. Return whether it is to train its critics separately; False without a
    choice."""
    state = run.state.critic_overlap
    state.apart, state.choice = False, None
    state.beside = run.state.open_report is not None
    if not training_overlap.may_choose(run.context) or not training_overlap.gains(run.context, iteration):
        return False
    choice = choose(state.measured, state.last, apart=state.faster, pending=state.beside)
    state.apart, state.choice = choice.apart, choice
    _say(run, choice)
    if choice.kind == "faster":
        state.faster = choice.apart
    return choice.apart


def _say(run: JobRun, choice: OverlapChoice) -> None:
    switches = choice.kind == "faster" and choice.apart != run.state.critic_overlap.faster
    if switches or choice.kind in ("probe", "again"):
        log.info(choice.reason)
        run.event("critic-overlap-choice", choice.reason)


def trained(run: JobRun, metrics: Mapping[str, float]) -> None:
    """Record the training of the iteration in progress, in mode Auto. `metrics`: of the ranks; empty while a critic
    update is pending."""
    state, ledger = run.state.critic_overlap, run.state.ledger
    if not training_overlap.may_choose(run.context):
        return
    state.warm, state.warm_epoch = state.warm_epoch == run.state.group_epoch, run.state.group_epoch
    state.trained_tokens = sum(
        run.state.prompt_tokens[sample.index] + len(sample.response) for sample in ledger.samples if not sample.left_out
    )
    seconds = metrics.get(SECONDS, 0.0)
    whole = seconds > 0 and CRITICS_SECONDS not in metrics and not metrics.get(CRITIC_ONLY)
    if state.warm and whole and state.trained_tokens:
        state.measured = state.measured.with_together(state.trained_tokens, seconds)


def critics_trained(run: JobRun, metrics: Mapping[str, float]) -> None:
    """Record the separate critic training of the previous iteration. `metrics`: of the ranks, for all its training."""
    state = run.state.critic_overlap
    critics = metrics.get(CRITICS_SECONDS, 0.0)
    policy = metrics.get(SECONDS, 0.0) - critics
    if state.warm and state.trained_tokens and min(policy, critics) > 0:
        state.measured = state.measured.with_parts(state.trained_tokens, policy, critics)


def iteration_ended(run: JobRun, publishing: float) -> None:
    """Learn from the decoding and scoring of the closed iteration, and store all measurements, in mode Auto."""
    state = run.state.critic_overlap
    if not training_overlap.may_choose(run.context):
        return
    steps = [stretch for _, stretch in run.state.fusion.stretches if stretch.steps > 0 and stretch.seconds > 0]
    if steps:
        mean = sum(stretch.seconds for stretch in steps) / sum(stretch.steps for stretch in steps)
        state.measured = state.measured.with_step(mean, beside=state.beside)
    _take_scoring(run, state, publishing)
    state.measured = state.measured.older()
    facts = {JOB_KEY: document(state.measured, faster=state.faster)}
    run.journal.write_job(run.journal.job() | facts)


def _take_scoring(run: JobRun, state: CriticOverlapState, publishing: float) -> None:
    """Record when responses were finished and scored, if this process has seen all of them."""
    seen = run.state.incremental
    indices = [sample.index for sample in run.state.ledger.samples if not sample.left_out]
    if not indices or any(index not in seen.finished or index not in seen.scored for index in indices):
        return
    first = min(seen.begun.values(), default=math.inf)
    finished = [max(0.0, seen.finished[index] - first) for index in indices]
    scored = [max(0.0, seen.scored[index] - first) for index in indices]
    if run.context.spec.inference.overlap == "Disabled":  # scoring begins when all is generated
        finished = [max(finished)] * len(finished)
    state.last = SeenIteration(state.trained_tokens, publishing, tuple(finished), state.beside)
    if not state.beside:
        rate, latency = rate_of(finished, scored), latency_of(finished, scored)
        state.measured = state.measured.with_scoring(rate, latency, _late_share(run))


def _late_share(run: JobRun) -> float:
    """Return the share of scoring time spent in trained models; 1 without observations."""
    trained = {task.name for task in run.context.tasks if task.model in run.context.scored_models}
    passes = run.state.incremental.passes
    whole = sum(line.seconds for line in passes.values())
    return sum(line.seconds for task, line in passes.items() if task in trained) / whole if whole > 0 else 1.0
