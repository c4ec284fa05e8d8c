"""Names, labels, owner and addresses of a job's objects.

Two jobs in a namespace must never derive the same name for objects of one kind (test_derived_names.py).
"""

from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group

Number = int | str
"""Number of a pod in its group, or of restarts. A pod of a revision has the placeholder INDEX, SPARE or EPOCH instead.
"""
INDEX: Final = f"$({names.LABEL_INDEX})"
SPARE: Final = f"$({names.LABEL_INDEX}-spare)"
"""INDEX of a worker beyond the training ranks' pods, in a group whose other workers have the ranks."""
EPOCH: Final = f"$({names.LABEL_EPOCH})"
APPLICATION: Final = "rlhf-operator"
"""app.kubernetes.io/name of a job's objects and of the operator, and managed-by of a job's objects."""


def namespace(job: RLHFJob) -> str:
    """Return the job's namespace; `default` if the manifest names none, as in kubectl."""
    return str(job.metadata.get("namespace") or "default")


def pod_name(job: RLHFJob, group: Group, index: Number) -> str:
    """Return `<job>-coordinator` or `<job>-<group>-<index>`."""
    if group is Group.COORDINATOR:
        return f"{job.name}-{group}"
    return f"{job.name}-{names.worker_name(group, index)}"


def pod_host(job: RLHFJob, group: Group, index: Number = 0) -> str:
    """Return the host name of the pod for the other pods of the job: the headless Service has one record per pod."""
    return f"{pod_name(job, group, index)}.{service_name(job)}.{namespace(job)}.svc"


def service_name(job: RLHFJob) -> str:
    """Return the name of the headless Service of all pods of the job, which has their host names."""
    return job.name


def coordinator_service_name(job: RLHFJob) -> str:
    """Return the name of the coordinator's Service."""
    return f"{job.name}-{Group.COORDINATOR}"


def certificates_name(job: RLHFJob) -> str:
    """Return the name of the Secret with ca.crt, tls.crt, tls.key."""
    return f"{job.name}-certificates"


def authority_name(job: RLHFJob) -> str:
    """Return the name of the Secret with the key of the job's authority; the operator mounts it in no pod."""
    return f"{job.name}-authority"


def configuration_name(job: RLHFJob) -> str:
    """Return the name of the ConfigMap with the resolved job."""
    return configuration_of(job.name)


def configuration_of(job: str) -> str:
    """Return the name of the ConfigMap of the job of this name."""
    return f"{job}-job"


def selector(job: RLHFJob, group: Group | None = None) -> dict[str, str]:
    """Return the labels that select the job's pods, or those of one group."""
    matching = {names.LABEL_JOB_NAME: job.name}
    if group is not None:
        matching[names.LABEL_GROUP] = group.value
    return matching


def labels(
    job: RLHFJob, group: Group | None = None, index: Number | None = None, epoch: Number | None = None
) -> dict[str, str]:
    """Return the labels of an object of the job, with group, index and epoch if they are given."""
    every = {
        "app.kubernetes.io/name": APPLICATION,
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/managed-by": APPLICATION,
        **selector(job, group),
    }
    if uid := job.metadata.get("uid"):
        every[names.LABEL_JOB_UID] = str(uid)
    if group is not None:
        every["app.kubernetes.io/component"] = group.value
    if index is not None:
        every[names.LABEL_INDEX] = str(index)
    if epoch is not None:
        every[names.LABEL_EPOCH] = str(epoch)
    return every


def metadata(job: RLHFJob, name: str, labels: dict[str, str]) -> dict[str, Any]:
    """Return object metadata, owned by the RLHFJob if it has a uid, so that the object is deleted with the job."""
    meta: dict[str, Any] = {"name": name, "namespace": namespace(job), "labels": labels}
    if uid := job.metadata.get("uid"):
        meta["ownerReferences"] = [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": job.name,
                "uid": str(uid),
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return meta
