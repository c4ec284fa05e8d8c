"""Jobs as a real API server returned them, with pods, events, Lease, log and metrics: `seen_jobs/<state>.json`."""

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_cli.cluster.cluster_job import ClusterJob
from rlhf_cli.cluster.cluster_pod import cluster_pods
from rlhf_cli.cluster.job_details import JobDetails, operator_age, parse_iterations, parse_losses

FOLDER = Path(__file__).parent / "seen_jobs"
STATES = sorted(path.stem for path in FOLDER.glob("*.json"))


@lru_cache
def _text(state: str) -> str:
    return (FOLDER / f"{state}.json").read_text()


def load(state: str) -> dict[str, Any]:
    """Return a fresh copy that may be changed."""
    document: dict[str, Any] = json.loads(_text(state))
    return document


def details_of(seen: dict[str, Any]) -> tuple[JobDetails, datetime]:
    """Return the details that describe shows, and the time of their reading."""
    now = datetime.fromisoformat(seen["now"])
    pods = cluster_pods(seen["pods"], seen["events"], now)
    age = operator_age(seen["leases"], now)
    return JobDetails(
        ClusterJob(seen["job"]), pods, seen["events"], parse_iterations(seen["log"]), age, parse_losses(seen["log"])
    ), now
