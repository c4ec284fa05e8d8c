"""The report of an iteration that was closed before its batch, or its critics, were trained.

The completed report is written to the journal before it goes to the trackers.
"""

import logging
import time

from rlhf_coordinator.job.iteration_metrics import finite_metrics, skipped_steps, training_metrics, training_rows
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.storage.journal_pb2 import CriticsTrained, Record

log = logging.getLogger(__name__)


def complete(run: JobRun) -> dict[str, float]:
    """Report the previous iteration with its training metrics, and return these. Raises JobError when a write fails."""
    report = run.state.open_report
    assert report is not None
    training = training_metrics(run, report.iteration)
    if warning := skipped_steps(training, report.iteration):
        log.warning(warning)
        run.event("steps-skipped", warning)
    rows = training_rows(training)
    if run.context.spec.rollout.overlap_training == "Enabled":
        rows["rollout/overlap_seconds"] = max(0.0, training.get("train/seconds", 0.0) - _waited(run, time.monotonic()))
    metrics = report.metrics | finite_metrics(rows)
    now_ns = time.time_ns()
    run.journal.append(Record(critics_trained=CriticsTrained(metrics=metrics, time_ns=now_ns)))
    run.journal.commit()
    run.state.open_report, run.state.group_failures = None, 0
    run.trackers.iteration(report.iteration, metrics)
    run.last_metrics |= metrics
    return training


def _waited(run: JobRun, now: float) -> float:
    """Return the seconds of the phase Training in the iteration in progress."""
    return run.times.spent("Training", now)
