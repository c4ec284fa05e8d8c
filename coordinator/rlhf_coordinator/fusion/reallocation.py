"""The measured and the predicted gain of moves that balance workers.

The measured time runs from the decision until the last sample that the two workers decoded then is finished.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf_coordinator.job import timeline_spans
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.scheduling import decisions as d
from rlhf_coordinator.state.fusion_state import ExecutedReallocation, FusionState
from rlhf_coordinator.state.sample import SampleState
from rlhf_planner.inter_stage.throughput import EVEN_PACE, ThroughputCurve


class MeasuredReallocation(NamedTuple):
    """Moves from one worker to another, with their predicted and their measured gain in seconds."""

    executed: ExecutedReallocation
    predicted_gain: float
    measured_gain: float


def note(run: JobRun, decision: d.NoteReallocation) -> None:
    """Record the destination of samples, and the data for measuring the gain later."""
    state, fusion, reallocation = run.state, run.state.fusion, decision.reallocation
    first = reallocation.moves[0]
    sample_lengths = tuple(_decoding_samples(run, name) for name in (first.source, first.destination))
    everything = [pair for worker_samples in sample_lengths for pair in worker_samples]
    keys = sum(tokens + state.prompt_tokens[sample] for sample, tokens in everything) / max(1, len(everything))
    curves = tuple(
        ThroughputCurve(fusion.costs, keys, len(everything), fusion.paces.get(name, EVEN_PACE))
        for name in (first.source, first.destination)
    )
    executed = ExecutedReallocation(
        time.monotonic(), time.time_ns(), reallocation, (sample_lengths[0], sample_lengths[1]), (curves[0], curves[1])
    )  # fmt: skip
    fusion.reallocated.append(executed)
    fusion.destinations |= {move.sample: move.destination for move in reallocation.moves}


def _decoding_samples(run: JobRun, worker: str) -> tuple[tuple[int, int], ...]:
    ledger = run.state.ledger
    decoding = [index for index in ledger.held_by(worker) if ledger.samples[index].state is SampleState.DECODING]
    return tuple((index, len(ledger.samples[index].response)) for index in decoding)


def measured(fusion: FusionState, lengths: Sequence[int], finished: Mapping[int, float]) -> list[MeasuredReallocation]:
    """Return the moves whose samples were all seen to finish.

    `lengths` [n] is in tokens; `finished` maps a sample to seconds of the monotonic clock.
    """
    answer = []
    for executed in fusion.reallocated:
        samples = [sample for worker_samples in executed.samples for sample, _ in worker_samples]
        if not samples or any(sample not in finished for sample in samples):
            continue
        took = max(finished[sample] for sample in samples) - executed.moment
        stayed = max(
            curve.finish([max(0, lengths[sample] - tokens) for sample, tokens in worker_samples])
            for curve, worker_samples in zip(executed.curves, executed.samples, strict=True)
        )
        answer.append(MeasuredReallocation(executed, executed.reallocation.gain_seconds, stayed - took))
    return answer


def report(run: JobRun) -> dict[str, float]:
    """Return the metrics of an iteration's moves, and draw each measured move."""
    state, fusion = run.state, run.state.fusion
    moves = sum(len(executed.reallocation.moves) for executed in fusion.reallocated)
    results = measured(fusion, [len(sample.response) for sample in state.ledger.samples], state.incremental.finished)
    for result in results:
        timeline_spans.draw_reallocation(run, result.executed, result.predicted_gain, result.measured_gain)
    metrics = {"balance/moves": float(moves)}
    if results:
        metrics["balance/predicted_gain_seconds"] = sum(result.predicted_gain for result in results)
        metrics["balance/measured_gain_seconds"] = sum(result.measured_gain for result in results)
    return metrics
