"""Opens the traces of a run, if its manifest or the environment names an endpoint.

Rule: an error in opening them is logged, and the job continues without them.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_api.job.trackers import SAMPLE_SHARE
from rlhf_common.json_logs import job_key
from rlhf_common.tracing.export import open_export, open_where_set
from rlhf_common.tracing.span import Attribute
from rlhf_coordinator.reports.trackers.opentelemetry_traces import OpenTelemetryTraces, run_name

SERVICE: Final = "rlhf-coordinator"
"""service.name, unless OTEL_SERVICE_NAME is set."""


def open_traces(job: RLHFJob, run_dir: Path, environ: Mapping[str, str] | None = None) -> OpenTelemetryTraces | None:
    """Return the tracker; None without an endpoint, or when opening it fails.

    `environ`: the environment of the process.
    """
    environment, settings = os.environ if environ is None else environ, job.spec.trackers.open_telemetry

    def opened(url: str) -> OpenTelemetryTraces:
        run = run_name(run_dir)
        resource: dict[str, Attribute] = {
            "rlhf.job": job_key(job.metadata),
            "rlhf.algorithm": job.spec.algorithm.name,
            "rlhf.run": run,
        }
        export = open_export(url, SERVICE, environment, resource)
        return OpenTelemetryTraces(run, settings.sample_share if settings else SAMPLE_SHARE, export)

    return open_where_set(environment, settings.endpoint if settings else "", opened)
