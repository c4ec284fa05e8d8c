"""Inter-stage fusion over a job's life: costs are measured once, lengths learned, every iteration's tail planned.

    measure (Auto, once a job) -> costs, written down -> at the begin of an iteration: choose -> at its end: learn
Choosing simulates, in a thread; until it is done an iteration fuses nothing, and nobody waits for it. Whatever goes
wrong in measuring or choosing leaves generation and inference as they are without fusion: slower, never wrong.
When the process dies the costs are in the journal's facts, and lengths are read again from the segments it kept.
"""

import asyncio
import logging
import statistics
import time
from dataclasses import replace
from typing import Any, Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import Group
from rlhf_operator.coordinator import decisions as d
from rlhf_operator.coordinator import release
from rlhf_operator.coordinator.commands import send
from rlhf_operator.coordinator.fleet import Pending, Work
from rlhf_operator.coordinator.fusion_state import LINK_BYTES_PER_SECOND, NO_FUSION
from rlhf_operator.coordinator.run import Run
from rlhf_operator.coordinator.sample import ITEM_BYTES
from rlhf_planner.inter_stage.choose import FusionChoice, choose
from rlhf_planner.inter_stage.costs import JOB_KEY, Kind, StageCosts, StepTime
from rlhf_planner.inter_stage.layout import Forecast, Layout
from rlhf_planner.inter_stage.lengths import WINDOW
from rlhf_planner.inter_stage.simulate import simulate

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.25
"""Between two looks at how evenly samples are spread."""
ATTEMPTS_PER_COORDINATOR: Final = 1 << 20
"""Numbers of attempts start at the coordinator's epoch times this."""


# ---------------------------------------------------------------- costs


def ask(run: Run, decision: d.MeasureWork) -> None:
    """Lets a worker measure what the work of a role costs."""
    state = run.world.fusion
    state.attempt = state.attempt or run.coordinator_epoch * ATTEMPTS_PER_COORDINATOR + 1
    order = pb.Measure(attempt=state.attempt, role=decision.role)
    pending = Pending(Work.MEASURE, 0.0, f"measure what {decision.role} costs", role=decision.role)
    send(run, decision.worker, pb.Command(measure=order), pending)


def measured(run: Run, worker: str, role: str, result: pb.MeasureResult) -> None:
    """A worker has measured one of its roles."""
    if result.attempt == run.world.fusion.attempt:
        run.world.fusion.results[worker, role] = result


def give_up(run: Run, why: str) -> None:
    """This job fuses nothing any more."""
    if run.world.fusion.given_up:
        return
    run.world.fusion.given_up = why
    run.world.fusion.choice = NO_FUSION
    log.warning("generation and inference are not fused: %s", why)
    run.event("fusion-off", why)


def take_costs(run: Run) -> None:
    """Everybody has measured: the costs are the job's from here on."""
    state, results = run.world.fusion, run.world.fusion.results
    generation = [result.generation for (_, role), result in results.items() if role == Group.GENERATION]
    scoring = [result.scoring for (_, role), result in results.items() if role == Group.INFERENCE]
    try:
        state.costs = _costs(run, generation, scoring)
    except ValueError as error:
        give_up(run, f"what was measured makes no sense: {error}")
        return
    state.measured = True
    run.journal.write_job(run.journal.job() | {JOB_KEY: {"costs": state.costs.document()}})
    flat = state.costs.saturation_batch
    text = (
        f"a decode step of one sample takes {1000 * state.costs.decode_seconds(1, 256):.3g} ms, of {flat} about as "
        f"long; scoring one sample of 256 tokens {1000 * state.costs.score_seconds(1, 256):.3g} ms"
    )
    log.info(text)
    run.event("fusion-costs", text)
    begin(run)


def _costs(run: Run, generation: list[pb.GenerationCosts], scoring: list[pb.ScoringCosts]) -> StageCosts:
    """The median of what the workers measured; they are alike, and one may have been held up."""
    spec, first = run.plan.spec, generation[0]
    tasks: dict[str, list[list[pb.StepCost]]] = {}
    for one in scoring:
        for task in one.tasks:
            tasks.setdefault(task.task, []).append(list(task.costs))
    return StageCosts.measured(
        decode=_medians([list(one.decode) for one in generation]),
        prefill=_medians([list(one.prefill) for one in generation]),
        tasks={name: _medians(costs) for name, costs in tasks.items()},
        max_batch_size=first.max_batch_size or spec.generation.max_batch_size,
        wake_seconds=statistics.median([one.wake_seconds for one in scoring] or [0.0]),
        kv_bytes_per_token=float(first.kv_bytes_per_token),
        kv_room_bytes=float(first.kv_room_bytes) or None,
        bandwidth=LINK_BYTES_PER_SECOND,
        replays=first.replays,
        **({"score_batch": 1} if spec.deterministic else {}),
    )


def _medians(measured: list[list[pb.StepCost]]) -> list[StepTime]:
    by_shape: dict[tuple[int, int], list[float]] = {}
    for costs in measured:
        for cost in costs:
            by_shape.setdefault((cost.batch, cost.tokens), []).append(cost.seconds)
    return [StepTime(*shape, statistics.median(seconds)) for shape, seconds in sorted(by_shape.items())]


# ---------------------------------------------------------------- an iteration


def begin(run: Run) -> None:
    """An iteration begins (or the costs have come): what is its tail to do?"""
    state, settings = run.world.fusion, run.plan.spec.fusion.inter_stage
    state.begin_iteration()
    if not release.possible(run.plan, run.world) or run.world.ledger.all_generated:
        return
    if settings.mode == "Fixed":
        state.choice = FusionChoice(
            settings.threshold or 0, settings.pool or 0, settings.transfer, 0.0, 0.0, (), "as set in the manifest"
        )
    elif state.measured:
        run.choosing = asyncio.get_running_loop().create_task(_choose(run))


async def _choose(run: Run) -> None:
    world, state = run.world, run.world.fusion
    iteration, seed = world.iteration, run.plan.spec.seed + world.iteration
    layout = layout_of(run)
    try:
        choice = await asyncio.to_thread(choose, state.lengths, layout, state.costs, seed)
    except ValueError as error:
        give_up(run, f"no plan could be simulated: {error}")
        return
    if world.iteration != iteration or state.given_up:
        return
    state.choice = choice
    run.event("fusion-choice", choice.reason, threshold=str(choice.threshold), pool=str(choice.pool))
    log.info("iteration %d: %s", iteration, choice.reason)
    run.wake()


def watch(run: Run) -> None:
    """Writes down when the tail gathers and when that is over; status shows what was seen last."""
    world, state, now = run.world, run.world.fusion, time.monotonic()
    state.look_again = now + LOOK_SECONDS if now >= state.look_again else state.look_again
    pool = release.placement(run.plan, world).pool if release.gathering(run.plan, world) else ()
    state.released = tuple(worker.name for worker in release.released(run.plan, world, pool))
    if bool(pool) == bool(state.pool):
        state.pool = pool or state.pool
        return
    state.pool = pool
    kind, words = ("pool-formed", ", ".join(pool)) if pool else ("pool-dissolved", "every response is finished")
    text = f"{world.ledger.unfinished} samples are unfinished; the tail gathers on {words}" if pool else words
    run.event(kind, text, workers=",".join(pool))


def layout_of(run: Run) -> Layout:
    """The iteration in progress as the planner sees it."""
    sizes, settings = run.world.fleet.sizes, run.plan.spec.fusion.inter_stage
    return Layout(
        generation_workers=sizes[Group.GENERATION],
        inference_workers=sizes.get(Group.INFERENCE, 0),
        prompts=run.world.prompt_tokens,
        lines=run.world.prompt_lines,
        overlap=run.plan.spec.inference.overlap != "Off",
        transfer=settings.transfer,
    )


# ---------------------------------------------------------------- learning


def recall(run: Run, written: dict[str, Any]) -> None:
    """After a start: the costs that were written down, and the lengths of iterations whose segments are kept."""
    state = run.world.fusion
    if run.plan.spec.fusion.inter_stage.mode == "Off":
        return
    costs = written.get("costs")
    if costs is not None:
        try:
            rows = run.plan.spec.generation.max_batch_size  # may have been changed since
            state.costs = replace(StageCosts.from_document(costs), max_batch_size=rows)
            state.measured = True
        except ValueError as error:
            log.warning("the costs of generation and inference are measured again: %s", error)
    before = [iteration for iteration in run.journal.iterations() if iteration < run.world.iteration]
    for iteration in before[-WINDOW:]:
        lengths = {
            record.finished.key.sample: len(record.finished.tokens.data) // ITEM_BYTES
            for record in run.journal.read(iteration)
            if record.WhichOneof("record") == "finished"
        }
        prompts = [run.prompts.of(iteration, index) for index in lengths]
        state.lengths = state.lengths.with_batch(
            zip((len(prompt.tokens) // ITEM_BYTES for prompt in prompts), lengths.values(), strict=True),
            lines=[prompt.line for prompt in prompts],
        )
    if before:
        log.info("response lengths of %d iterations are remembered", len(before[-WINDOW:]))


def figures(run: Run) -> dict[str, float]:
    """What the fusion of an iteration did, for its metrics."""
    world, state = run.world, run.world.fusion
    seconds, moved = run.accounts.seconds, state.moved
    taken = max(1e-9, seconds.get("Generating", 0.0) + seconds.get("Scoring", 0.0))
    metrics = {}
    for group in (Group.GENERATION, Group.INFERENCE):
        idle = [idle_share(run, worker.name) for worker in world.fleet.of(group)]
        if idle:
            metrics[f"idle/{group}"] = statistics.fmean(idle)
    if release.possible(run.plan, world):
        fused = release.fuses(run.plan, world)
        metrics |= {
            "fusion/threshold": float(state.choice.threshold if fused else 0),
            "fusion/pool": float(state.choice.pool if fused else world.fleet.sizes[Group.GENERATION]),
            "fusion/moved_kv": float(moved.kv),
            "fusion/moved_tokens": float(moved.tokens),
            "fusion/stayed": float(moved.stayed),
            "fusion/moved_bytes": float(moved.bytes),
            "fusion/migration_seconds": moved.seconds,
            "fusion/paused_seconds": moved.paused,
            "fusion/overhead_share": (run.accounts.control_seconds + moved.longest_pause) / taken,
        }
    return metrics


def idle_share(run: Run, worker: str) -> float:
    """Of the generation and inference of the iteration so far: share in which a worker neither decoded nor scored."""
    seconds = run.accounts.seconds
    taken = seconds.get("Generating", 0.0) + seconds.get("Scoring", 0.0)
    spent = sum(run.world.fusion.busy.get(worker, {}).values())
    return min(1.0, max(0.0, 1 - spent / taken)) if taken else 0.0


def learn(run: Run) -> dict[str, float]:
    """An iteration is over: the model of lengths and the costs follow what was seen.

    Returns metrics: what was predicted, and what the simulation makes of the lengths that came out.
    """
    world, state = run.world, run.world.fusion
    lengths = [len(sample.response) for sample in world.ledger.samples]
    state.lengths = state.lengths.with_batch(zip(world.prompt_tokens, lengths, strict=True), lines=world.prompt_lines)
    if not release.possible(run.plan, world):
        return {}
    metrics = {"fusion/length_drift": state.lengths.drift}
    if state.choice.seconds:
        metrics |= {
            "fusion/predicted_seconds": state.choice.seconds,
            "fusion/predicted_off_seconds": state.choice.off_seconds,
        }
    if state.measured:
        choice, workers = state.choice, world.fleet.sizes[Group.GENERATION]
        pool = choice.pool if release.fuses(run.plan, world) else workers
        threshold = choice.threshold if pool < workers else 0
        try:
            again = simulate(
                lengths, layout_of(run), state.costs, threshold, pool, choice.transfer, model=state.lengths, spans=True
            )
        except ValueError as error:
            log.warning("iteration %d could not be simulated again: %s", world.iteration, error)
            return metrics
        metrics["fusion/simulated_seconds"] = again.seconds
        _refine(run, again)
    return metrics


def _refine(run: Run, again: Forecast) -> None:
    """Costs follow what the same work took: decoding, scoring and moving each by its own ratio."""
    state = run.world.fusion
    observed: dict[Kind, tuple[float, float]] = {}
    for kind in ("decode", "score"):
        forecast = sum(span.end - span.start for span in again.spans if span.kind == kind)
        taken = sum(busy.get(kind, 0.0) for busy in state.busy.values())
        observed[kind] = (forecast, taken)
    if state.moved.kv:
        each = state.moved.bytes / state.moved.kv / max(1.0, state.costs.kv_bytes_per_token)
        observed["transfer"] = (state.moved.kv * state.costs.kv_seconds(each), state.moved.seconds)
    state.costs = state.costs.refined(observed)


def annotate(run: Run, span: pb.Span) -> None:
    """Adds a worker's span to what it was busy with; names the destination of a migration, whose address it says."""
    if span.name == "migrate" and "peer" in span.attributes:
        peer = span.attributes["peer"]
        names = [worker.name for worker in run.world.fleet.of(Group.GENERATION) if worker.address == peer]
        span.attributes["destination"] = names[0] if names else peer
    kind, _, task = span.name.partition("/")
    kind = "decode" if kind == "prefill" else kind
    beside = task == "reward" and run.plan.spec.models.reward.model is None  # in a process of its own
    if kind in ("decode", "score") and not beside and span.iteration == run.world.iteration:
        mine = run.world.fusion.busy.setdefault(span.worker, {})
        mine[kind] = mine.get(kind, 0.0) + (span.end_ns - span.start_ns) / 1e9
