"""Names, labels, owner and addresses of a job's objects.

Rule: every object of a job is found by labels, and is the job's only when its controller is the job, by uid: anybody
may write a label. A name is derived from the job's name and never parsed back.

Two jobs of a namespace never derive one name for objects of one kind. Where all names of a kind have one ending, or one
beginning, equal names are of equal jobs: Secrets (`-certificates`, and `-authority`, of which neither ends in the
other), ConfigMaps (`-job`), Kueue's Workloads (`rlhfjob-` and `rlhfslice-`, neither of which begins the other).
NetworkPolicies, PodGroups and native Workloads have the bare name. Pods end in `-coordinator` or in `-<group>-<index>`:
the last part tells the first form from the second, as an index is digits; what is left without the digits ends in
exactly one group. Only Services have both the bare name and one with an ending, so a new job's name must not end in
`-coordinator` (`rlhf_api.rules`). A kind that gets a second form of a name needs such an argument;
tests/unit/operator/manifests/test_derived_names.py looks for two jobs that contradict it. A job that is older than the
rule meets the owner check of `job_objects`.
"""

from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group

Number = int | str
"""Of a pod in its group, or of a restart; in a template of pods what stands for it: INDEX, SPARE, EPOCH."""
INDEX: Final = f"$({names.LABEL_INDEX})"
SPARE: Final = f"$({names.LABEL_INDEX}-spare)"
"""INDEX of a worker beyond those that hold the training ranks, in a group where others hold them."""
EPOCH: Final = f"$({names.LABEL_EPOCH})"
APPLICATION: Final = "rlhf-operator"
"""app.kubernetes.io/name and managed-by of everything we make."""


def namespace(job: RLHFJob) -> str:
    """Return the job's namespace; `default` when the manifest names none, as kubectl has it."""
    return str(job.metadata.get("namespace") or "default")


def pod_name(job: RLHFJob, group: Group, index: Number) -> str:
    """Return `<job>-coordinator`, or `<job>-<group>-<index>`."""
    if group is Group.COORDINATOR:
        return f"{job.name}-{group}"
    return f"{job.name}-{names.worker_name(group, index)}"


def pod_host(job: RLHFJob, group: Group, index: Number = 0) -> str:
    """Return the host name under which the other pods of the job reach this one: the headless Service has one record
    per pod.
    """
    return f"{pod_name(job, group, index)}.{service_name(job)}.{namespace(job)}.svc"


def service_name(job: RLHFJob) -> str:
    """Return the name of the headless Service over all pods of the job; pods are its host names."""
    return job.name


def coordinator_service_name(job: RLHFJob) -> str:
    """Return the name of the Service by which the operator and users reach the coordinator."""
    return f"{job.name}-{Group.COORDINATOR}"


def certificates_name(job: RLHFJob) -> str:
    """Return the name of the Secret with ca.crt, tls.crt, tls.key."""
    return f"{job.name}-certificates"


def authority_name(job: RLHFJob) -> str:
    """Return the name of the Secret with the key of the job's authority; no pod mounts it."""
    return f"{job.name}-authority"


def configuration_name(job: RLHFJob) -> str:
    """Return the name of the ConfigMap with the resolved job."""
    return configuration_of(job.name)


def configuration_of(job: str) -> str:
    """Return the same, by the job's name."""
    return f"{job}-job"


def selector(job: RLHFJob, group: Group | None = None) -> dict[str, str]:
    """Return the labels that find the job's pods, or those of one group."""
    matching = {names.LABEL_JOB_NAME: job.name}
    if group is not None:
        matching[names.LABEL_GROUP] = group.value
    return matching


def labels(
    job: RLHFJob, group: Group | None = None, index: Number | None = None, epoch: Number | None = None
) -> dict[str, str]:
    """Return the labels of an object of the job; pods also carry their group, index and epoch."""
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
    """Return object metadata, owned by the RLHFJob once the API server has given it a uid, so that its deletion takes
    all along.
    """
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
