"""Which versions of coordinator and worker work together: one number that both say, and the rule about it.

Register and Welcome carry `PROTOCOL`. It rises by one with a release that changes what either side must understand;
what may only be added (a field that a reader can ignore) does not raise it. Neighbours work together: whoever speaks
version N keeps to what N - 1 understands while it talks to N - 1. Anything further apart is refused by both sides, with
a message that names the image to change; neither side ends over it, as another start brings the same image.
The same holds for the resolved job, which a process of another version may have written: `read_job`.
Must never hold what a version can do: that is said where it is done.
"""

import json
from typing import Any, Final

from rlhf_api.job import RLHFJob

PROTOCOL: Final = 1
"""The number that this version speaks."""


def compatible(first: int, second: int) -> bool:
    """Return whether two versions are the same or neighbours."""
    return abs(first - second) <= 1


def mismatch(worker: str, its: int, coordinator: int) -> str:
    """Return why a worker and a coordinator of these versions cannot work together; empty when they can."""
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
    """Read the resolved job that another process wrote. Raises ValidationError.

    The writer may be of a newer version, and has checked what it wrote: fields that are not known here are ignored. Not
    for what a user wrote: there an unknown field is a mistake (`rlhf_api.manifest`).
    """
    return RLHFJob.model_validate(document, extra="ignore")
