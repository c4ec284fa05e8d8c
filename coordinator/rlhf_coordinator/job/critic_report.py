"""The report of an iteration that was closed before its critics were trained: completed when they are.

Rule: what is reported is what the iteration would have reported at its end, with all metrics of training. It is written
to the journal before the trackers get it, who take a report twice as one. Nothing of the next iteration is changed.
"""

import math
import time

from rlhf_coordinator.job.iteration_metrics import training_metrics, training_rows
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.storage.journal_pb2 import CriticsTrained, Record


def complete(run: JobRun) -> dict[str, float]:
    """Report the iteration before with what its training came to, which is returned. Raises JobError where nothing can
    be written."""
    report = run.state.open_report
    assert report is not None
    training = training_metrics(run, report.iteration)
    rows = training_rows(training)
    metrics = report.metrics | {name: value for name, value in rows.items() if math.isfinite(value)}
    now_ns = time.time_ns()
    run.journal.append(Record(critics_trained=CriticsTrained(metrics=metrics, time_ns=now_ns)))
    run.journal.commit()
    run.state.open_report = None
    run.trackers.iteration(report.iteration, metrics)
    run.last_metrics |= metrics
    return training
