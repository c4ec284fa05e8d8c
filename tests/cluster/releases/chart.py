"""The Helm chart for its tests: its rendered objects, and the table of rights that it may grant.

Rule: the table lists the rights that the operator uses; code and chart are both compared with it, so neither can drift.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from tests.cluster.toolchain import binary

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "rlhf-operator"
DEFINITION = ROOT / "crds" / "rlhfjobs.yaml"
RELEASE, HOME = "rlhf", "rlhf-system"

USED = {
    ("rlhf.dev", "rlhfjobs"): "get list watch patch delete",  # patch: the finalizer; delete: time to live
    ("rlhf.dev", "rlhfjobs/status"): "patch",
    ("rlhf.dev", "rlhfjobs/finalizers"): "update",  # objects with blockOwnerDeletion, as on OpenShift
    ("", "pods"): "get list watch create patch delete",  # patch: the label of the migration pool
    ("", "services"): "get list watch create patch",  # a server-side apply that creates an object needs both
    ("", "configmaps"): "get list watch create patch",
    ("networking.k8s.io", "networkpolicies"): "get list watch create patch",
    ("", "secrets"): "get create patch",
    ("events.k8s.io", "events"): "create",
}
"""Requests of the operator in the namespaces of jobs."""
_OBJECTS = "get list watch create patch delete"  # delete: a group of another size, and quota of a suspended job
SCHEDULING: dict[str, dict[tuple[str, str], str]] = {
    "native": {("scheduling.k8s.io", "workloads"): _OBJECTS, ("scheduling.k8s.io", "podgroups"): _OBJECTS},
    "kueue": {("kueue.x-k8s.io", "workloads"): _OBJECTS, ("kueue.x-k8s.io", "workloads/status"): "update"},
    "volcano": {("scheduling.volcano.sh", "podgroups"): _OBJECTS},
    "coscheduling": {("scheduling.x-k8s.io", "podgroups"): _OBJECTS},
}
"""Additional rights for each backend of gangs and queues that the chart's values switch on."""
FLAVORS = {
    ("kueue.x-k8s.io", "resourceflavors"): "get",
    ("kueue.x-k8s.io", "workloadpriorityclasses"): "get",
    ("scheduling.k8s.io", "priorityclasses"): "get",
}
"""Additional rights in the whole cluster, with Kueue."""
LEASE = {("coordination.k8s.io", "leases"): "get create update"}
"""Additional rights in the operator's namespace."""
EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "everything",
    "commonLabels": {"team": "rl"},
    "imagePullSecrets": [{"name": "registry"}],
    "controller": {
        "replicas": 3,
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "podLabels": {"cost": "shared"},
        "podAnnotations": {"note": "kept"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    },
    "serviceAccount": {"annotations": {"cloud/role": "operator"}},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
    "dashboards": {"enabled": True},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}, "alertLabels": {"team": "rl"}},
    "scheduling": {"native": True, "kueue": True, "volcano": True, "coscheduling": True, "ignoreQueueLabels": True},
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
}
Objects = dict[tuple[str, str], dict[str, Any]]


def render(values: dict[str, Any] | None = None, *served: str) -> Objects:
    """Return the objects that the chart renders from `values` on a cluster with the APIs `served`, by kind and name.

    Raises ValueError with helm's message.
    """
    command = [str(binary("helm")), "template", RELEASE, str(CHART), f"--namespace={HOME}", "--values=-"]
    command += [f"--api-versions={version}" for version in served]
    done = subprocess.run(command, input=json.dumps(values or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    safe_load_all = [item for item in yaml.safe_load_all(done.stdout) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in safe_load_all}


def notes(*arguments: str) -> str:
    """Return helm's notes after an installation with these arguments."""
    command = [str(binary("helm")), "install", RELEASE, str(CHART), "--dry-run=client", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.partition("NOTES:")[2]


def pod(objects: Objects, name: str = RELEASE) -> dict[str, Any]:
    """Return the spec of the operator's pods."""
    spec: dict[str, Any] = objects["Deployment", name]["spec"]["template"]["spec"]
    return spec


def flat(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of RBAC rules."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def triples(table: dict[tuple[str, str], str]) -> set[tuple[str, str, str]]:
    """Return (group, resource, verb) of a table above."""
    return {(group, resource, verb) for (group, resource), verbs in table.items() for verb in verbs.split()}
