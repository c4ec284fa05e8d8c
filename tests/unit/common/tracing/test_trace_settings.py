"""OpenTelemetry's standard variables configure the destination of spans."""

import pytest

from rlhf_common.tracing.settings import TraceEndpoint, endpoint_of

GENERAL, OF_TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("environ", "field", "url"),
    [
        ({}, "", ""),
        ({GENERAL: ""}, "", ""),
        ({GENERAL: "http://a:4317"}, "", "http://a:4317"),
        ({GENERAL: "http://a:4317", OF_TRACES: "http://b:4317"}, "", "http://b:4317"),
        ({GENERAL: "http://a:4317"}, "http://c:4317", "http://c:4317"),
        ({"OTEL_SDK_DISABLED": "true"}, "http://c:4317", ""),
        ({GENERAL: "http://a:4317", "OTEL_TRACES_EXPORTER": "none"}, "", ""),
        ({GENERAL: "http://a:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "", "http://a:4317"),
    ],
)
def test_where_spans_go(environ: dict[str, str], field: str, url: str) -> None:
    assert endpoint_of(environ, field) == TraceEndpoint(url)


def test_a_protocol_that_is_not_spoken_is_told_with_what_would_be_right() -> None:
    found = endpoint_of({GENERAL: "http://a:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    assert found.url == ""
    assert found.problem == (
        "OTEL_EXPORTER_OTLP_PROTOCOL='http/protobuf': must be grpc, which collectors serve at port 4317"
    )
