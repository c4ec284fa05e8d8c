"""The choice of the schedule that training runs: measured on the ranks, searched in a child process, stored.

  stages      the ranks time their stages and transfers
  searching   `schedule_search` looks for fused tables
  tables      mode Auto: the ranks time whole mini-batches
  decided     training may start

A choice is stored in the journal's facts. A failed search leaves the serial table.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_common.schedule import ScheduleTable
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.job.child_process import ask_module
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling.training_schedule import candidates, question
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_planner.schedule.methods import METHODS, pick
from rlhf_planner.schedule.serial import METHOD as SERIAL

log = logging.getLogger(__name__)

SEARCH: Final = "rlhf_coordinator.training.schedule_search"
SEARCH_TIMEOUT_SECONDS: Final = 90.0
"""Time-out of the child process in seconds."""
VERIFY_SECONDS: Final = 5.0
"""Predicted seconds for timing mini-batches, for all tables together, unless one round takes more."""
MAX_ROUNDS: Final = 5
"""Most timings of each table; the median counts."""
MEASUREMENTS_PER_COORDINATOR: Final = 1 << 20
"""Measurement ids per coordinator; the first one is the coordinator's epoch times this, plus 1."""


def measure_schedules(run: JobRun) -> None:
    """Let all ranks measure at once; results of an earlier measurement are dropped."""
    state, group = run.state.schedule, run.state.fleet.ranks()
    state.measurement_id = max(state.measurement_id, run.coordinator_epoch * MEASUREMENTS_PER_COORDINATOR) + 1
    state.results = {}
    order = pb.Measure(measurement_id=state.measurement_id)
    detail = "measure its pipeline stages"
    if state.stage == "tables":
        order.schedules.extend(state.candidates[method]["table"] for method in state.timed)
        predicted = sum(state.candidates[method]["predicted"] for method in state.timed)
        order.rounds = max(1, min(MAX_ROUNDS, int(VERIFY_SECONDS / max(predicted, 1e-6))))
        detail = f"time mini-batches under the schedules {', '.join(state.timed)}"
    for rank in group:
        pending = PendingCommand(CommandKind.MEASURE, 0.0, detail, role=Group.TRAINING)
        send(run, rank.name, pb.Command(measure=order), pending)


def take_measurement(run: JobRun, rank: str, result: pb.MeasureResult) -> None:
    """Record a rank's measurement; with the last answer the choice continues. Ignore an answer that is not awaited."""
    state = run.state.schedule
    if result.measurement_id != state.measurement_id or state.stage not in ("stages", "tables"):
        return
    state.results[rank] = result
    if len(state.results) < len(run.state.fleet.ranks()):
        return
    if state.stage == "stages":
        state.stage = "searching"
        run.background.start("schedule search", _search(run))
    else:
        _decide(run, _mini_batch_seconds(run))


def use_serial_schedule(run: JobRun, why: str) -> None:
    """Choose the serial table, and report why; do nothing after a choice."""
    if run.state.schedule.stage == "decided":
        return
    log.warning("no fused training schedule is used: %s", why)
    run.event("schedule-not-fused", why)
    _store_choice(run, SERIAL, {}, why)


# ---------------------------------------------------------------- searching


class _Candidate(BaseModel):
    """An entry of the search's answer."""

    table: str
    predicted: Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
    steps: list[list[tuple[int, str, int, int, float, float]]]


_ANSWER: Final = TypeAdapter(dict[str, _Candidate])


async def _search(run: JobRun) -> None:
    """Search and continue the choice. A failed search leaves the serial table; a failed journal ends the job."""
    try:
        try:
            answer = await ask_module(SEARCH, _question(run), SEARCH_TIMEOUT_SECONDS)
            _check(answer, (SERIAL, *candidates(run.context.spec)))
        except (OSError, ValueError, RuntimeError, TimeoutError) as error:
            use_serial_schedule(run, f"the search for schedules failed: {error or type(error).__name__}")
        else:
            _continue_with(run, answer)
    except JobError as error:
        run.state.failure = run.state.failure or error.failure
    finally:
        run.wake()


def _check(answer: dict[str, Any], methods: Sequence[str]) -> None:
    """Raise ValueError for an answer without a usable table of each method."""
    for method, candidate in _ANSWER.validate_python(answer).items():
        table = ScheduleTable.model_validate_json(candidate.table)
        if any(not 0 <= step[0] < len(table.pipelines) for row in candidate.steps for step in row):
            raise ValueError(f"a step of {method} is of no pipeline of its table")
    if missing := [method for method in methods if method not in answer]:
        raise ValueError(f"the answer has no table for {', '.join(missing)}")


def _continue_with(run: JobRun, answer: dict[str, Any]) -> None:
    """Choose among the tables of the search, or have them timed."""
    state = run.state.schedule
    state.candidates = answer
    for method, table in answer.items():
        log.info(
            "training schedule %s: predicted %.4g s per mini-batch%s",
            method,
            table["predicted"],
            f", found by {table['by']} in {table.get('seconds', 0.0):.1f} s" if "by" in table else "",
        )
    predicted = {method: table["predicted"] for method, table in answer.items()}
    mode = run.context.spec.fusion.intra_stage.mode
    if mode == "Auto" and pick(predicted) != SERIAL:
        state.timed = tuple(m for m in METHODS if m == SERIAL or predicted.get(m, 1e300) < predicted[SERIAL])
        state.stage = "tables"
    elif mode == "Auto":
        _store_choice(run, SERIAL, {}, "no fused schedule is predicted to be faster")
    else:
        _decide(run, {})


def _question(run: JobRun) -> dict[str, Any]:
    spec, state = run.context.spec, run.state
    stages: dict[tuple[str, int], pb.StageTime] = {}
    transfers: dict[tuple[int, int], float] = {}
    for result in state.schedule.results.values():
        for time in result.stages:  # the slowest of several replicas counts: a mini-batch waits for it
            slowest = stages.get((time.model, time.stage))
            if slowest is None or time.forward + time.backward > slowest.forward + slowest.backward:
                stages[time.model, time.stage] = time
        for edge in result.transfers:
            transfers[edge.rank, edge.peer] = max(edge.seconds, transfers.get((edge.rank, edge.peer), 0.0))
    fields = spec.algorithm.fields
    return {
        "serial": run.context.schedule,
        "methods": candidates(spec),
        "costs": [
            {
                "model": model,
                "stage": stage,
                "cost": [
                    time.forward, time.backward, time.input_gradient, time.weight_gradient,
                    float(time.activation_bytes),
                ],
            }
            for (model, stage), time in sorted(stages.items())
        ],
        "transfers": [{"rank": a, "peer": b, "seconds": seconds} for (a, b), seconds in sorted(transfers.items())],
        "activation_bytes": min(result.activation_room_bytes for result in state.schedule.results.values()),
        "steps": spec.iterations * fields.epochs * (spec.rollout.batch_size // fields.mini_batch_size),
        "cache": str(run.journal.folder.parent / "schedules"),
    }  # fmt: skip


# ---------------------------------------------------------------- deciding


def _mini_batch_seconds(run: JobRun) -> dict[str, float]:
    """Return for each timed method the (upper) median over rounds of the slowest rank's seconds."""
    state = run.state.schedule
    seconds = {}
    for index, method in enumerate(state.timed):
        rounds = zip(*(result.tables[index].seconds for result in state.results.values()), strict=True)
        slowest = sorted(max(seconds_of_ranks) for seconds_of_ranks in rounds)
        seconds[method] = slowest[len(slowest) // 2]
    return seconds


def _decide(run: JobRun, seconds: dict[str, float]) -> None:
    """Choose among the measured tables (mode Auto, `pick`), or the requested one."""
    state = run.state.schedule
    method = pick(seconds) if seconds else candidates(run.context.spec)[0]
    predicted = {name: table["predicted"] for name, table in state.candidates.items()}
    parts = [
        f"{name} {seconds[name]:.4g} s (predicted {predicted[name]:.4g} s)"
        if name in seconds
        else f"{name} predicted {predicted[name]:.4g} s"
        for name in predicted
    ]
    _store_choice(run, method, seconds, ", ".join(parts))


def _store_choice(run: JobRun, method: str, seconds: dict[str, float], why: str) -> None:
    """Store the choice in the journal's facts, then use and report it."""
    state, context = run.state.schedule, run.context
    chosen = state.candidates.get(method, {})
    predicted = {name: table["predicted"] for name, table in state.candidates.items()}
    record = {
        "question": question(context.spec, context.schedule),
        "method": method,
        "table": chosen.get("table", context.schedule),
        "predicted": predicted,
        "measured": seconds,
        "steps": chosen.get("steps", []),
        "why": why,
    }
    run.journal.write_job(run.journal.job() | {"schedule": record})
    state.take(record)
    text = f"training runs schedule {method}: {why}"
    log.info(text)
    run.event(
        "schedule",
        text,
        method=method,
        **{f"predicted_{name}": f"{value:.6f}" for name, value in predicted.items()},
        **{f"measured_{name}": f"{value:.6f}" for name, value in seconds.items()},
    )
