"""Versions of coordinator and worker that work together: a number that both send, and its rule.

A release that changes what either side must understand raises `PROTOCOL` by one; a field that a reader can ignore does
not. Version N sends to version N - 1 only what N - 1 understands.
"""

import json
from typing import Any, Final

from rlhf_api.job import RLHFJob

PROTOCOL: Final = 1
"""Protocol number of this version."""


def compatible(first: int, second: int) -> bool:
    """Return whether two versions are the same or neighbours."""
    return abs(first - second) <= 1


def mismatch(worker: str, its: int, coordinator: int) -> str:
    """Return why a worker and a coordinator of these versions cannot work together; empty if they can."""
    if compatible(its, coordinator):
        return ""
    versions = f"{worker} speaks version {its} of the protocol and the coordinator version {coordinator}"
    if its < coordinator:
        remedy = (
            "the worker image is too old: name one of the coordinator's release in the pod template of its group, or "
            "take the image out of the template, and suspend and resume the job"
        )
    else:
        remedy = (
            "the coordinator image is too old: suspend and resume the job, which then runs by the operator's present "
            "images, or name a worker image of the coordinator's release in the pod template of its group"
        )
    return f"{versions}, and only neighbouring versions work together; {remedy}"


def written_job(job: RLHFJob) -> str:
    """Return the resolved job as JSON for another process."""
    return json.dumps(job.model_dump(mode="json", by_alias=True, exclude_none=True))


def read_job(document: Any) -> RLHFJob:
    """Read the resolved job that another process wrote, ignoring unknown fields. Raises ValidationError.

    Do not use this for user input, where an unknown field is a mistake (`rlhf_api.manifest`).
    """
    return RLHFJob.model_validate(document, extra="ignore")
