"""etcd returns to an earlier state under a running operator, as after restoring a backup; jobs return to that state.

Rule: the cluster is the test's own. Versions go back by a thousand or more, far below those that the operator has seen.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.kwok import TAINT
from tests.cluster.operating.job_fixture import ALL, ROOT, TIMEOUT, Seen, manifest
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.full


NAMESPACE = "team"
PATIENCE = 900.0
"""Seconds for any one fact; the operator compares within 15 after its watches broke off, and every 300."""
CHURN = 1000
"""Versions between the backup and the restore; the operator's own writes after it are far fewer."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(level="control-plane") as running:
        running.define(ROOT / "crds" / "rlhfjobs.yaml")
        for name in running.add_kwok_nodes(1, gpus=8):
            running.kubectl("taint", "node", name, f"{TAINT['key']}-")
        running.add_namespace(NAMESPACE)
        yield running


def copied(cluster: Cluster, data: Path, backup: Path) -> None:
    """Copy etcd's folder; etcd is down for a moment."""
    cluster.component("etcd").stop("etcd")
    shutil.copytree(data, backup)
    cluster.component("etcd").restart("etcd")
    cluster.wait_ready()


def restored(cluster: Cluster, data: Path, backup: Path) -> None:
    """Restart all components that remember versions, on the backup."""
    for name in ("kwok", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
        cluster.component(name).stop(name)
    shutil.rmtree(data)
    shutil.move(backup, data)
    for name in ("etcd", "kube-apiserver"):
        cluster.component(name).restart(name)

    def ready() -> bool:
        try:
            return cluster.kubectl("get", "--raw=/readyz") == "ok"
        except ClusterError:
            return False

    wait_until("the API server", ready, TIMEOUT)
    for name in ("kube-controller-manager", "kube-scheduler", "kwok"):
        cluster.component(name).restart(name)


def test_jobs_become_what_they_were_and_go_on_from_there(cluster: Cluster) -> None:
    data, backup = cluster.folder / "etcd", cluster.folder / "backup"
    # An operator with a Lease may lose it meanwhile and restart for that reason; this one must detect the restore.
    with OperatorProcess(cluster, "--no-leader-election") as operator:
        seen = Seen(cluster, operator, NAMESPACE)
        cluster.apply([manifest(NAMESPACE), manifest(NAMESPACE, "deleted-later")])
        seen.until_pods(*ALL)
        seen.until("the other", lambda: len(seen.pods("deleted-later")) == len(ALL))
        before = seen.uids()
        copied(cluster, data, backup)
        cluster.kubectl("scale", "rlhfjob/job", "--replicas=4", seen.where)
        seen.until_pods(*ALL, "generation-2", "generation-3")
        cluster.kubectl("delete", "pod/job-generation-1", seen.where)
        seen.until("another pod", lambda: seen.uids().get("generation-1", "") not in ("", before["generation-1"]))
        cluster.kubectl("delete", "rlhfjob", "deleted-later", seen.where)
        cluster.apply(manifest(NAMESPACE, "made-later"))
        seen.until("the new job", lambda: len(seen.pods("made-later")) == len(ALL))
        meta = {"generateName": "churn-", "namespace": NAMESPACE}
        many = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}] * CHURN
        cluster.kubectl("create", "--filename=-", stdin=yaml.safe_dump_all(many), timeout=600)

        restored(cluster, data, backup)
        wait_until("the operator to find out", lambda: not operator.runs(), PATIENCE)
        assert "etcd was restored, and the operator restarts" in operator.log.read_text()
        operator.start()  # as a Deployment does
        seen.until("the pods of before", lambda: seen.running() == sorted(ALL))
        assert seen.uids() == before
        seen.until("the deleted job to be back", lambda: len(seen.pods("deleted-later")) == len(ALL))
        cluster.kubectl("scale", "rlhfjob/job", "--replicas=3", seen.where)
        seen.until_pods(*ALL, "generation-2")
        cluster.kubectl("delete", "pod/deleted-later-inference-0", seen.where)
        seen.until("it comes back", lambda: "inference-0" in seen.pods("deleted-later"))
        assert before.items() <= seen.uids().items(), "by now the operator would have ended what it takes for another's"
        planned = {"namespace": NAMESPACE, "condition": "Planned", "status": "True"}
        seen.until(
            "two jobs to be counted: that of after the backup is not there any more",
            lambda: operator.metric("rlhf_job_condition", **planned) == 2,
        )
        seen.until("the operator to be healthy", operator.healthy)
