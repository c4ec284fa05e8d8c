"""Where spans go, as the environment says it by OpenTelemetry's own variables. Pure.

Rule: what cannot be followed is a problem in words, never an exception: a job does not end for its traces.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
SERVICE_NAME: Final = "OTEL_SERVICE_NAME"


@dataclass(frozen=True)
class TraceEndpoint:
    """Where spans go."""

    url: str = ""
    """Empty: nowhere."""
    problem: str = ""
    """Why nowhere, though an endpoint is set."""


def endpoint_of(environ: Mapping[str, str], given: str = "") -> TraceEndpoint:
    """Return where spans go: to the endpoint that is given, or else to that of the environment."""
    url = given or next((environ[name] for name in ENDPOINTS if environ.get(name)), "")
    if not url or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return TraceEndpoint()
    if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return TraceEndpoint()
    name = next((name for name in PROTOCOLS if environ.get(name)), "")
    if name and environ[name] != "grpc":
        return TraceEndpoint(problem=f"{name}={environ[name]!r}: must be grpc, which collectors serve at port 4317")
    return TraceEndpoint(url)
