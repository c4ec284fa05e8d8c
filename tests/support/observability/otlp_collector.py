"""A collector for tests that receives OTLP over gRPC, like a real one, and stores the spans."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

WAIT_SECONDS = 120.0


@dataclass(frozen=True)
class CollectedSpan:
    """A span as received over the wire."""

    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    failure: str
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Receives spans on a free port of the loopback, between `__enter__` and `__exit__`."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.refuses = False
        """Whether to answer that the request is not allowed."""
        self._came = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(WAIT_SECONDS)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 the name in the protocol
        """Process one call."""
        if self.refuses:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        with self._came:
            self.headers.append(dict(context.invocation_metadata()))
            for group in request.resource_spans:
                resource = values(group.resource.attributes)
                self.spans += [collected(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def until(self, condition: Callable[[list[CollectedSpan]], bool], event: str) -> list[CollectedSpan]:
        """Return the spans once they satisfy a condition."""
        with self._came:
            assert self._came.wait_for(lambda: condition(self.spans), WAIT_SECONDS), f"waited for {event}: {self.spans}"
            return list(self.spans)


def collected(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    """Read a span of the protocol."""
    return CollectedSpan(
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failure=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
        attributes=values(span.attributes),
        resource=resource,
    )


def values(attributes: Any) -> dict[str, Any]:
    """Read attributes of the protocol."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
