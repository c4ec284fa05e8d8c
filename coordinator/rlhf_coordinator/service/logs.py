"""Log lines of the coordinator on stderr: `time level coordinator message`, or one JSON object per line."""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common.json_logs import JsonLogFormatter, LogContext, job_key, log_what_is_printed
from rlhf_common.names import Env
from rlhf_common.tracing.span import iteration_trace
from rlhf_coordinator.job.job_run import JobRun

NAME = "coordinator"
_CONTEXT: Final = LogContext()


def configure_logs() -> None:
    """Send log lines from level INFO on to stderr, as JSON if RLHF_LOG_FORMAT is json."""
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get(Env.LOG_FORMAT) == "json":
        handler.setFormatter(JsonLogFormatter(NAME, extras=("report",), context=_CONTEXT))
        log_what_is_printed()
    else:
        line = f"%(asctime)s.%(msecs)03d %(levelname)s {NAME} %(message)s"
        handler.setFormatter(logging.Formatter(line, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # transformers warns that torch is missing, which is intended.
    logging.getLogger("transformers").setLevel(logging.ERROR)


def say_job(job: RLHFJob) -> None:
    """Add the job to every JSON line from now on."""
    fields = {"job": job_key(job.metadata)}
    _CONTEXT.present = lambda: fields


def say_iteration(run: JobRun) -> None:
    """Add the iteration in progress, and its trace if the run has traces, to every JSON line from now on."""
    key = job_key(run.context.job.metadata)

    def present() -> Mapping[str, Any]:
        iteration = run.state.iteration
        return {"job": key, "iteration": iteration, "trace_id": iteration_trace(run.trackers.trace_run, iteration)}

    _CONTEXT.present = present
