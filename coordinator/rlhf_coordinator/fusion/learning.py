"""What inter-stage fusion learns from an iteration: how long responses get, and what work really takes.

Rule: an iteration is learned from as soon as all of it is scored, so that the next one is planned while training runs.
Costs follow the work that was done (so many steps of so many rows), never a simulation of it: what was simulated
wrongly would be learned as a cost. When the process dies the lengths are read again from the segments that are kept,
and the costs from the journal's facts.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from rlhf_api import control_pb2 as pb
from rlhf_api.names import Group
from rlhf_coordinator.job.run import Run
from rlhf_coordinator.scheduling import release
from rlhf_coordinator.state.fusion_state import WorkInterval
from rlhf_coordinator.state.job_state import JobContext
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.state.worker import PendingCommand
from rlhf_planner.inter_stage.corrections import Observed, refined
from rlhf_planner.inter_stage.costs import JOB_KEY, StageCosts
from rlhf_planner.inter_stage.layout import Layout
from rlhf_planner.inter_stage.lengths import WINDOW
from rlhf_planner.inter_stage.simulate import simulate

log = logging.getLogger(__name__)

KINDS: Final = {"prefill": "decode", "score-prefix": "score"}
"""Names of spans that are of another kind of work."""


def recall(run: Run, written: dict[str, Any]) -> None:
    """After a start: the costs that were written down, and the lengths of iterations whose segments are kept."""
    fusion = run.state.fusion
    if run.context.spec.fusion.inter_stage.mode == "Disabled":
        return
    costs = written.get("costs")
    if costs is not None:
        try:
            rows = run.context.spec.generation.max_batch_size  # may have been changed since
            fusion.costs = replace(StageCosts.from_document(costs), max_batch_size=rows)
            fusion.measured = True
        except ValueError as error:
            log.warning("the costs of generation and inference are measured again: %s", error)
    before = [iteration for iteration in run.journal.iterations() if iteration < run.state.iteration]
    for iteration in before[-WINDOW:]:
        lengths = {
            record.finished.key.sample: len(record.finished.tokens.data) // ITEM_BYTES
            for record in run.journal.read(iteration)
            if record.WhichOneof("record") == "finished"
        }
        prompts = [run.prompts.of(iteration, index) for index in lengths]
        fusion.lengths = fusion.lengths.with_batch(
            zip((len(prompt.tokens) // ITEM_BYTES for prompt in prompts), lengths.values(), strict=True),
            lines=[prompt.line for prompt in prompts],
        )
    if before:
        log.info("response lengths of %d iterations are remembered", len(before[-WINDOW:]))


def layout_of(run: Run, prompts: Sequence[int], lines: Sequence[int]) -> Layout:
    """An iteration with prompts of so many tokens, and of these lines, as the planner sees it."""
    sizes, settings = run.state.fleet.sizes, run.context.spec.fusion.inter_stage
    return Layout(
        generation_workers=sizes[Group.GENERATION],
        inference_workers=sizes.get(Group.INFERENCE, 0),
        prompts=prompts,
        lines=lines,
        overlap=run.context.spec.inference.overlap != "Disabled",
        transfer=settings.transfer,
    )


def learn(run: Run) -> None:
    """All of the iteration is scored: lengths and costs follow what was seen, once.

    Leaves metrics in the state: what was predicted, and what the simulation makes of the lengths that came out.
    """
    state, fusion = run.state, run.state.fusion
    if fusion.learned is not None:
        return
    lengths = [len(sample.response) for sample in state.ledger.samples]
    fusion.lengths = fusion.lengths.with_batch(zip(state.prompt_tokens, lengths, strict=True), lines=state.prompt_lines)
    metrics = fusion.learned = {}
    if not release.possible(run.context, state):
        return
    metrics["fusion/length_drift"] = fusion.lengths.drift
    if fusion.choice.seconds:
        metrics["fusion/predicted_seconds"] = fusion.choice.seconds
        metrics["fusion/predicted_off_seconds"] = fusion.choice.off_seconds
    if fusion.measured:
        choice, workers = fusion.choice, state.fleet.sizes[Group.GENERATION]
        pool = choice.pool if release.fuses(run.context, state) else workers
        threshold, layout = (
            choice.threshold if pool < workers else 0,
            layout_of(run, state.prompt_tokens, state.prompt_lines),
        )
        try:
            again = simulate(lengths, layout, fusion.costs, threshold, pool, choice.transfer, model=fusion.lengths)
        except ValueError as error:
            log.warning("iteration %d could not be simulated again: %s", state.iteration, error)
            return
        metrics["fusion/simulated_seconds"] = again.seconds
        metrics["fusion/simulated_generation_seconds"] = again.generation_seconds
        metrics["fusion/simulated_decode_busy"] = again.decode_busy
        metrics["fusion/simulated_score_busy"] = again.score_busy
        metrics |= {f"fusion/{kind}_ratio": ratio for kind, ratio in fusion.costs.scale.items()}
        metrics["fusion/beside_ratio"] = fusion.costs.beside
        fusion.costs = refined(fusion.costs, [*fusion.observed, *beside_scoring(fusion.decoded, fusion.scored)])
        write_down(run)


def write_down(run: Run) -> None:
    """The costs as they are now go into the job's facts: `recall` and `rlhf plan` read them there."""
    run.journal.write_job(run.journal.job() | {JOB_KEY: {"costs": run.state.fusion.costs.document()}})


# ---------------------------------------------------------------- what was seen


def seen(run: Run, span: pb.Span) -> None:
    """Adds a worker's span to what it was busy with and to what work takes; names the destination of a migration, whose
    address it says."""
    fusion = run.state.fusion
    if span.name == "migrate" and "peer" in span.attributes:
        peer = span.attributes["peer"]
        names = [worker.name for worker in run.state.fleet.of(Group.GENERATION) if worker.address == peer]
        span.attributes["destination"] = names[0] if names else peer
    kind, beside = _kind(run.context, span)
    if beside or span.iteration != run.state.iteration or kind not in ("decode", "score"):
        return
    mine = fusion.busy.setdefault(span.worker, {})
    mine[kind] = mine.get(kind, 0.0) + (span.end_ns - span.start_ns) / 1e9
    when = WorkInterval(span.worker, span.start_ns, span.end_ns)
    worker = run.state.fleet.workers.get(span.worker)
    if kind == "score" and worker is not None and worker.group is Group.GENERATION:
        fusion.scored.append(when)
    for work in (observed(run.context, span), rebuilt(span)):
        if work is not None and work.kind == "decode":
            fusion.decoded.append((when, work))
        elif work is not None:
            fusion.observed.append(work)


def beside_scoring(
    decoded: Iterable[tuple[WorkInterval, Observed]], scored: Iterable[WorkInterval]
) -> Iterator[Observed]:
    """What was decoded, each with the share of its time in which a generation worker scored; not itself, for a worker
    does one thing at a time."""
    starts, ends, before = [0], [0], [0]
    for _, start, end in sorted(scored, key=lambda one: one.start_ns):
        if start > ends[-1]:
            before.append(before[-1] + ends[-1] - starts[-1])
            starts.append(start)
            ends.append(end)
        ends[-1] = max(ends[-1], end)

    def scoring_until(moment: int) -> int:
        at = bisect_right(starts, moment) - 1
        return before[at] + min(moment, ends[at]) - starts[at]

    for own, work in decoded:
        shared = scoring_until(own.end_ns) - scoring_until(own.start_ns)
        yield work._replace(beside=shared / max(1, own.end_ns - own.start_ns))


def moved(run: Run, pending: PendingCommand, samples: Sequence[pb.MigratedSample]) -> None:
    """A worker has answered a Migrate: these samples moved with their caches."""
    fusion = run.state.fusion
    fusion.observed += transferred(samples, fusion.costs.kv_bytes_per_token, time.monotonic() - pending.sent)


def gave_back(run: Run, pending: PendingCommand) -> None:
    """A worker has answered a Withdraw: of all commands the one that is acted on at once."""
    run.state.fusion.observed.append(Observed("command", 1, 1, 1, time.monotonic() - pending.sent))


def transferred(samples: Sequence[pb.MigratedSample], bytes_per_token: float, seconds: float) -> list[Observed]:
    """What one Migrate tells of costs: these samples were with their destination after so many seconds."""
    if not samples or bytes_per_token <= 0:
        return []
    count, paused = len(samples), sum(item.paused_seconds for item in samples)
    tokens = sum(item.bytes for item in samples) / count / bytes_per_token
    return [Observed("transfer", count, 1, tokens, seconds), Observed("pause", count, 1, tokens, paused)]


def observed(context: JobContext, span: pb.Span) -> Observed | None:
    """The work that a worker's span is about, as costs count it; None when it is about none."""
    kind, beside = _kind(context, span)
    told, seconds = span.attributes, (span.end_ns - span.start_ns) / 1e9
    if kind == "decode":
        return decoded(span)
    if kind == "score" and not beside and "tokens" in told:  # one task's pass: by the costs a pass is one of every task
        by_call = context.spec.models.reward.model is None
        tasks = sum(not (by_call and task.model == "reward") for task in context.tasks)
        samples = int(told["samples"])
        return Observed("score", 1 / max(1, tasks), samples, int(told["tokens"]) / max(1, samples), seconds)
    return None


def decoded(span: pb.Span) -> Observed | None:
    """The steps of a span of decoding; None when it is about prefills alone."""
    told, seconds = span.attributes, (span.end_ns - span.start_ns) / 1e9
    if not float(told.get("rows", "0")):
        return None
    decoding = max(0.0, seconds - float(told["prefill_seconds"]))
    return Observed("decode", int(told["steps"]), float(told["rows"]), float(told["context"]), decoding)


def rebuilt(span: pb.Span) -> Observed | None:
    """The building of caches from tokens that was part of a worker's span; None when none was."""
    told = span.attributes
    if "rebuild_passes" not in told:
        return None
    passes, rows, tokens, seconds = (float(told[f"rebuild_{name}"]) for name in ("passes", "rows", "tokens", "seconds"))
    return Observed("rebuild", passes, rows, tokens, seconds)


def _kind(context: JobContext, span: pb.Span) -> tuple[str, bool]:
    """(kind of work, done by a process of its own beside it)."""
    kind, _, task = span.name.partition("/")
    return KINDS.get(kind, kind), task == "reward" and context.spec.models.reward.model is None
