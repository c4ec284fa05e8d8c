"""Log lines of a worker on stderr: `time level worker message`, or one JSON object per line.

Rule: a JSON line names the job, once it is known, and the iteration of the last command that has one. Must never
buffer: `os._exit` may follow any line.
"""

import logging
import sys
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.json_logs import JsonLogFormatter, LogContext, job_key, log_what_is_printed
from rlhf_common.samples import is_ahead
from rlhf_common.tracing.span import iteration_trace

_CONTEXT: Final = LogContext()


class WorkerLogFields:
    """The job and iteration in the JSON log lines of this process; the agent changes them."""

    def __init__(self) -> None:
        self._job = ""
        self._iteration: int | None = None
        self._trace_run = ""

    def say_job(self, job: RLHFJob, trace_run: str = "") -> None:
        """Name the job in every JSON line from now on; `trace_run` as in `pb.Welcome`."""
        self._job, self._trace_run = job_key(job.metadata), trace_run
        self._show()

    def say_iteration(self, command: pb.Command) -> None:
        """Name the iteration of a command from now on, if it has one."""
        iteration = iteration_of(command)
        if iteration is not None and iteration != self._iteration:
            self._iteration = iteration
            self._show()

    def _show(self) -> None:
        iteration = self._iteration
        trace = "" if iteration is None else iteration_trace(self._trace_run, iteration)
        fields = {"job": self._job, "iteration": iteration, "trace_id": trace}
        _CONTEXT.present = lambda: fields


def iteration_of(command: pb.Command) -> int | None:
    """Return the iteration of a Generate, Score, Train or Accumulate command; None for others, and for one without
    samples to generate or score. Drafts of the next iteration do not count."""
    match command.WhichOneof("command"):
        case "generate":
            samples = command.generate.samples
            return next((each.key.iteration for each in samples if not is_ahead(each.key.sample)), None)
        case "score":
            return next((each.key.iteration for each in command.score.samples), None)
        case "train":
            return command.train.iteration
        case "accumulate":
            return command.accumulate.iteration
    return None


def configure_logs(worker: str, *, json_lines: bool) -> None:
    """Send the root logger to stderr as text or, with `json_lines`, as JSON with warnings and uncaught errors."""
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(JsonLogFormatter(worker, context=_CONTEXT))
        log_what_is_printed()
    else:
        line = f"%(asctime)s.%(msecs)03d %(levelname)s {worker} %(message)s"
        handler.setFormatter(logging.Formatter(line, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def flush_logs() -> None:
    """Flush the root logger's handlers and the standard streams, before `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
    sys.stderr.flush()
