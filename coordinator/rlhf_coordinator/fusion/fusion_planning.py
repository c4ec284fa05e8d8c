"""Inter-stage fusion over the life of a job: measured costs, learned lengths, and plans for the tails of iterations.

In mode Auto a simulation in a thread chooses the plan. If it fails, fusion is off until the process ends.
"""

import asyncio
import logging
import statistics
import time
from typing import Final

from rlhf_api.algorithms import samples_begun
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.fusion import counterfactual, learning, long_rounds_choice, reallocation
from rlhf_coordinator.fusion.learning import iteration_setup
from rlhf_coordinator.job.commands import send
from rlhf_coordinator.job.job_run import JobRun, iteration_prompts
from rlhf_coordinator.job.next_samples import expected_lengths, next_samples
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.scheduling.consolidation import Consolidation, fusion_possible
from rlhf_coordinator.state.carried_sample import origin_in
from rlhf_coordinator.state.fusion_state import LINK_BYTES_PER_SECOND, NO_FUSION
from rlhf_coordinator.state.worker import CommandKind, PendingCommand
from rlhf_planner.inter_stage.choose import FusionChoice, choose
from rlhf_planner.inter_stage.costs import StageCosts, score_batch_of
from rlhf_planner.inter_stage.fitted_costs import StepTime
from rlhf_planner.inter_stage.forecast import IterationSetup

log = logging.getLogger(__name__)

BALANCE_INTERVAL_SECONDS: Final = 0.25
"""Least seconds between the end of a tick in which balancing was allowed and the next such tick."""
MEASUREMENTS_PER_COORDINATOR: Final = 1 << 20
"""Measurement ids per coordinator; the first one is the coordinator's epoch times this, plus 1."""


# ---------------------------------------------------------------- costs


def measure_costs(run: JobRun, decision: d.MeasureCosts) -> None:
    """Ask a worker to measure the cost of a role's work."""
    fusion = run.state.fusion
    fusion.measurement_id = fusion.measurement_id or run.coordinator_epoch * MEASUREMENTS_PER_COORDINATOR + 1
    order = pb.Measure(measurement_id=fusion.measurement_id, role=decision.role)
    pending = PendingCommand(CommandKind.MEASURE, 0.0, f"measure what {decision.role} costs", role=decision.role)
    send(run, decision.worker, pb.Command(measure=order), pending)


def take_measured_costs(run: JobRun, worker: str, role: str, result: pb.MeasureResult) -> None:
    """Store a worker's measurement of one of its roles; ignore the answer to an earlier measurement."""
    if result.measurement_id == run.state.fusion.measurement_id:
        run.state.fusion.results[worker, role] = result


def disable_fusion(run: JobRun, why: str) -> None:
    """Turn fusion off until this process ends, and report why."""
    if run.state.fusion.given_up:
        return
    run.state.fusion.given_up = why
    run.state.fusion.choice = NO_FUSION
    log.warning("generation and inference are not fused: %s", why)
    run.event("fusion-off", why)


def adopt_costs(run: JobRun) -> None:
    """Use the measured costs from here on, store them, and plan the iteration in progress; turn fusion off if they are
    invalid."""
    fusion, results = run.state.fusion, run.state.fusion.results
    generation = [result.generation for (_, role), result in results.items() if role == Group.GENERATION]
    scoring = [result.scoring for (_, role), result in results.items() if role == Group.INFERENCE]
    try:
        fusion.costs = _costs(run, generation, scoring)
    except ValueError as error:
        disable_fusion(run, f"the measured costs are invalid: {error}")
        return
    fusion.measured = True
    learning.store_costs(run)
    flat = fusion.costs.saturation_batch
    text = (
        f"a decode step of one sample takes {1000 * fusion.costs.decode_seconds(1, 256):.3g} ms, of {flat} about as "
        f"long; scoring one sample of 256 tokens {1000 * fusion.costs.score_seconds(1, 256):.3g} ms"
    )
    log.info(text)
    run.event("fusion-costs", text)
    begin_iteration(run)


def _costs(run: JobRun, generation: list[pb.GenerationCosts], scoring: list[pb.ScoringCosts]) -> StageCosts:
    """Return the costs from the median times of the workers; sizes come from the first worker."""
    spec, first = run.context.spec, generation[0]
    tasks: dict[str, list[list[pb.StepCost]]] = {}
    for costs_of_worker in scoring:
        for task in costs_of_worker.tasks:
            tasks.setdefault(task.task, []).append(list(task.costs))
    return StageCosts.measured(
        decode=_medians([list(costs.decode) for costs in generation]),
        prefill=_medians([list(costs.prefill) for costs in generation]),
        tasks={name: _medians(costs) for name, costs in tasks.items()},
        max_batch_size=first.max_batch_size or spec.generation.max_batch_size,
        wake_seconds=statistics.median([costs.onload_seconds for costs in scoring] or [0.0]),
        kv_bytes_per_token=float(first.kv_bytes_per_token),
        kv_room_bytes=float(first.kv_room_bytes) or None,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=first.replays,
        score_batch=score_batch_of(spec),
    )


def _medians(measured: list[list[pb.StepCost]]) -> list[StepTime]:
    by_shape: dict[tuple[int, int], list[float]] = {}
    for costs in measured:
        for cost in costs:
            by_shape.setdefault((cost.batch, cost.tokens), []).append(cost.seconds)
    return [StepTime(*shape, statistics.median(seconds)) for shape, seconds in sorted(by_shape.items())]


# ---------------------------------------------------------------- an iteration


def begin_iteration(run: JobRun) -> None:
    """Reset fusion for the iteration in progress, and plan its tail if it may consolidate and a plan is possible."""
    fusion, settings = run.state.fusion, run.context.spec.fusion.inter_stage
    ahead = fusion.planned
    fusion.begin_iteration()
    if not fusion_possible(run.context, run.state) or run.state.ledger.all_generated:
        return
    if settings.mode == "Fixed":
        fusion.choice = FusionChoice(
            settings.threshold or 0, settings.pool or 0, settings.transfer, 0.0, 0.0, (), "as set in the manifest"
        )
    elif fusion.measured:
        iteration, setup = run.state.iteration, iteration_setup(run, run.state.prompt_tokens, run.state.prompt_lines)
        if fusion.planning != (iteration, setup):
            _plan_in_background(run, iteration, setup)
        elif ahead is not None:
            _adopt(run, ahead)


def plan_next_iteration(run: JobRun) -> None:
    """Learn from a fully scored iteration, and start the choices for the next one in the background."""
    learning.learn(run)
    long_rounds_choice.iteration_scored(run)
    if run.scheduled.consolidation.possible and run.state.fusion.learned is not None:
        run.state.fusion.learned |= reallocation.report(run)
    counterfactual.estimate_gain(run)
    after, mode = run.state.iteration + 1, run.context.spec.fusion.inter_stage.mode
    wanted = mode == "Auto" and run.state.fusion.measured and run.scheduled.consolidation.possible
    if wanted and not run.context.last(run.state.iteration):
        cut, expected = run.state.ledger.carry_over(), expected_lengths(run, after)
        carried, _ = next_samples(run, after, cut, run.prompts.schedules, expected)
        begun = range(samples_begun(run.context.spec, run.prompts.schedules, after))
        prompts = iteration_prompts(run.prompts, (origin_in(carried, after, index) for index in begun))
        _plan_in_background(run, after, iteration_setup(run, *prompts))


def _plan_in_background(run: JobRun, iteration: int, setup: IterationSetup) -> None:
    run.state.fusion.planning = iteration, setup
    run.background.start("fusion choice", _choose(run, iteration, setup))


async def _choose(run: JobRun, iteration: int, setup: IterationSetup) -> None:
    state, fusion = run.state, run.state.fusion
    try:
        choice = await asyncio.to_thread(
            choose, fusion.lengths, setup, fusion.costs, run.context.spec.seed + iteration
        )  # fmt: skip
    except ValueError as error:
        disable_fusion(run, f"no plan could be simulated: {error}")
        return
    if fusion.given_up or fusion.planning != (iteration, setup):
        return
    if iteration > state.iteration:
        fusion.planned = choice
    elif iteration == state.iteration:
        _adopt(run, choice)
        run.wake()


def _adopt(run: JobRun, choice: FusionChoice) -> None:
    """Apply a choice to the iteration in progress."""
    run.state.fusion.choice = choice
    run.event("fusion-choice", choice.reason, threshold=str(choice.threshold), pool=str(choice.pool))
    log.info("iteration %d: %s", run.state.iteration, choice.reason)


def track_consolidation(run: JobRun, before: Consolidation) -> None:
    """Record when the tail consolidates and when that ends, by comparison with the state `before`.

    Plan the next iteration once this one is scored, and set the time of the next balancing.
    """
    state, fusion, now = run.state, run.state.fusion, time.monotonic()
    if fusion.learned is None and state.ledger.all_scored:
        plan_next_iteration(run)
    fusion.next_balance = now + BALANCE_INTERVAL_SECONDS if now >= fusion.next_balance else fusion.next_balance
    pool = run.scheduled.consolidation.pool
    if bool(pool) == bool(before.pool):
        return
    if pool:
        text = f"{state.ledger.unfinished} samples are unfinished; the tail consolidates on {', '.join(pool)}"
        run.event("pool-formed", text, workers=",".join(pool))
    else:
        run.event("pool-dissolved", "every response is finished", workers="")
