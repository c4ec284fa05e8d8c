"""Watches the plan for spec.devices over the iterations, decides about another one, and changes it at a checkpoint.

  iteration ends -> drift? -> search in a child process -> decision, in the journal's facts
  checkpoint saved, replan Auto -> the new plan replaces the old one in the facts -> the job stops and starts again

If the process dies before a decision is written, the next one measures and searches again. A coordinator that starts
with other sizes than those of an adopted plan stops at once.
"""

import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api.device_sizes import DevicePlanRecord, planned_job
from rlhf_api.job import RLHFJob
from rlhf_common.json_numbers import finite_number
from rlhf_coordinator.device_plan import REPLANNING_KEY, written_plan
from rlhf_coordinator.job.child_process import ask_module
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.job.plan_drift_metrics import measured_stages
from rlhf_coordinator.learned_figures import PLAN_KEY, journal_facts
from rlhf_coordinator.state.job_state import StopOrder
from rlhf_coordinator.storage.journal import Journal
from rlhf_planner.plan_search.replanning import (
    PlanHistory,
    PlanProspect,
    ReplanVerdict,
    decide,
    drift_reason,
    is_worth,
)

log = logging.getLogger(__name__)

SEARCH: Final = "rlhf_coordinator.replanning.search"
SEARCH_SECONDS: Final = 120.0
"""Time-out of a search in seconds."""
LONGEST_CHANGE_SECONDS: Final = 600.0
"""Seconds between the change and the first work beyond which the job counts as paused in between."""
STOP_REASON: Final = "the plan for spec.devices changes: the job starts again with other sizes"


# ---------------------------------------------------------------- starts


def is_adopted(journal: Journal) -> bool:
    """Return whether the plan that the journal records has replaced another one and has not been started yet."""
    return bool(_facts(journal).get("adopted"))


def last_decision(run_dir: Path) -> str:
    """Return the last decision about a run's plan in words; empty without one, or if the journal cannot be read."""
    try:
        return str(journal_facts(run_dir)[REPLANNING_KEY].get("words") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def awaits_restart(job: RLHFJob, plan: DevicePlanRecord | None, journal: Journal) -> bool:
    """Return whether a job's sizes are those of an earlier plan than the adopted one."""
    return plan is not None and is_adopted(journal) and planned_job(job, plan.sizes).spec != job.spec


def begin(run: JobRun) -> None:
    """Watch the plan of a job that starts, from the facts of earlier processes."""
    plan, devices = run.context.device_plan, run.context.spec.devices
    if plan is None or devices is None:
        return
    if awaits_restart(run.context.job, plan, run.journal):
        run.state.stop = StopOrder(checkpoint=True, reason=STOP_REASON)
        return
    facts = _facts(run.journal)
    state = run.state.plan_drift
    if facts.pop("adopted", False):
        state.adopted_ns = int(_seconds(facts, "adoptedNs"))
        run.journal.write_job(run.journal.job() | {REPLANNING_KEY: facts})
        run.event("replanned", f"the job goes on with another plan: {plan.words}")
    if devices.replan == "Disabled":
        return
    starting = run.totals.phases.until(time.monotonic()).get("Starting", 0.0)
    state.process_seconds = max(0.0, _process_age() - starting)
    state.restart_seconds = _seconds(facts, "restartSeconds")
    state.words = str(facts.get("words") or "")
    state.predicted = _seconds(facts, "predicted")
    if not state.predicted:
        state.predicted = plan.predicted_seconds
        state.stages = {name: stage.seconds for name, stage in plan.stages.items()}
    if devices.replan == "Auto":
        state.pending, state.gain_seconds = _pending(facts), _seconds(facts, "gainSeconds")


def _process_age() -> float:
    """Return the seconds since this process was started, from /proc (Linux)."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _facts(journal: Journal) -> dict[str, Any]:
    facts = journal.job().get(REPLANNING_KEY)
    return facts if isinstance(facts, dict) else {}


def _seconds(facts: Mapping[str, Any], name: str) -> float:
    """Return a stored number of seconds; 0 for an absent or invalid one."""
    return max(0.0, finite_number(facts.get(name)) or 0.0)


def _pending(facts: Mapping[str, Any]) -> DevicePlanRecord | None:
    try:
        return DevicePlanRecord.model_validate(facts.get("pending"))
    except ValidationError:
        return None


# ---------------------------------------------------------------- iterations


def iteration_ended(run: JobRun) -> None:
    """Record the iteration that is closed, and search for another plan if the plan in force has drifted."""
    state = run.state.plan_drift
    if not state.predicted:
        return
    state.checkpoint_seconds = max(state.checkpoint_seconds, run.times.seconds.get("Checkpointing", 0.0))
    _take_start(run)
    state.lengths_drifted |= run.state.fusion.lengths.drifted
    if measured := measured_stages(run):
        state.measured.append(measured)
    state.first = False
    if state.searching or state.pending is not None or not (reason := drift_reason(_history(run))):
        return
    state.searching = True
    run.background.start("search for another plan", _search(run, reason))


def adopt_at_checkpoint(run: JobRun) -> None:
    """Replace the plan by the pending one if the closed iteration's weights are in a checkpoint, and stop the job.

    A plan that no longer pays for the restart is dropped.
    """
    state, closed = run.state.plan_drift, run.state.iteration
    if state.pending is None or run.state.stop is not None or run.state.checkpoint.newest != closed + 1:
        return
    pending = state.pending.model_copy(update={"since": closed + 1})
    left = run.context.spec.iterations - closed - 1
    state.pending = None
    if not is_worth(state.gain_seconds, left, _restart_seconds(run)):
        state.words = f"{pending.summary} is not started: it would save too little in {left} iterations"
        _store(run)
        return
    words = f"the plan changed after {closed + 1} iterations: {pending.words}"
    facts = {
        "adopted": True,
        "adoptedNs": time.time_ns(),
        "restartSeconds": state.restart_seconds,
        "words": words,
        "predicted": max(0.0, state.predicted - state.gain_seconds),
    }
    run.journal.write_job(run.journal.job() | {PLAN_KEY: written_plan(pending), REPLANNING_KEY: facts})
    log.info("%s: %s", STOP_REASON, pending.words)
    run.event("replan", f"{STOP_REASON}: {pending.words}")
    run.state.stop = StopOrder(checkpoint=True, reason=STOP_REASON)


def _take_start(run: JobRun) -> None:
    """Record how long the change of plan or this coordinator's start took, unless an earlier one took longer."""
    state = run.state.plan_drift
    seconds = state.process_seconds + run.totals.phases.until(time.monotonic()).get("Starting", 0.0)
    if state.adopted_ns:
        work = sum(spent for phase, spent in run.times.seconds.items() if phase != "Starting")
        change = (time.time_ns() - state.adopted_ns) / 1e9 - work
        seconds = max(seconds, change) if change < LONGEST_CHANGE_SECONDS else seconds
        state.adopted_ns = 0
    if seconds > state.restart_seconds:
        state.restart_seconds = seconds
        _store(run)


def _restart_seconds(run: JobRun) -> float:
    state = run.state.plan_drift
    return state.restart_seconds + state.checkpoint_seconds if state.restart_seconds else math.inf


def _history(run: JobRun) -> PlanHistory:
    state = run.state.plan_drift
    left = run.context.spec.iterations - run.state.iteration - 1
    return PlanHistory(
        state.predicted, state.stages, tuple(state.measured), state.lengths_drifted, left, _restart_seconds(run)
    )


# ---------------------------------------------------------------- decisions


async def _search(run: JobRun, reason: str) -> None:
    question = {"run": str(run.journal.folder.parent), "job": run.context.job.model_dump(mode="json", by_alias=True)}
    try:
        answer = await ask_module(SEARCH, question, SEARCH_SECONDS)
        own, best = (DevicePlanRecord.model_validate(answer[name]) for name in ("own", "best"))
    except (OSError, ValueError, KeyError, RuntimeError, TimeoutError) as error:
        log.warning("another plan could not be searched: %s", error or type(error).__name__)
        state = run.state.plan_drift
        state.searching, state.lengths_drifted = False, False
        state.measured.clear()
        return
    take_forecasts(run, reason, own, best)


def take_forecasts(run: JobRun, reason: str, own: DevicePlanRecord, best: DevicePlanRecord) -> None:
    """Decide about the plan in force from the forecasts of it and of the fastest plan; `reason` is why it drifted."""
    state = run.state.plan_drift
    other = None if best.sizes == own.sizes else _prospect(best)
    verdict = decide(_history(run), _prospect(own), other)
    devices = run.context.spec.devices
    auto = devices is not None and devices.replan == "Auto"
    state.predicted, state.stages = verdict.measured_seconds, {}
    state.measured.clear()
    state.lengths_drifted = state.searching = False
    state.pending, state.gain_seconds = (best, verdict.gain_seconds) if verdict.replan and auto else (None, 0.0)
    state.words = f"{reason}: {_consequence(verdict, auto=auto)}"
    _store(run)
    log.info("plan for spec.devices: %s", state.words)
    run.event("plan-drift", state.words)


def _prospect(plan: DevicePlanRecord) -> PlanProspect:
    assumed = frozenset(name for name, stage in plan.stages.items() if stage.source == "assumed")
    stages = {name: stage.seconds for name, stage in plan.stages.items()}
    return PlanProspect(plan.summary, plan.predicted_seconds, stages, assumed)


def _consequence(verdict: ReplanVerdict, *, auto: bool) -> str:
    if not verdict.replan:
        return f"the plan stays, because {verdict.reason}"
    if auto:
        return f"the plan changes at the next checkpoint, because {verdict.reason}"
    return f"{verdict.reason}; spec.devices.replan Auto would change to it"


def _store(run: JobRun) -> None:
    """Write the decision and the measured start into the facts."""
    state, plan = run.state.plan_drift, run.context.device_plan
    facts: dict[str, Any] = {"restartSeconds": state.restart_seconds, "words": state.words}
    if plan is not None and state.predicted != plan.predicted_seconds:
        facts["predicted"] = state.predicted
    if state.pending is not None:
        facts |= {"pending": written_plan(state.pending), "gainSeconds": state.gain_seconds}
    run.journal.write_job(run.journal.job() | {REPLANNING_KEY: facts})
