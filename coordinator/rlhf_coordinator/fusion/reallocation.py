"""What moves of balancing gave, beside what they were predicted to give: metrics, and a span for each.

Rule: measured is the time from the move until the last sample is finished that one of the two workers held, wherever
it was finished; what it gave is that time beside the one that the two would have taken, as they were, by their learned
throughput and the lengths that came out. What followed a move counts in: a sample may have moved again. A move of which
a sample was not finished in this iteration says nothing. Nothing here decides anything. When the process dies the moves
of its iteration are forgotten.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_coordinator.job import timeline_spans
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.state.fusion_state import FusionState, MadeReallocation
from rlhf_coordinator.state.sample import SampleState
from rlhf_planner.inter_stage.throughput import EVEN_PACE, ThroughputCurve


class MeasuredReallocation(NamedTuple):
    """A move with what it was predicted to give and what it gave, in seconds of the later of the two workers."""

    made: MadeReallocation
    predicted_gain: float
    measured_gain: float


def note(run: JobRun, decision: d.NoteReallocation) -> None:
    """Keep where samples are to go and what that is predicted to give."""
    state, fusion, reallocation = run.state, run.state.fusion, decision.reallocation
    first = reallocation.moves[0]
    held = tuple(_held(run, name) for name in (first.source, first.destination))
    everything = [pair for one in held for pair in one]
    keys = sum(tokens + state.prompt_tokens[sample] for sample, tokens in everything) / max(1, len(everything))
    curves = tuple(
        ThroughputCurve(fusion.costs, keys, len(everything), fusion.paces.get(name, EVEN_PACE))
        for name in (first.source, first.destination)
    )
    made = MadeReallocation(
        time.monotonic(), time.time_ns(), reallocation, (held[0], held[1]), (curves[0], curves[1])
    )  # fmt: skip
    fusion.reallocated.append(made)
    fusion.destinations |= {move.sample: move.destination for move in reallocation.moves}


def _held(run: JobRun, worker: str) -> tuple[tuple[int, int], ...]:
    ledger = run.state.ledger
    held = [index for index in ledger.held_by(worker) if ledger.samples[index].state is SampleState.DECODING]
    return tuple((index, len(ledger.samples[index].response)) for index in held)


def measured(fusion: FusionState, lengths: Sequence[int], finished: Mapping[int, float]) -> list[MeasuredReallocation]:
    """Return the moves of which all samples were seen to finish; `lengths` [n] in tokens, `finished` in seconds of the
    monotonic clock, by sample."""
    answer = []
    for made in fusion.reallocated:
        samples = [sample for one in made.held for sample, _ in one]
        if not samples or any(sample not in finished for sample in samples):
            continue
        took = max(finished[sample] for sample in samples) - made.moment
        stayed = max(
            curve.finish([max(0, lengths[sample] - tokens) for sample, tokens in one])
            for curve, one in zip(made.curves, made.held, strict=True)
        )
        answer.append(MeasuredReallocation(made, made.reallocation.gain_seconds, stayed - took))
    return answer


def report(run: JobRun) -> dict[str, float]:
    """Return the metrics of an iteration's moves, and draw each move that was measured."""
    state, fusion = run.state, run.state.fusion
    moves = sum(len(made.reallocation.moves) for made in fusion.reallocated)
    known = measured(fusion, [len(sample.response) for sample in state.ledger.samples], state.incremental.finished)
    for one in known:
        timeline_spans.draw_reallocation(run, one.made, one.predicted_gain, one.measured_gain)
    metrics = {"balance/moves": float(moves)}
    if known:
        metrics["balance/predicted_gain_seconds"] = sum(one.predicted_gain for one in known)
        metrics["balance/measured_gain_seconds"] = sum(one.measured_gain for one in known)
    return metrics
