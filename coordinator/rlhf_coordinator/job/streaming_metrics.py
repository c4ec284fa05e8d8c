"""The metrics of `spec.training.stream`: gradients that were computed before the last token of an iteration."""

from rlhf_coordinator.job.job_run import JobRun


def streaming_metrics(run: JobRun) -> dict[str, float]:
    """Return the work of rank 0 in commands that ended before the last token; empty in a job that does not stream.

    A coordinator that restarts within the iteration counts from its start.
    """
    if run.context.spec.training.stream == "Disabled":
        return {}
    work = run.state.streamed_work
    return {
        "training/stream_microbatches": float(work.microbatches),
        "training/stream_hidden_seconds": work.seconds,
    }
