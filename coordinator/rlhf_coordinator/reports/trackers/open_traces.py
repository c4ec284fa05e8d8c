"""Opens the traces of a run, where its manifest or the environment names an endpoint.

Rule: a job never fails for its traces: whatever keeps them from being opened is said in one line, and the job goes on
without them.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.job.trackers import SAMPLE_SHARE
from rlhf_api.json_logs import job_key
from rlhf_api.tracing.export import open_export
from rlhf_api.tracing.settings import endpoint_of
from rlhf_api.tracing.span import Attribute
from rlhf_coordinator.reports.trackers.opentelemetry_traces import OpenTelemetryTraces, run_name

log = logging.getLogger(__name__)

SERVICE: Final = "rlhf-coordinator"
"""service.name, unless OTEL_SERVICE_NAME says otherwise."""


def open_traces(job: RLHFJob, run_dir: Path, environ: Mapping[str, str] | None = None) -> OpenTelemetryTraces | None:
    """Return the tracker; None where no endpoint is set, or it cannot be opened. `environ`: that of the process."""
    environ = os.environ if environ is None else environ
    given = job.spec.trackers.open_telemetry
    endpoint = endpoint_of(environ, given.endpoint if given else "")
    if endpoint.problem:
        log.warning("no traces are sent: %s", endpoint.problem)
    if not endpoint.url:
        return None
    try:
        run = run_name(run_dir)
        resource: dict[str, Attribute] = {
            "rlhf.job": job_key(job.metadata),
            "rlhf.algorithm": job.spec.algorithm.name,
            "rlhf.run": run,
        }
        export = open_export(endpoint.url, SERVICE, environ, resource)
    except Exception as error:  # whatever a library makes of its variables
        log.warning("no traces are sent to %s: %s: %s", endpoint.url, type(error).__name__, error)
        return None
    return OpenTelemetryTraces(run, given.sample_share if given else SAMPLE_SHARE, export)
