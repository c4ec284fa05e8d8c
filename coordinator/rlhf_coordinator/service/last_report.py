"""The last report of a coordinator: a line of the log, and, for a complete job, `Env.TERMINATION_MESSAGE`'s file."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any, Final

from rlhf_common.names import Env
from rlhf_coordinator.job.job_run import JobRun

log = logging.getLogger(__name__)

METRICS: Final = (
    "reward",
    "kl",
    "kl_per_token",
    "loss",
    "samples_per_second",
    "nonfinite_steps",
    "evaluation/reward",
    "evaluation/version",
    "evaluation/best_reward",
    "evaluation/best_version",
)
"""Metrics in the report."""


def last_report(run: JobRun) -> dict[str, Any]:
    """Return the number of closed iterations, the newest checkpoint, and the newest finite values of METRICS."""
    done = run.outcome is not None and run.outcome.phase == "Complete"
    metrics = {name: run.last_metrics[name] for name in METRICS if math.isfinite(run.last_metrics.get(name, math.nan))}
    return {
        "iteration": run.context.spec.iterations if done else run.state.iteration,
        "checkpoint": run.state.checkpoint.folder,
        "metrics": metrics,
    }


def write_last_report(run: JobRun) -> None:
    """Log the last report; for a complete job, also write it to the termination message file, or log why not."""
    report, phase = last_report(run), run.outcome.phase if run.outcome else "over"
    checkpoint_note = (
        f"the last checkpoint is {report['checkpoint']}" if report["checkpoint"] else "there is no checkpoint"
    )
    message = f"the job is {phase} after {report['iteration']} iterations; {checkpoint_note}"
    log.info(message, extra={"report": report})
    path = os.environ.get(Env.TERMINATION_MESSAGE)
    if path and phase == "Complete":
        try:
            Path(path).write_text(json.dumps({"message": message, "report": report}), encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error)
