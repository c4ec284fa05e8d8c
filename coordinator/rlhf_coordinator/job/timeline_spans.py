"""Completion of spans for the timeline, with values that a worker cannot know, before they are written."""

from typing import Final

from rlhf_api.job.groups import TrainingParallelism
from rlhf_common import control_pb2 as pb
from rlhf_common.names import Group
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.fusion_state import ExecutedReallocation

DRAWN_NS: Final = 50_000_000
"""Drawn width of a balancing move in nanoseconds."""


def record_worker_span(run: JobRun, span: pb.Span) -> None:
    """Complete a worker's span and give it to the trackers."""
    _name_destination(run, span)
    _add_prediction(run, span)
    run.trackers.span(span)


def draw_last_phase(run: JobRun, now: float, now_ns: int) -> None:
    """Draw the phase in progress, from the moment since which it is counted.

    `now`, `now_ns`: one moment by both clocks.
    """
    seconds = now - run.times.phase_start
    run.record_span(run.times.phase, now_ns - int(seconds * 1e9), now_ns, run.state.iteration)


def draw_reallocation(run: JobRun, executed: ExecutedReallocation, predicted: float, measured: float) -> None:
    """Draw a move of samples that balances two workers, with the predicted and the measured gain in seconds."""
    first = executed.reallocation.moves[0]
    span = pb.Span(
        worker=first.source,
        name="balance",
        start_ns=executed.time_ns,
        end_ns=executed.time_ns + DRAWN_NS,
        iteration=run.state.iteration,
        attributes={
            "destination": first.destination,
            "samples": str(len(executed.reallocation.moves)),
            "predicted_gain_seconds": f"{predicted:.3f}",
            "measured_gain_seconds": f"{measured:.3f}",
            "predicted_tokens_per_second": f"{executed.reallocation.after - executed.reallocation.before:+.1f}",
        },
    )
    run.trackers.span(span)


def _name_destination(run: JobRun, span: pb.Span) -> None:
    """Add the destination's name to a migration, or its address if no worker has it."""
    if span.name == "migrate" and "peer" in span.attributes:
        peer = span.attributes["peer"]
        names = [worker.name for worker in run.state.fleet.in_group(Group.GENERATION) if worker.address == peer]
        span.attributes["destination"] = names[0] if names else peer


def _add_prediction(run: JobRun, span: pb.Span) -> None:
    """Add predicted times to a rank's mini-batch or to a step in it, if the schedule has a forecast."""
    schedule = run.state.schedule
    worker = run.state.fleet.workers.get(span.worker)
    if not schedule.forecast or worker is None or worker.rank is None or not span.name.startswith("train/"):
        return
    row = row_of(worker.rank, len(schedule.forecast), run.context.spec.training.parallelism)
    if span.name == "train/step":
        span.attributes["predicted_ms"] = f"{1000 * schedule.predicted:.3f}"
        if span.attributes["number"] == "0":
            _draw_prediction(run, span, row)
        return
    key = (span.name, span.attributes["stage"], span.attributes["microbatch"])
    if key in schedule.forecast[row]:
        start, end = schedule.forecast[row][key]
        span.attributes["predicted_start_ms"] = f"{1000 * start:.3f}"
        span.attributes["predicted_ms"] = f"{1000 * (end - start):.3f}"


def row_of(rank: int, rows: int, parallelism: TrainingParallelism) -> int:
    """Return the row of a schedule table with `rows` rows that a training rank runs."""
    block = parallelism.pipeline * parallelism.tensor
    return rank % block * rows // block


def _draw_prediction(run: JobRun, step: pb.Span, row: int) -> None:
    for (name, stage, microbatch), (start, end) in run.state.schedule.forecast[row].items():
        span = pb.Span(
            worker=f"predicted-{step.worker.rpartition('-')[2]}",
            name=name.replace("train/", "predicted/", 1),
            start_ns=step.start_ns + int(start * 1e9),
            end_ns=step.start_ns + int(end * 1e9),
            iteration=step.iteration,
            attributes={"stage": stage, "microbatch": microbatch},
        )
        run.trackers.span(span)
