"""Destination of spans, from a given endpoint or OpenTelemetry's own environment variables. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"


@dataclass(frozen=True)
class TraceEndpoint:
    """Destination of spans."""

    url: str = ""
    """URL of the endpoint; empty: none."""
    problem: str = ""
    """Reason why the protocol is not supported; empty if it is."""


def endpoint_of(environ: Mapping[str, str], configured: str = "") -> TraceEndpoint:
    """Return the destination of spans: the given endpoint, or else that of the environment."""
    url = configured or next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    if not url or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return TraceEndpoint()
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return TraceEndpoint()
    name = next((name for name in PROTOCOLS if environ.get(name)), "")
    if name and environ[name] != "grpc":
        return TraceEndpoint(problem=f"{name}={environ[name]!r}: must be grpc, which collectors serve at port 4317")
    return TraceEndpoint(url)
