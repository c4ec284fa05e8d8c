"""Traces of reconciles for OpenTelemetry, with their steps.

No reconcile waits for traces, and no decision depends on them. Without an endpoint nothing is sent.
"""

import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from rlhf_common.tracing.export import SpanExport, open_export, open_where_set
from rlhf_common.tracing.span import SPAN_BYTES, TRACE_BYTES, Attribute, TraceSpan, trace_words

SERVICE: Final = "rlhf-operator"
"""service.name, unless OTEL_SERVICE_NAME is set."""
MAX_FAILURE: Final = 500
"""Most characters of the reason of a failure."""


class ReconcileTrace:
    """One reconcile in progress."""

    def __init__(self, export: SpanExport | None, key: str, *, traced: bool) -> None:
        self._export, self._key, self._traced = export, key, traced
        self._trace = _random(TRACE_BYTES) if export else 0
        self._start_ns = time.time_ns()
        self._steps: list[tuple[str, int, int]] = []

    @property
    def id(self) -> str:
        """Return its trace id, as in log lines; empty without traces."""
        return trace_words(self._trace) if self._export else ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Record the duration of a step."""
        start = time.time_ns()
        try:
            yield
        finally:
            self._steps.append((name, start, time.time_ns()))

    def end(self, result: str, failure: str = "") -> None:
        """End the trace; queue it for sending if it was chosen or `failure` is not empty."""
        if self._export is None or not (self._traced or failure):
            return
        root, end = _random(SPAN_BYTES), time.time_ns()
        about: dict[str, Attribute] = {"rlhf.job": self._key, "rlhf.result": result}
        failure = failure[:MAX_FAILURE]
        self._export.add(TraceSpan("reconcile", self._trace, root, 0, self._start_ns, end, about, failure))
        for name, began, over in self._steps:
            self._export.add(TraceSpan(name, self._trace, _random(SPAN_BYTES), root, began, over))


class ReconcileTraces:
    """The traces of one operator."""

    def __init__(self, export: SpanExport | None = None, share: float = 1.0) -> None:
        """`share`: share of reconciles whose traces are sent, from 0 to 1, besides failed ones."""
        self._export, self._share = export, share

    def begin(self, key: str) -> ReconcileTrace:
        """Begin the trace of a reconcile of a job."""
        traced = self._export is not None and random.random() < self._share  # noqa: S311 no secret
        return ReconcileTrace(self._export, key, traced=traced)

    def counts(self) -> dict[str, int]:
        """Return outcome -> spans; empty without traces."""
        return self._export.counts() if self._export else {}

    def close(self) -> None:
        """Send the remaining spans, for a bounded time."""
        if self._export is not None:
            self._export.close()


def open_reconcile_traces(share: float, environ: Mapping[str, str] | None = None) -> ReconcileTraces:
    """Return the traces of this process for the endpoint in its environment; without one, or if `share` is 0, nothing
    is sent.
    """
    environment = os.environ if environ is None else environ

    def opened(url: str) -> ReconcileTraces:
        return ReconcileTraces(open_export(url, SERVICE, environment, {}) if share else None, share)

    return open_where_set(environment, "", opened) or ReconcileTraces()


def _random(size: int) -> int:
    return int.from_bytes(os.urandom(size), "big") or 1
