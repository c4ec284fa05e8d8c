"""The counterfactual of incremental scoring in mode Auto: an iteration's time with and without it.

The next iteration scores early if that gains enough.
"""

import asyncio
import logging
from typing import Final

import numpy as np

from rlhf_api.score_blocks import incremental_tasks
from rlhf_common.names import Group
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_planner.inter_stage.costs import SCORE_BATCH
from rlhf_planner.inter_stage.fitted_costs import PassFormula
from rlhf_planner.inter_stage.incremental_gain import IncrementalGain, TokenCosts, Trace, incremental_gain

log = logging.getLogger(__name__)

MODE: Final = "Auto"


def estimate_gain(run: JobRun) -> None:
    """Start to simulate the gain of early scoring in a fully scored iteration, in mode Auto."""
    if run.context.spec.inference.incremental != MODE or not incremental_dispatch.is_possible(run.context):
        return
    trace = trace_of(run)
    if trace is not None:
        run.background.start("incremental gain", _estimate(run, run.state.iteration, trace, costs_of(run)))


def trace_of(run: JobRun) -> Trace | None:
    """Return the observed times of the iteration, in seconds from its first lease.

    Return None when this process has not seen all of the iteration, or no worker that scores.
    """
    state, incremental_state = run.state, run.state.incremental
    indices = range(len(state.ledger.samples))
    if any(index not in incremental_state.begun or index not in incremental_state.finished for index in indices):
        return None
    first = min(incremental_state.begun.values())
    joined = {name: moment - first for name, moment in incremental_state.joined.items()}
    joined |= {worker.name: 0.0 for worker in state.fleet.in_group(Group.INFERENCE) if worker.connected}
    if not joined:
        return None
    return Trace(
        begun=np.array([incremental_state.begun[index] - first for index in indices]),
        finished=np.array([incremental_state.finished[index] - first for index in indices]),
        prompts=np.array(state.prompt_tokens, dtype=np.int64),
        responses=np.array([len(sample.response) for sample in state.ledger.samples], dtype=np.int64),
        joined=dict(enumerate(joined.values())),
    )


def costs_of(run: JobRun) -> TokenCosts:
    """Return the scoring costs of the iteration, from the observations of its passes."""
    early, late = PassFormula(), PassFormula()
    for task, line in run.state.incremental.passes.items():
        work = line.fitted()
        if task in incremental_tasks(run.context.tasks):
            early = PassFormula(setup=early.setup + work.setup, per_token=early.per_token + work.per_token)
        else:
            late = PassFormula(setup=late.setup + work.setup, per_token=late.per_token + work.per_token)
    return TokenCosts(early, late, 1 if run.context.spec.deterministic else SCORE_BATCH)


async def _estimate(run: JobRun, iteration: int, trace: Trace, costs: TokenCosts) -> None:
    incremental_state = run.state.incremental
    gain = await asyncio.to_thread(incremental_gain, trace, costs)
    if gain.worthwhile != incremental_state.chosen:
        text = _choice_message(gain)
        log.info(text)
        run.event("incremental-choice", text)
    incremental_state.planned = gain.worthwhile
    if run.state.iteration == iteration:
        incremental_state.predicted = gain.without - gain.with_prefixes
    else:
        incremental_state.adopt()
        run.wake()


def _choice_message(gain: IncrementalGain) -> str:
    change = f"take {gain.with_prefixes:.3g} s instead of {gain.without:.3g} s"
    if gain.worthwhile:
        return f"unfinished samples are scored early: the last iteration would {change}"
    return f"samples are scored when they are finished: with prefixes the last iteration would {change}"
