"""Log lines of the operator on stderr: one JSON object per line, or plain lines.

Rule: what is said during a reconcile names its job, the iteration that the job is in, and the trace, by itself
(`reconciling`); whoever speaks of a job elsewhere puts its key into `extra={"job": key}`, so that lines are found by
job.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from rlhf_common.json_logs import JsonLogFormatter, LogContext, log_what_is_printed

_EXTRAS: Final = ("job", "event")
_RECONCILED: Final[ContextVar[Mapping[str, Any]]] = ContextVar("reconciled", default={})  # noqa: B039 never changed
_CONTEXT: Final = LogContext()
_CONTEXT.present = _RECONCILED.get


def configure(*, json_lines: bool) -> None:
    """Send the root logger's lines to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if json_lines:
        handler.setFormatter(json_formatter())
        log_what_is_printed()
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # kopf tells every step of its own; what it cannot do is all that matters. Signals are for us to take.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    handler.addFilter(_of_kopf)


def _of_kopf(record: logging.LogRecord) -> bool:
    """Return whether a line is worth logging; take the traceback from what kopf says, as its error says it all."""
    if record.name.partition(".")[0] == "kopf":
        record.exc_info = record.exc_text = None
    return not record.getMessage().startswith("OS signals are ignored")


def json_formatter() -> JsonLogFormatter:
    """Return what formats a line as JSON."""
    return JsonLogFormatter(extras=_EXTRAS, context=_CONTEXT)


def present() -> Mapping[str, Any]:
    """Return what lines of this task say of a job now."""
    return _CONTEXT.fields()


@contextmanager
def reconciling(key: str, job: Mapping[str, Any] | None, trace_id: str = "") -> Iterator[None]:
    """Inside, every line of this task says the job, the iteration that its status has, and the trace if there is
    one."""
    token = _RECONCILED.set({"job": key, "iteration": _iteration(job), "trace_id": trace_id})
    try:
        yield
    finally:
        _RECONCILED.reset(token)


def _iteration(job: Mapping[str, Any] | None) -> int | None:
    """Return the iteration in a stored object, which anybody may have written."""
    status = (job or {}).get("status")
    progress = status.get("progress") if isinstance(status, dict) else None
    iteration = progress.get("iteration") if isinstance(progress, dict) else None
    return iteration if type(iteration) is int else None
