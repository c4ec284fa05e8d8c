"""Warns of loopback URLs in pods without another container that could answer."""

from collections.abc import Iterator
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.urls import is_loopback, urls
from rlhf_common.names import Group
from rlhf_operator.manifests.pods import CONTAINER

_SCORERS = (Group.GENERATION, Group.INFERENCE)


def problems_of(job: RLHFJob) -> Iterator[Problem]:
    """Yield a warning for each loopback URL if a group that calls it has no other container in its template."""
    for field, url in urls(job.spec):
        callers = (Group.COORDINATOR,) if field.startswith("spec.trackers.") else _SCORERS
        lacking = [group for group in callers if not _has_sidecar(getattr(job.spec, group).template)]
        if is_loopback(url) and lacking:
            named = " and ".join(f"{group} pods" for group in lacking)
            message = f"leads each pod to itself, and {named} have no container that answers: name a Service"
            yield Problem(field, url, message, severity=Severity.WARNING)


def _has_sidecar(template: Any) -> bool:
    spec = (template if isinstance(template, dict) else {}).get("spec") or {}
    return any(container.get("name") != CONTAINER for container in spec.get("containers") or []) or any(
        container.get("restartPolicy") == "Always" for container in spec.get("initContainers") or []
    )
