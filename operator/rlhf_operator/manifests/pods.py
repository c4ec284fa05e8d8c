"""Pods of a job before the user's template is merged in, such as command, environment, ports, probes and mounts."""

import math
from collections.abc import Mapping
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import GroupFields
from rlhf_api.rank_pods import workers_a_pod
from rlhf_common import names
from rlhf_common.endpoint import LIVENESS_PATH
from rlhf_common.names import Env, Group
from rlhf_operator.manifests import engine_pods, identity, rank_ports, user_code_mounts
from rlhf_operator.manifests.identity import SPARE, Number
from rlhf_operator.manifests.mount_paths import CERTIFICATES_PATH, JOB_KEY, JOB_PATH, RUN_PATH

CONTAINER: Final = "worker"
"""Name of our container in every pod; a template's container of this name is merged with it."""
GPU_RESOURCE: Final = "nvidia.com/gpu"
TERMINATION_MESSAGE: Final = "/dev/termination-log"
"""Kubernetes' default file for termination messages."""
USER_ID: Final = 10001
"""Unprivileged user and group of the images; the operator's installation or a template may name another one except
root.
"""
COORDINATOR_GRACE_SECONDS: Final = 300
"""Default grace period in seconds of the coordinator's pod."""
WORKER_GRACE_SECONDS: Final = 30
"""Default grace period in seconds of a worker's pod in a group without training ranks."""
RANK_GRACE_SECONDS: Final = 360
"""Default grace period in seconds of pods of the group with training ranks; longer than the coordinator's, which needs
them for its checkpoint.
"""
SCRAPED: Final = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(names.METRICS_PORT),
    "prometheus.io/path": "/metrics",
}
"""Annotations for a Prometheus without its operator; a template may override them."""
NOT_SCRAPED: Final = {"prometheus.io/scrape": "false"}
"""Annotations of pods of a job without metrics."""
STAYS: Final = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
"""Annotations of pods whose end interrupts the whole job, so that autoscalers remove other nodes. A template may
override them.
"""
KILL_GRACE_SECONDS: Final = 30
"""Grace period in seconds after a failed probe, instead of the pod's own."""
PROBE_SECONDS: Final = 20
"""Most seconds between two liveness probes of a process."""
PROBE_TIMEOUT_SECONDS: Final = 10
"""Longest time-out of a probe in seconds."""
START_PROBE_SECONDS: Final = 2
"""Seconds between two startup probes."""
START_SECONDS: Final = 1800
"""Seconds that a process may take until it answers its first probe."""
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
TERMINATION_MESSAGE_POLICY: Final = "FallbackToLogsOnError"
"""The end of a failed process's log becomes its termination message if it wrote none."""
TMP: Final = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 an emptyDir of the pod
CONTAINER_SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def coordinator_pod(job: RLHFJob, image: str, user: int | None = USER_ID) -> dict[str, Any]:
    """Return the coordinator's pod. In a job with checkpoints, its run folder is below their path, so that a pod on
    another node finds the journal.
    """
    checkpoints = job.spec.checkpoints
    run_dir = f"{checkpoints.path.rstrip('/')}/run" if checkpoints else RUN_PATH
    env: dict[str, str] = {
        Env.JOB_FILE: f"{JOB_PATH}/{JOB_KEY}",
        Env.RUN_DIR: run_dir,
        Env.LISTEN: f"[::]:{names.COORDINATOR_PORT}",
        Env.GROUP: Group.COORDINATOR.value,
        Env.INDEX: "0",
        Env.CERTIFICATES: CERTIFICATES_PATH,
        Env.METRICS: f"[::]:{names.METRICS_PORT}",
        Env.TERMINATION_MESSAGE: TERMINATION_MESSAGE,
        Env.AWAIT_WORKERS: "1",
    }
    container = _container(image, "rlhf_coordinator", env, names.COORDINATOR_PORT, threads=1, gpus=0, memory="512Mi")
    container["env"] += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": key.name, "key": key.key}}}
        for name, key in job.spec.trackers.secret_variables().items()
    ]
    container["volumeMounts"].append({"name": "job", "mountPath": JOB_PATH, "readOnly": True})
    container["readinessProbe"] = {"tcpSocket": {"port": names.COORDINATOR_PORT}, "periodSeconds": 5}
    volumes = [{"name": "job", "configMap": {"name": identity.configuration_name(job)}}]
    if checkpoints is None:
        container["volumeMounts"].append({"name": "run", "mountPath": RUN_PATH})
        volumes.append({"name": "run", "emptyDir": {}})
    container |= _probes(job)
    return _staying(_pod(job, Group.COORDINATOR, 0, container, volumes, COORDINATOR_GRACE_SECONDS, user))


def worker_pod(
    job: RLHFJob, group: Group, index: Number, fields: GroupFields, image: str, user: int | None = USER_ID
) -> dict[str, Any]:
    """Return one pod of a group of workers; a training rank is a worker, and a pod may contain several."""
    env: dict[str, str] = {
        Env.COORDINATOR: f"{identity.pod_host(job, Group.COORDINATOR)}:{names.COORDINATOR_PORT}",
        Env.LISTEN: f"[::]:{names.WORKER_PORT}",
        Env.ADVERTISE: f"{identity.pod_host(job, group, index)}:{names.WORKER_PORT}",
        Env.GROUP: group.value,
        Env.INDEX: str(index),
        Env.CERTIFICATES: CERTIFICATES_PATH,
        Env.METRICS: f"[::]:{names.METRICS_PORT}",
        # A pod sees only its own devices, so the index of its first is always 0.
        Env.DEVICE: "cuda:0" if fields.gpus_per_replica else "cpu",
        Env.THREADS: str(fields.cpu_threads),
    }
    if group is job.spec.rank_group:
        env[Env.RENDEZVOUS] = identity.pod_host(job, group, index)
    worker_count = workers_a_pod(job.spec, group)
    env |= rank_ports.entries(worker_count, identity.pod_host(job, group, index), gpus=fields.gpus_per_replica > 0)
    shared = engine_pods.shared_memory(job, group)
    container = _container(
        image,
        rank_ports.LAUNCHER if worker_count > 1 else "rlhf_workers",
        env | engine_pods.environment(job, group),
        names.WORKER_PORT,
        threads=fields.cpu_threads,
        processes=engine_pods.processes(job, group),
        gpus=fields.gpus_per_replica * worker_count,
        # The content of /dev/shm counts as memory of the container.
        memory=f"{1024 * worker_count + shared}Mi" if shared else "1Gi",
    )
    volumes: list[dict[str, Any]] = []
    # Generation workers become inference workers without a restart when the long tail migrates.
    if group is not Group.TRAINING:
        container["env"] += user_code_mounts.secret_environment(job.spec, group)
        for volume, path, config_map in user_code_mounts.mounts_of(job.spec, group):
            container["volumeMounts"].append({"name": volume, "mountPath": path, "readOnly": True})
            volumes.append({"name": volume, "configMap": {"name": config_map}})
    container |= _probes(job)
    if group is not job.spec.rank_group:
        return _pod(job, group, index, container, volumes, WORKER_GRACE_SECONDS, user, shared)
    body = _pod(job, group, index, container, volumes, RANK_GRACE_SECONDS, user, shared)
    holds_rank = index != SPARE if isinstance(index, str) else index < job.spec.training.ranks
    return _staying(body) if holds_rank else body


def _staying(pod: dict[str, Any]) -> dict[str, Any]:
    return {**pod, "metadata": {**pod["metadata"], "annotations": {**pod["metadata"]["annotations"], **STAYS}}}


def tell_grace(pod: dict[str, Any]) -> None:
    """Add the pod's grace period to the environment of our container in a merged pod."""
    container = next(container for container in pod["spec"]["containers"] if container["name"] == CONTAINER)
    grace = {"name": Env.GRACE.value, "value": str(pod["spec"]["terminationGracePeriodSeconds"])}
    container["env"] = [*container["env"], grace]


def _probes(job: RLHFJob) -> dict[str, Any]:
    """Return the probes by which a kubelet ends a hung process; empty if hangTimeoutSeconds is 0.

    `rlhf_common.endpoint` answers them.
    """
    patience = job.spec.run_policy.hang_timeout_seconds
    if not patience:
        return {}
    question = {"httpGet": {"path": LIVENESS_PATH, "port": names.METRICS_PORT}}
    period = max(1, min(PROBE_SECONDS, patience // 3))
    timeout = {"timeoutSeconds": min(PROBE_TIMEOUT_SECONDS, period)}
    return {
        "startupProbe": {
            **question,
            "periodSeconds": START_PROBE_SECONDS,
            "failureThreshold": START_SECONDS // START_PROBE_SECONDS,
            "timeoutSeconds": PROBE_TIMEOUT_SECONDS,
            "terminationGracePeriodSeconds": KILL_GRACE_SECONDS,
        },
        "livenessProbe": {
            **question,
            **timeout,
            "periodSeconds": period,
            "failureThreshold": math.ceil(patience / period),
            "terminationGracePeriodSeconds": KILL_GRACE_SECONDS,
        },
    }


def _container(
    image: str,
    module: str,
    env: Mapping[str, str],
    port: int,
    *,
    threads: int,
    gpus: int,
    memory: str,
    processes: int = 1,
) -> dict[str, Any]:
    variables = {
        **{str(variable): value for variable, value in env.items()},
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        Env.LOG_FORMAT.value: "json",
        # The root file system is read-only; libraries store their caches under HOME.
        "HOME": "/tmp",  # noqa: S108 an emptyDir of the pod
    }
    resources: dict[str, Any] = {"requests": {"cpu": str(threads * processes), "memory": memory}}
    if gpus:
        resources["requests"][GPU_RESOURCE] = str(gpus)
        resources["limits"] = {GPU_RESOURCE: str(gpus)}
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["python", "-m", module],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "ports": [
            {"name": "grpc", "containerPort": port, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": resources,
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": TERMINATION_MESSAGE_POLICY,
        "volumeMounts": [
            {"name": "certificates", "mountPath": CERTIFICATES_PATH, "readOnly": True},
            TMP,
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 an emptyDir of the pod
        ],
    }


def _pod(
    job: RLHFJob,
    group: Group,
    index: Number,
    container: dict[str, Any],
    volumes: list[dict[str, Any]],
    grace: int,
    user: int | None,
    shared: int = 0,
) -> dict[str, Any]:
    """Return the pod around its container; `shared` limits /dev/shm in mebibytes, and 0 leaves the limit to the
    kubelet.
    """
    name = identity.pod_name(job, group, index)
    owner = {} if user is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user)
    # With fsGroup, only the job's group can read the key. Without it the cluster may set one or not, and only the pod's
    # own processes see the folder.
    mode = 0o444 if user is None else 0o440
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(SCRAPED if job.spec.metrics == "Enabled" else NOT_SCRAPED)},
        "spec": {
            "hostname": name,
            "subdomain": identity.service_name(job),
            "restartPolicy": "OnFailure",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace,
            "securityContext": POD_SECURITY | owner,
            "containers": [container],
            "volumes": [
                {
                    "name": "certificates",
                    "secret": {"secretName": identity.certificates_name(job), "defaultMode": mode},
                },
                {"name": "tmp", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"medium": "Memory"} | ({"sizeLimit": f"{shared}Mi"} if shared else {})},
                *volumes,
            ],
        },
    }
