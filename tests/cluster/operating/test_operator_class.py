"""Two operators in one cluster, each with its class of jobs, against a real API server; pods run on fake nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.operating.job_fixture import ALL, Seen, manifest
from tests.cluster.operator_process import OperatorProcess

pytestmark = pytest.mark.full


def test_each_operator_reconciles_the_jobs_of_its_class_alone(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    def pods(name: str) -> list[str]:
        return sorted(seen.pods(name))

    def jobs(process: OperatorProcess) -> float:
        return process.metric("rlhf_job_condition", namespace=namespace, condition="Planned", status="True")

    with OperatorProcess(cluster, "--operator-class=blue") as blue:
        seen.until("both to lead: they are no rivals", lambda: operator.leads() and blue.leads())
        classes: dict[str, dict[str, Any]] = {"plain": {}, "blue": {"operatorClass": "blue"}}
        classes["green"] = {"operatorClass": "green"}
        cluster.apply([manifest(namespace, name, **spec) for name, spec in classes.items()])
        seen.until("pods of both", lambda: pods("plain") == pods("blue") == sorted(ALL))
        seen.until("each to count its job", lambda: (jobs(operator), jobs(blue)) == (1, 1))
        assert "status" not in seen.job("green"), "no operator of this class runs"
        assert pods("green") == []
        leases = cluster.get("leases", "--namespace=default")["items"]
        assert {"rlhf-operator", "rlhf-operator-blue"} <= {lease["metadata"]["name"] for lease in leases}

        blue.stop()
        cluster.kubectl("delete", "pod/blue-inference-0", "pod/plain-inference-0", seen.where)
        seen.until("the pod of the other class", lambda: pods("plain") == sorted(ALL))
        seen.until("its end", lambda: "inference-0" not in pods("blue"))
        blue.start()
        seen.until("its own operator", lambda: pods("blue") == sorted(ALL))
        seen.until("each to count its job", lambda: (jobs(operator), jobs(blue)) == (1, 1))


def test_the_class_of_a_job_does_not_change(cluster: Cluster, seen: Seen, namespace: str) -> None:
    for name, had, wanted in (("a", None, "blue"), ("b", "blue", None), ("c", "blue", "green")):
        cluster.apply(manifest(namespace, name, suspend=True, **({"operatorClass": had} if had else {})))
        change = json.dumps({"spec": {"operatorClass": wanted}})
        with pytest.raises(ClusterError, match="cannot be changed in an existing job"):
            cluster.kubectl("patch", "rlhfjob", name, seen.where, "--type=merge", f"--patch={change}")
