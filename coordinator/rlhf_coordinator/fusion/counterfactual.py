"""Incremental scoring in mode Auto: a scored iteration is replayed with and without, and the next one follows.

Rule: until an iteration was seen whole nothing is scored early, and whatever goes wrong leaves it at that. Replaying
takes milliseconds to a second, in a thread while training runs; nobody waits for it. When the process dies the first
iteration of the next one does without.
"""

import asyncio
import logging
from typing import Final

import numpy as np

from rlhf_api.names import Group
from rlhf_api.score_blocks import incremental_tasks
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_planner.inter_stage.costs import SCORE_BATCH
from rlhf_planner.inter_stage.fitted_costs import PassCost
from rlhf_planner.inter_stage.incremental_gain import IncrementalGain, TokenCosts, Trace, incremental_gain

log = logging.getLogger(__name__)

MODE: Final = "Auto"


def estimate_gain(run: JobRun) -> None:
    """All of an iteration is scored: what does scoring early gain in it?"""
    if run.context.spec.inference.incremental != MODE or not incremental_dispatch.is_possible(run.context):
        return
    trace = trace_of(run)
    if trace is not None:
        run.background.start("incremental gain", _estimate(run, run.state.iteration, trace, costs_of(run)))


def trace_of(run: JobRun) -> Trace | None:
    """The iteration as it went; None when this process has not seen all of it."""
    state, fusion = run.state, run.state.incremental
    indices = range(len(state.ledger.samples))
    if any(index not in fusion.begun or index not in fusion.finished for index in indices):
        return None
    first = min(fusion.begun.values())
    joined = {name: moment - first for name, moment in fusion.joined.items()}
    joined |= {worker.name: 0.0 for worker in state.fleet.of(Group.INFERENCE) if worker.connected}
    if not joined:
        return None
    return Trace(
        begun=np.array([fusion.begun[index] - first for index in indices]),
        finished=np.array([fusion.finished[index] - first for index in indices]),
        prompts=np.array(state.prompt_tokens, dtype=np.int64),
        responses=np.array([len(sample.response) for sample in state.ledger.samples], dtype=np.int64),
        joined=dict(enumerate(joined.values())),
    )


def costs_of(run: JobRun) -> TokenCosts:
    """What scoring took in the iteration, by the spans of its passes."""
    early, late = PassCost(), PassCost()
    for task, line in run.state.incremental.passes.items():
        work = line.fitted()
        if task in incremental_tasks(run.context.tasks):
            early = PassCost(setup=early.setup + work.setup, per_token=early.per_token + work.per_token)
        else:
            late = PassCost(setup=late.setup + work.setup, per_token=late.per_token + work.per_token)
    return TokenCosts(early, late, 1 if run.context.spec.deterministic else SCORE_BATCH)


async def _estimate(run: JobRun, iteration: int, trace: Trace, costs: TokenCosts) -> None:
    fusion = run.state.incremental
    told = await asyncio.to_thread(incremental_gain, trace, costs)
    if told.worthwhile != fusion.chosen:
        text = _choice_message(told)
        log.info(text)
        run.event("incremental-choice", text)
    fusion.planned = told.worthwhile
    if run.state.iteration == iteration:
        fusion.predicted = told.without - told.with_prefixes
    else:
        fusion.adopt()
        run.wake()


def _choice_message(told: IncrementalGain) -> str:
    change = f"take {told.with_prefixes:.3g} s instead of {told.without:.3g} s"
    if told.worthwhile:
        return f"unfinished samples are scored early: the last iteration would {change}"
    return f"samples are scored when they are finished: with prefixes the last iteration would {change}"
