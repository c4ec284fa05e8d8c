"""Export of spans to a collector: a bounded queue, and a thread that sends its content.

Rule: `add` does not wait for the collector. Spans are dropped when the queue is full or closed, and lost when the
collector does not take them. A process that dies loses its queued spans.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final, Protocol, TypeVar

from rlhf_common.tracing.settings import SERVICE_NAME, endpoint_of
from rlhf_common.tracing.span import Attribute, TraceSpan

log = logging.getLogger(__name__)

QUEUED: Final = 4096
"""Maximum queue entries: a span, or the data for an iteration's spans of samples."""
BATCH: Final = 512
"""Maximum spans per call."""
CLOSE_SECONDS: Final = 5.0
"""Maximum seconds to send the rest when a process ends."""
AFTER_FAILURE_SECONDS: Final = 1.0
"""The same if the collector did not take the last spans."""
OUTCOMES: Final = ("exported", "dropped", "failed")

Made = Iterable[TraceSpan]
T = TypeVar("T")


class Sender(Protocol):
    """Sends spans; a small interface over the library's exporter."""

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        """Return whether the collector accepted them; may block for the time-out of the library."""

    def stop(self) -> None:
        """Abort the call in progress; another thread calls this."""


class SpanExport:
    """The queue and its thread."""

    def __init__(self, sender: Sender, where: str, queued: int = QUEUED) -> None:
        """`where`: the endpoint, for log messages."""
        self._sender, self._where, self._room = sender, where, queued
        self._waiting: deque[tuple[int, Callable[[], Made]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="trace export", daemon=True)
        self._thread.start()

    def add(self, span: TraceSpan) -> None:
        """Queue a span; count it as dropped if the queue is full or closing."""
        self.add_made(1, lambda: (span,))

    def add_made(self, size: int, make: Callable[[], Made]) -> None:
        """Queue a function that makes about `size` spans in the thread.

        If it is not queued, `size` spans count as dropped; if it raises, those that it has not made, at least one.
        """
        with self._changed:
            if len(self._waiting) >= self._room or self._closing:
                self._counts["dropped"] += size
                return
            self._waiting.append((size, make))
            self._changed.notify()

    def counts(self) -> dict[str, int]:
        """Return outcome -> number of spans, since the export started."""
        with self._changed:
            return {outcome: self._counts[outcome] for outcome in OUTCOMES}

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the queued spans for a bounded time, then stop the sender."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(min(seconds, AFTER_FAILURE_SECONDS) if self._failing else seconds)
        if self._thread.is_alive():
            log.warning("%s did not take all spans in time: the last ones are lost", self._where)
            with self._changed:
                self._counts["dropped"] += sum(size for size, _ in self._waiting)
                self._waiting.clear()
        self._sender.stop()

    def _run(self) -> None:
        while self._wait():
            for spans in self._take():
                self._send(spans)

    def _wait(self) -> bool:
        """Wait for entries; return False if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return bool(self._waiting)

    def _take(self) -> list[Iterator[TraceSpan]]:
        """Take queued entries and return their spans; single spans are together."""
        with self._changed:
            taken = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        singles = chain.from_iterable(self._spans_of(size, make) for size, make in taken if size == 1)
        return [singles, *(self._spans_of(size, make) for size, make in taken if size != 1)]

    def _spans_of(self, size: int, make: Callable[[], Made]) -> Iterator[TraceSpan]:
        """Yield the spans of an entry up to a failure, which drops the rest of this entry."""
        count = 0
        try:
            for span in make():
                count += 1
                yield span
        except Exception:
            log.exception("spans could not be made, and are dropped")
            self._count("dropped", max(1, size - count))

    def _send(self, spans: Iterator[TraceSpan]) -> None:
        while batch := list(islice(spans, BATCH)):
            try:
                sent = self._sender.send(batch)
            except Exception as error:  # the library may raise anything
                sent = self._lost(f"{type(error).__name__}: {error}")
            else:
                sent = sent or self._lost("it cannot be reached, or refuses them")
            self._count("exported" if sent else "failed", len(batch))
            if sent and self._failing:
                self._failing = False
                log.info("%s takes spans again", self._where)

    def _lost(self, why: str) -> bool:
        if not self._failing:
            self._failing = True
            log.warning("spans are lost until %s takes them: %s", self._where, why)
        return False

    def _count(self, outcome: str, spans: int) -> None:
        with self._changed:
            self._counts[outcome] += spans


class OtlpSender:
    """The library's exporter over gRPC."""

    def __init__(self, endpoint: str, resource: Mapping[str, Attribute], scope: str) -> None:
        """Raises ModuleNotFoundError if the library is missing, and ValueError for variables that it cannot read."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        # The library logs every failed call; this module logs failures once.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope(scope)

    def send(self, spans: Sequence[TraceSpan]) -> bool:
        """Send them in one call, for at most OTEL_EXPORTER_OTLP_TIMEOUT seconds with the library's retries."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS

    def stop(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _readable(self, span: TraceSpan) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(number: int) -> SpanContext:
            return SpanContext(span.trace, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            name=span.name,
            context=context(span.span),
            parent=context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=max(span.start_ns, span.end_ns),
            instrumentation_scope=self._scope,
        )


def open_where_set(environ: Mapping[str, str], configured: str, opened: Callable[[str], T]) -> T | None:
    """Return the result of `opened` for the configured endpoint, or else for that of the environment.

    Return None without an endpoint, or if `opened` fails, which is logged.
    """
    endpoint = endpoint_of(environ, configured)
    if endpoint.problem:
        log.warning("no traces are sent: %s", endpoint.problem)
    if not endpoint.url:
        return None
    try:
        return opened(endpoint.url)
    except Exception as error:  # the library may raise anything about its variables
        log.warning("no traces are sent to %s: %s: %s", endpoint.url, type(error).__name__, error)
        return None


def open_export(
    endpoint: str, service: str, environ: Mapping[str, str], resource: Mapping[str, Attribute]
) -> SpanExport:
    """Start to send the spans of a process. Raises ModuleNotFoundError and ValueError."""
    named = {} if environ.get(SERVICE_NAME) else {"service.name": service}
    return SpanExport(OtlpSender(endpoint, {**named, **resource}, service), endpoint)
