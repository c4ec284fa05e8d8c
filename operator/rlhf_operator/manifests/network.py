"""Network access to a job's pods: headless Services, and a NetworkPolicy that blocks other clients.

Pods of one job connect freely. From outside, the operator reaches the coordinator, and everybody the metrics port.
Egress is not restricted.
"""

from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.manifests import identity

NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""Label with the namespace's name, which the API server sets and enforces."""


def services(job: RLHFJob) -> list[dict[str, Any]]:
    """Return one Service that gives every pod a host name, and one for the coordinator."""
    metrics = {"name": "metrics", "port": names.METRICS_PORT, "targetPort": names.METRICS_PORT, "protocol": "TCP"}
    worker = {"name": "grpc", "port": names.WORKER_PORT, "targetPort": names.WORKER_PORT, "protocol": "TCP"}
    coordinator = {
        "name": "grpc",
        "port": names.COORDINATOR_PORT,
        "targetPort": names.COORDINATOR_PORT,
        "protocol": "TCP",
    }
    return [
        _headless(job, identity.service_name(job), identity.labels(job), identity.selector(job), [worker, metrics]),
        _headless(
            job,
            identity.coordinator_service_name(job),
            identity.labels(job, Group.COORDINATOR),
            identity.selector(job, Group.COORDINATOR),
            [coordinator, metrics],
        ),
    ]


def _headless(
    job: RLHFJob, name: str, labels: dict[str, str], selector: dict[str, str], ports: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": identity.metadata(job, name, labels),
        "spec": {
            "clusterIP": "None",
            # A worker must find the coordinator, and a rank its peers, before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": ports,
        },
    }


def network_policy(job: RLHFJob, home: str = "") -> dict[str, Any]:
    """Return the NetworkPolicy of the job's pods; `home` is the operator's namespace, empty outside the cluster."""
    operator = {"app.kubernetes.io/name": identity.APPLICATION, "app.kubernetes.io/component": "operator"}
    namespace = {"matchLabels": {NAMESPACE_LABEL: home}} if home else {}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.metadata(job, job.name, identity.labels(job)),
        "spec": {
            "podSelector": {"matchLabels": identity.selector(job)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": identity.selector(job)}}]},
                {
                    "from": [{"namespaceSelector": namespace, "podSelector": {"matchLabels": operator}}],
                    "ports": [{"port": names.COORDINATOR_PORT, "protocol": "TCP"}],
                },
                {"ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}]},
            ],
        },
    }
