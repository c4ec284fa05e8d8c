"""Learning of inter-stage fusion from an iteration: response lengths, and the costs of work."""

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.fusion.learned_lengths import learn_lengths, restore_lengths
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.fusion_state import WorkInterval
from rlhf_coordinator.state.job_state import JobContext
from rlhf_coordinator.state.worker import PendingCommand
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.forecast import IterationSetup
from rlhf_planner.inter_stage.learned_costs import ObservedWork, refined
from rlhf_planner.inter_stage.observed_steps import tells
from rlhf_planner.inter_stage.simulate import simulate
from rlhf_planner.inter_stage.throughput import EVEN_PACE
from rlhf_planner.speculation.forecast import NO_SPECULATION, SpeculationForecast
from rlhf_planner.speculation.observed_gain import DraftedSteps, observed_forecast

log = logging.getLogger(__name__)


def restore_learned(run: JobRun, written: dict[str, Any]) -> None:
    """Restore the stored costs, and the lengths of the last iterations.

    `written` is the entry JOB_KEY of the journal's facts.
    """
    fusion = run.state.fusion
    if run.context.spec.fusion.inter_stage.mode == "Disabled":
        return
    costs = written.get("costs")
    if costs is not None:
        try:
            rows = run.context.spec.generation.max_batch_size  # may have changed since
            fusion.costs = replace(StageCosts.from_document(costs), max_batch_size=rows)
            if run.context.spec.generation.speculation.mode == "Disabled":
                fusion.costs = replace(fusion.costs, speculation=NO_SPECULATION)
            fusion.measured = True
        except ValueError as error:
            log.warning("the costs of generation and inference are measured again: %s", error)
    restore_lengths(run)


def iteration_setup(run: JobRun, prompts: Sequence[int], lines: Sequence[int]) -> IterationSetup:
    """Return an iteration in the planner's form: [n] prompt tokens and [n] lines of the prompt file, one per sample."""
    sizes, settings = run.state.fleet.sizes, run.context.spec.fusion.inter_stage
    return IterationSetup(
        generation_workers=sizes[Group.GENERATION],
        inference_workers=sizes.get(Group.INFERENCE, 0),
        prompts=prompts,
        lines=lines,
        overlap=run.context.spec.inference.overlap != "Disabled",
        transfer=settings.transfer,
    )


def learn(run: JobRun) -> None:
    """Learn the lengths, and if possible the costs, of a fully scored iteration; a second call does nothing.

    The state gets metrics of what was learned.
    """
    state, fusion = run.state, run.state.fusion
    if fusion.learned is not None:
        return
    included = [sample for sample in state.ledger.samples if not sample.left_out]
    lengths = [len(sample.response) for sample in included]
    prompts = [state.prompt_tokens[sample.index] for sample in included]
    lines = [state.prompt_lines[sample.index] for sample in included]
    ends = run.context.spec.prompts.length_window < 2 or not state.ledger.waiting
    learn_lengths(fusion, zip(prompts, lengths, lines, strict=True), ends=ends)
    metrics = fusion.learned = {}
    if not run.scheduled.consolidation.possible:
        return
    metrics["fusion/length_drift"] = fusion.lengths.drift
    if fusion.choice.seconds:
        metrics["fusion/predicted_seconds"] = fusion.choice.seconds
        metrics["fusion/predicted_off_seconds"] = fusion.choice.off_seconds
    if fusion.measured:
        choice, workers = fusion.choice, state.fleet.sizes[Group.GENERATION]
        pool = choice.pool if run.scheduled.consolidation.planned else workers
        threshold, setup = (
            choice.threshold if pool < workers else 0,
            iteration_setup(run, prompts, lines),
        )
        try:
            hindsight = simulate(lengths, setup, fusion.costs, threshold, pool, choice.transfer, model=fusion.lengths)
        except ValueError as error:
            log.warning("iteration %d could not be simulated with its own lengths: %s", state.iteration, error)
            return
        without = (
            hindsight if not threshold else simulate(lengths, setup, fusion.costs, 0, workers, model=fusion.lengths)
        )
        metrics["fusion/simulated_seconds"] = hindsight.seconds
        metrics["fusion/simulated_off_seconds"] = without.seconds
        if without.seconds > 0:
            metrics["fusion/gain_share"] = 1 - hindsight.seconds / without.seconds
        metrics["fusion/simulated_generation_seconds"] = hindsight.generation_seconds
        metrics["fusion/simulated_decode_busy"] = hindsight.decode_busy
        metrics["fusion/simulated_score_busy"] = hindsight.score_busy
        metrics |= {f"fusion/{kind}_ratio": ratio for kind, ratio in fusion.costs.scale.items()}
        metrics["fusion/contention_ratio"] = fusion.costs.contention_ratio
        fusion.costs = refined(fusion.costs, [*fusion.observed, *with_contention(fusion.decoded, fusion.scored)])
        fusion.costs = replace(fusion.costs, speculation=expected_drafts(run))
        store_costs(run)


def expected_drafts(run: JobRun) -> SpeculationForecast:
    """Return the expected effect of drafts, from the tokens and times of the iteration's steps."""
    mode, fusion = run.context.spec.generation.speculation.mode, run.state.fusion
    if mode == "Disabled":
        return NO_SPECULATION
    stretches = (stretch for _, stretch in fusion.stretches)
    costs = fusion.costs
    return observed_forecast(
        costs.speculation,
        stretches,
        lambda rows, context: costs.decode_seconds(max(1, round(rows)), context),
        zero_allowed=mode != "Fixed",
    )


def store_costs(run: JobRun) -> None:
    """Write the current costs into the job's facts, where `restore_learned` reads them."""
    run.journal.write_job(run.journal.job() | {JOB_KEY: {"costs": run.state.fusion.costs.document()}})


# ---------------------------------------------------------------- observations


def observe(run: JobRun, name: str, observation: pb.Observation) -> None:
    """Record a worker's observation: the interval in which it was busy, and the cost of its work.

    Work of another iteration than the one in progress is ignored.
    """
    fusion, kind = run.state.fusion, observation.WhichOneof("work")
    if observation.iteration != run.state.iteration or kind not in ("decode", "rebuild", "scoring"):
        return
    if kind == "rebuild":  # inside the interval of a decode observation, which counts the time
        fusion.observed.append(rebuild_work(observation))
        return
    interval, worker = WorkInterval(name, observation.start_ns, observation.end_ns), run.state.fleet.workers.get(name)
    busy, label = fusion.busy.setdefault(name, {}), "decode" if kind == "decode" else "score"
    busy[label] = busy.get(label, 0.0) + _seconds(observation)
    if kind == "decode":
        _take_decoded(run, interval, observation)
        return
    if worker is not None and worker.group is Group.GENERATION:
        fusion.scored.append(interval)
    fusion.observed.append(scoring_work(run.context, observation))


def _take_decoded(run: JobRun, interval: WorkInterval, observation: pb.Observation) -> None:
    """Record decode steps: plain steps for the cost, all steps for the effect of drafts and for this worker's pace."""
    fusion, decode = run.state.fusion, observation.decode
    if not decode.rows_per_step:
        return
    if decode.steps > decode.verified.steps:
        fusion.decoded.append((interval, decode_work(observation)))
    stretch = drafted_steps(observation)
    fusion.stretches.append((interval, stretch))
    if not fusion.measured or min(stretch.steps, stretch.tokens, stretch.seconds) <= 0:
        return
    rows, tokens = max(1, round(stretch.rows)), stretch.tokens if stretch.verified else 1.0
    if tells(stretch.steps, fusion.costs.decode_seconds(rows, stretch.context)):
        expected = fusion.costs.token_seconds if stretch.verified else fusion.costs.decode_seconds
        ratio = stretch.seconds / stretch.steps / tokens / expected(rows, stretch.context)
        fusion.paces[interval.worker] = fusion.paces.get(interval.worker, EVEN_PACE).observed(stretch.rows, ratio)


def with_contention(
    decoded: Iterable[tuple[WorkInterval, ObservedWork]], scored: Iterable[WorkInterval]
) -> Iterator[ObservedWork]:
    """Yield the decoded work, each with the share of its interval that the `scored` intervals cover."""
    starts, ends, before = [0], [0], [0]
    for _, start, end in sorted(scored, key=lambda interval: interval.start_ns):
        if start > ends[-1]:
            before.append(before[-1] + ends[-1] - starts[-1])
            starts.append(start)
            ends.append(end)
        ends[-1] = max(ends[-1], end)

    def scoring_until(moment: int) -> int:
        at = bisect_right(starts, moment) - 1
        return before[at] + min(moment, ends[at]) - starts[at]

    for interval, work in decoded:
        shared_ns = scoring_until(interval.end_ns) - scoring_until(interval.start_ns)
        yield work._replace(contended=shared_ns / max(1, interval.end_ns - interval.start_ns))


def observe_migration(run: JobRun, pending: PendingCommand, samples: Sequence[pb.MigratedSample]) -> None:
    """Record the answer to a Migrate: these samples moved with their caches."""
    fusion = run.state.fusion
    fusion.observed += transfer_work(samples, fusion.costs.kv_bytes_per_token, time.monotonic() - pending.sent)


def observe_withdrawal(run: JobRun, pending: PendingCommand) -> None:
    """Record the time to the answer to a Withdraw as the latency of a command."""
    run.state.fusion.observed.append(ObservedWork("command", 1, 1, 1, time.monotonic() - pending.sent))


def transfer_work(samples: Sequence[pb.MigratedSample], bytes_per_token: float, seconds: float) -> list[ObservedWork]:
    """Return the work of one Migrate: these samples reached their destination after `seconds`; empty without any."""
    if not samples or bytes_per_token <= 0:
        return []
    count, paused = len(samples), sum(item.paused_seconds for item in samples)
    tokens = sum(item.bytes for item in samples) / count / bytes_per_token
    return [ObservedWork("transfer", count, 1, tokens, seconds), ObservedWork("pause", count, 1, tokens, paused)]


def decode_work(observation: pb.Observation) -> ObservedWork:
    """Return the plain decode steps of an interval that has some; prefills, drafting and verifying steps are left
    out."""
    decode, verified = observation.decode, observation.decode.verified
    seconds = _seconds(observation) - decode.prefill_seconds - decode.draft_seconds - verified.seconds
    if not verified.steps:
        return ObservedWork("decode", decode.steps, decode.rows_per_step, decode.keys_per_row, max(0.0, seconds))
    steps = decode.steps - verified.steps
    rows = decode.steps * decode.rows_per_step - verified.steps * verified.rows_per_step
    keys = decode.steps * decode.rows_per_step * decode.keys_per_row
    keys -= verified.steps * verified.rows_per_step * verified.keys_per_row
    return ObservedWork("decode", steps, max(0.0, rows / steps), max(0.0, keys / max(1.0, rows)), max(0.0, seconds))


def drafted_steps(observation: pb.Observation) -> DraftedSteps:
    """Return all decode steps of an interval with the tokens that they drew, including drafting, without prefills."""
    decode = observation.decode
    return DraftedSteps(
        steps=decode.steps,
        rows=decode.rows_per_step,
        context=decode.keys_per_row,
        tokens=decode.tokens_per_row,
        seconds=max(0.0, _seconds(observation) - decode.prefill_seconds),
        verified=decode.verified.steps,
    )


def rebuild_work(observation: pb.Observation) -> ObservedWork:
    """Return the work of rebuilding caches from known tokens."""
    rebuild = observation.rebuild
    return ObservedWork("rebuild", rebuild.passes, rebuild.rows_per_pass, rebuild.tokens_per_row, rebuild.seconds)


def scoring_work(context: JobContext, observation: pb.Observation) -> ObservedWork:
    """Return one task's pass in the unit of the cost model, where a pass covers all tasks that are no calls."""
    tasks = len(context.tasks) - len(context.calls)
    scoring = observation.scoring
    tokens_per_sample = scoring.tokens / max(1, scoring.samples)
    return ObservedWork("score", 1 / max(1, tasks), scoring.samples, tokens_per_sample, _seconds(observation))


def _seconds(observation: pb.Observation) -> float:
    return (observation.end_ns - observation.start_ns) / 1e9
