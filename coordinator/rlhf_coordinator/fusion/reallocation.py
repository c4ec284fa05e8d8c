"""The measured and the predicted gain of moves that balance workers: metrics, and a span for each move.

Rule: the measured time runs from the move until the last sample of the two workers is finished, on any worker. The gain
compares it with the time that the two workers would have taken without the move, from their learned throughput and the
observed lengths. Later moves count in, because a sample may move again. A move with a sample that was not finished in
this iteration is ignored. Nothing here decides anything. After a restart, the moves of the iteration are forgotten.
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
    """A move with its predicted and its measured gain, in seconds of the later of the two workers."""

    made: MadeReallocation
    predicted_gain: float
    measured_gain: float


def note(run: JobRun, decision: d.NoteReallocation) -> None:
    """Record the destination of samples and the predicted gain."""
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
    """Return the moves whose samples were all seen to finish.

    `lengths` [n] is in tokens; `finished` maps a sample to seconds of the monotonic clock.
    """
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
    """Return the metrics of an iteration's moves, and draw each measured move."""
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
