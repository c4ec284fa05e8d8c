"""Small bodies of objects for the index: one job, its first generation pod, its Service."""

from typing import Any

from rlhf_operator.index import Index

KEY = "team/job"


def pod(version: int, *, uid: str = "p1", owner: str = "u1", phase: str = "Running") -> dict[str, Any]:
    """Return the pod generation-0 of the job whose uid is `owner`."""
    labels = {
        "rlhf.dev/job-name": "job",
        "rlhf.dev/job-uid": owner,
        "rlhf.dev/group": "generation",
        "rlhf.dev/index": "0",
    }
    meta = {"name": "job-generation-0", "namespace": "team", "uid": uid, "resourceVersion": str(version)}
    owners = [{"controller": True, "uid": owner}]
    return {"metadata": meta | {"labels": labels, "ownerReferences": owners}, "status": {"phase": phase}}


def job(version: int, uid: str = "u1", **status: Any) -> dict[str, Any]:
    """Return the job as stored in the API server."""
    meta = {"name": "job", "namespace": "team", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": meta | {"managedFields": ["long"], "annotations": {"a": "b"}}, "status": status}


def other(version: int = 1, *, uid: str = "s1", owner: str | None = "u1", **more: Any) -> dict[str, Any]:
    """Return the metadata of a Service with the job's labels; `owner` None: without an owner."""
    labels = {"rlhf.dev/job-name": "job", "rlhf.dev/job-uid": "u1"}
    meta = {"name": "job", "namespace": "team", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return meta | ({"ownerReferences": [{"controller": True, "uid": owner}]} if owner else {}) | more


def phase(index: Index, owner: str = "u1") -> str | None:
    """Return the phase of the pod in the index; None if the index has no pod."""
    result = index.pods(KEY, owner)[0].get("job-generation-0")
    return result.phase if result else None
