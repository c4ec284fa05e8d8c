"""Long rounds in mode Auto: chooses the surplus prompts of short rounds, from the job's lengths and measured costs.

A choice takes effect when an iteration begins and no prompt waits. The iteration's first record has it, so a restart
needs no choice.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rlhf_api.algorithms import samples_per_prompt
from rlhf_api.algorithms.iteration_prompts import MAX_PERIOD, PromptSchedule, PromptSchedules
from rlhf_coordinator.fusion.learning import iteration_setup
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.storage.batch import responses_with_origins
from rlhf_planner.inter_stage.lengths import WINDOW, LengthModel
from rlhf_planner.inter_stage.long_rounds import JOB_KEY, RoundsChoice, choose_rounds
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup
from rlhf_planner.rollout_overlap import MEASURED, RolloutTimes, rollout_times

log = logging.getLogger(__name__)

LEARNED: Final = 2
"""Least number of iterations whose lengths a choice is based on."""
RECONSIDERED: Final = 8
"""Least number of iterations between two choices without long rounds."""
PROMPTS: Final = 4096
"""Most prompts of the file that a simulation takes; a longer period repeats them."""

UNMEASURED: Final = (
    "no long rounds: costs are only measured where fusion is possible, which needs two generation workers, scoring "
    "models, and inference.overlap"
)


def restore(run: JobRun, facts: Mapping[str, Any]) -> None:
    """Restore the last reason, and the lengths of iterations whose segments exist.

    `facts`: the entry JOB_KEY of the journal's facts.
    """
    if not _chooses(run):
        return
    state = run.state.long_rounds
    state.lengths = LengthModel.prior(run.context.spec.rollout.max_response_tokens)
    remembered = _remembered(run)
    state.reason, state.since = str(facts.get("reason", "")), min([*remembered, run.state.iteration])
    for iteration in remembered:
        _learn(run, iteration, _trained_before(run, iteration))


def iteration_scored(run: JobRun) -> None:
    """Learn from a fully scored iteration, and simulate the ways if the next iteration may take another one.

    A second call for an iteration does nothing.
    """
    state, ledger = run.state.long_rounds, run.state.ledger
    if not _chooses(run) or state.learned == ledger.iteration:
        return
    included = [sample for sample in ledger.samples if not sample.left_out]
    tokens, lines = run.state.prompt_tokens, run.state.prompt_lines
    _learn(run, ledger.iteration, ((tokens[s.index], len(s.response), lines[s.index]) for s in included))
    if run.last_metrics:
        state.reports = [*state.reports, dict(run.last_metrics)][-MEASURED:]
    _consider(run, ledger.iteration + 1)


def next_schedules(run: JobRun, iteration: int) -> PromptSchedules:
    """Return the schedules of a job when an iteration begins, with a new one if it takes effect now."""
    schedules, state = run.prompts.schedules, run.state.long_rounds
    if not _chooses(run) or not schedules.may_change(iteration):
        return schedules
    now = schedules.at(iteration)
    extra = now.extra if state.choice is None else state.choice.extra
    left = run.context.spec.iterations - iteration
    if PromptSchedule(now.batch, extra, "Deferred").period > left:
        extra = 0
    return schedules.changed(iteration, extra)


def adopt(run: JobRun, iteration: int, schedules: PromptSchedules) -> None:
    """Put schedules in force that the record of an iteration contains, and report the choice behind them."""
    state = run.state.long_rounds
    before, run.prompts.schedules = run.prompts.schedules, schedules
    if not _chooses(run) or not before.may_change(iteration):
        return
    choice, state.choice = state.choice, None
    extra = schedules.at(iteration).extra
    if choice is not None and choice.extra == extra:
        _report(run, choice.reason, extra)
    elif schedules != before:
        left = run.context.spec.iterations - iteration
        _report(run, f"no long rounds: their period does not fit into the iterations left, {left}", extra)


def _report(run: JobRun, reason: str, extra: int) -> None:
    """Store and show why the schedule is in force."""
    run.state.long_rounds.reason = reason
    log.info(reason)
    run.event("long-rounds-choice", reason, surplus=str(extra))
    run.journal.write_job(run.journal.job() | {JOB_KEY: {"reason": reason}})


def _chooses(run: JobRun) -> bool:
    return run.context.spec.rollout.long_rounds == "Auto"


# ---------------------------------------------------------------- lengths


def _learn(run: JobRun, iteration: int, trained: Iterable[tuple[int, int, int]]) -> None:
    """Add the samples of an iteration, and learn the period when it ends. A period without its first iteration is left
    out."""
    state, schedules = run.state.long_rounds, run.prompts.schedules
    state.learned = iteration
    if schedules.may_change(iteration):
        state.trained, state.since = [], iteration
    state.trained += trained
    ends = schedules.at(iteration).waiting(iteration + 1) == 0
    if ends and state.trained and schedules.may_change(state.since):
        pairs = [(prompt, response) for prompt, response, _ in state.trained]
        state.lengths = state.lengths.with_batch(pairs, lines=[line for _, _, line in state.trained])
        state.periods += 1


def _remembered(run: JobRun) -> list[int]:
    """Return the earlier iterations to learn again: at least WINDOW where the journal has them, in whole periods."""
    found: list[int] = []
    before = [iteration for iteration in run.journal.iterations() if iteration < run.state.iteration]
    for iteration in reversed(before):
        found.append(iteration)
        if len(found) >= WINDOW and run.prompts.schedules.may_change(iteration):
            break
    return found[::-1]


def _trained_before(run: JobRun, iteration: int) -> list[tuple[int, int, int]]:
    """Return (prompt tokens, response tokens, line) of the samples on which an iteration of the journal trained."""
    found = responses_with_origins(run.journal.read(iteration), samples_per_prompt(run.context.spec))
    trained = [(run.prompts.prompt(*origin), len(message.tokens.data)) for message, origin, cut in found if not cut]
    return [(len(prompt.tokens) // ITEM_BYTES, size // ITEM_BYTES, prompt.line) for prompt, size in trained]


# ---------------------------------------------------------------- the choice


def _consider(run: JobRun, iteration: int) -> None:
    """Simulate the ways for an iteration, if one may begin there and enough is known."""
    state, fusion, schedules = run.state.long_rounds, run.state.fusion, run.prompts.schedules
    schedule = schedules.at(iteration)
    waits = state.choosing or state.choice is not None or not schedules.may_change(iteration)
    recent = not schedule.extra and state.considered is not None and iteration - state.considered < RECONSIDERED
    if waits or recent or run.context.last(iteration - 1):
        return
    times = rollout_times(state.reports)
    if not fusion.measured and not run.scheduled.consolidation.possible and not state.reason:
        _report(run, UNMEASURED, 0)
    if not fusion.measured or times is None or state.periods * schedule.period < LEARNED:
        return
    state.choosing, state.considered = True, iteration
    run.background.start("long rounds choice", _choose(run, _period_setup(run, iteration, times), iteration))


def _period_setup(run: JobRun, iteration: int, times: RolloutTimes) -> PeriodSetup:
    spec, schedule = run.context.spec, run.prompts.schedules.at(iteration)
    first, most = schedule.first(iteration), schedule.batch * MAX_PERIOD
    prompts = [run.prompts.begun(first + number) for number in range(max(schedule.batch, min(most, PROMPTS)))]
    tokens = [len(prompt.tokens) // ITEM_BYTES for prompt in prompts]
    lines = [prompt.line for prompt in prompts]
    return PeriodSetup(
        iteration_setup(run, tokens, ()),
        schedule.batch,
        samples_per_prompt(spec),
        tokens,
        lines,
        spec.rollout.cut_by,
        times.training,
        times.publishing,
        spec.rollout.overlap_training != "Disabled",
    )


async def _choose(run: JobRun, setup: PeriodSetup, iteration: int) -> None:
    state, spec = run.state.long_rounds, run.context.spec
    left = spec.iterations - iteration
    try:
        choice: RoundsChoice = await asyncio.to_thread(
            choose_rounds, state.lengths, setup, run.state.fusion.costs, left, spec.seed + iteration
        )
    except ValueError as error:
        log.warning("long rounds could not be simulated: %s", error)
        run.event("long-rounds-choice", f"the schedule stays, because long rounds could not be simulated: {error}")
        return
    finally:
        state.choosing = False
    state.choice = choice
