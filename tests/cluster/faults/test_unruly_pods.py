"""Pods that do not end or start, concurrent writers, an unavailable webhook, and an old or missing definition.

The API server is real, but nothing schedules or runs pods here: a test binds them and reports their status itself, and
the deletion of a bound pod lasts until the test ends it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.fixture import own_cluster
from tests.cluster.operating.job_fixture import ALL, ROOT, Seen, manifest
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until

from rlhf_common import names
from rlhf_operator.api_client.client import connect
from rlhf_operator.api_client.resources import CORE_RESOURCES
from rlhf_operator.api_client.transport import ApiRequest

pytestmark = pytest.mark.full

DEFINITION = ROOT / "crds" / "rlhfjobs.yaml"
HOLD = "example.org/audit"
SIDECAR = {"name": "mesh", "image": "mesh"}


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield etcd and the API server, with the definition."""
    with own_cluster(request, level="api") as cluster:
        cluster.define(DEFINITION)
        yield cluster


def job(namespace: str, name: str = "job", **spec: Any) -> dict[str, Any]:
    """Return a job with another container beside each generation worker."""
    generation = {"replicas": 2, "template": {"spec": {"containers": [SIDECAR]}}}
    return manifest(namespace, name, generation=generation, **spec)


def until_made(seen: Seen, *expected: str) -> None:
    """Wait until the job has exactly these pods."""
    seen.until(f"pods {expected}", lambda: sorted(seen.pods()) == sorted(expected))


def bind(seen: Seen, worker: str) -> None:
    """Give a pod a node, as the scheduler does."""
    meta = {"name": f"job-{worker}", "namespace": seen.where.partition("=")[2]}
    target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding"
    seen.cluster.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body))


def report(seen: Seen, worker: str, code: int | None = None) -> None:
    """Report a pod's status like the kubelet: it runs, or its worker has ended and the other container runs."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ended = {"terminated": {"exitCode": code, "reason": "Completed", "startedAt": now, "finishedAt": now}}
    running = {"running": {"startedAt": now}}
    common = {"image": "x", "imageID": "", "ready": code is None, "restartCount": 0}
    statuses = [
        {"name": "worker", "state": running if code is None else ended, **common},
        {"name": "mesh", "state": running, **common, "ready": True},
    ]
    ready = {"type": "Ready", "status": str(code is None)}
    seen.report(worker, {"phase": "Running", "conditions": [ready], "containerStatuses": statuses})


def grace(seen: Seen, worker: str) -> int | None:
    """Return the grace period in seconds of a deleted pod."""
    seconds: int | None = seen.pods().get(worker, {}).get("metadata", {}).get("deletionGracePeriodSeconds")
    return seconds


def end(seen: Seen, *workers: str) -> None:
    """Report like the kubelet that pods have ended."""
    for worker in workers:
        seen.cluster.kubectl(
            "delete", "pod", f"job-{worker}", seen.where, "--grace-period=0", "--force", "--wait=false"
        )


def test_sidecars_that_outlive_their_workers_delay_neither_a_suspension_nor_what_follows(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(job(namespace))
    until_made(seen, *ALL)
    for worker in ALL:
        bind(seen, worker)
        report(seen, worker)
    before = seen.uids()
    seen.patch(suspend=True)
    seen.until("the coordinator's deletion", lambda: grace(seen, "coordinator") == 300)
    report(seen, "coordinator", 130)
    seen.until("a short grace", lambda: grace(seen, "coordinator") == 10)
    seen.until("the other deletions", lambda: all(grace(seen, worker) is not None for worker in ALL))
    for worker in ALL[1:]:
        report(seen, worker, 0)
    seen.until("Suspended", lambda: seen.condition("Suspended")["status"] == "True")
    seen.until("short graces", lambda: all(grace(seen, worker) == 10 for worker in ALL))
    seen.patch(suspend=False)
    end(seen, *ALL)
    seen.until(
        "others in their place", lambda: len(seen.uids()) == len(ALL) and not before.items() & seen.uids().items()
    )
    bind(seen, "generation-1")
    report(seen, "generation-1", 0)
    seen.until("the end of a pod whose worker has ended", lambda: grace(seen, "generation-1") == 10)
    assert seen.restarts() == (0, 0)


def deletions(operator: OperatorProcess) -> float:
    return operator.metric("rlhf_operator_api_requests_total", verb="delete", resource="pods")


def test_what_a_finalizer_of_somebody_else_keeps_is_deleted_once_and_named(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    cluster.apply(job(namespace))
    until_made(seen, *ALL)
    for kind, name in (("pod", "job-generation-1"), ("service", "job")):
        patch = f'{{"metadata": {{"finalizers": ["{HOLD}"]}}}}'
        cluster.kubectl("patch", kind, name, seen.where, "--type=merge", f"--patch={patch}")
        cluster.kubectl("delete", kind, name, seen.where, "--wait=false")
    words = f"cannot be removed: finalizer {HOLD} of another controller keeps"
    seen.until("its name", lambda: f"job-generation-1, Service job {words}" in seen.condition("Running")["message"])
    before, writes = deletions(operator), operator.metric("rlhf_operator_api_requests_total", verb="apply")
    time.sleep(20)
    assert deletions(operator) - before <= 1
    assert operator.metric("rlhf_operator_api_requests_total", verb="apply") - writes <= 4, "a status now and then"
    uids, former = seen.uids(), cluster.get("service", "job", seen.where)["metadata"]["uid"]
    for kind, name in (("pod", "job-generation-1"), ("service", "job")):
        cluster.kubectl("patch", kind, name, seen.where, "--type=merge", '--patch={"metadata": {"finalizers": null}}')
    seen.until("another pod", lambda: seen.uids().get("generation-1", "") not in ("", uids["generation-1"]))
    service = ("get", "service", "job", seen.where, "--ignore-not-found", "--output=jsonpath={.metadata.uid}")
    seen.until("another Service", lambda: cluster.kubectl(*service) not in ("", former))
    seen.until("no such words", lambda: words not in seen.condition("Running")["message"])


def test_a_scheduling_gate_is_named_with_who_removes_it(cluster: Cluster, seen: Seen, namespace: str) -> None:
    gated = {"spec": {"schedulingGates": [{"name": "quota.example.org/approved"}]}}
    cluster.apply(manifest(namespace, generation={"replicas": 2, "template": gated}))
    words = (
        "scheduling gate quota.example.org/approved keeps job-generation-0, job-generation-1 from being scheduled: "
        "the controller of quota.example.org removes it"
    )
    seen.until(words, lambda: words in seen.condition("Running")["message"])


def test_a_pod_webhook_that_is_down_is_told_until_it_is_gone(cluster: Cluster, seen: Seen, namespace: str) -> None:
    webhook = {
        "name": "inject.mesh.example.org",
        "clientConfig": {"service": {"name": "injector", "namespace": "mesh", "path": "/inject"}},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    kind = "MutatingWebhookConfiguration"
    meta = {"name": "mesh", "labels": {}}
    cluster.apply(
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": meta, "webhooks": [webhook]}
    )
    cluster.apply(job(namespace))
    words = ('failed calling webhook "inject.mesh.example.org"', "see that the Service of that webhook has a pod")
    seen.until(f"{words}", lambda: all(part in seen.condition("Running")["message"] for part in words))
    cluster.kubectl("delete", kind, "mesh")
    until_made(seen, *ALL)
    seen.until("no such words", lambda: words[0] not in seen.condition("Running")["message"])


@contextmanager
def labelling(cluster: Cluster, namespace: str) -> Iterator[list[float]]:
    """Write a label of the job again and again; yield the times of the writes."""
    times: list[float] = []
    stop = threading.Event()

    async def label() -> None:
        client = await connect(cluster.kubeconfig)
        request = ApiRequest("patch", CORE_RESOURCES[names.KIND], namespace, "job")
        headers = {"Content-Type": "application/json-patch+json", "Accept": "application/json"}
        while not stop.is_set():
            labels = {"labelled": str(len(times))}
            change = [{"op": "add", "path": "/metadata/labels", "value": labels}]
            await client.transport.request(request, body=change, headers=headers)
            times.append(time.monotonic())
            await asyncio.sleep(0.01)
        await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(label()))
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def test_a_scale_is_done_in_seconds_while_somebody_else_labels_the_job_many_times_per_second(
    cluster: Cluster, seen: Seen, namespace: str
) -> None:
    cluster.apply(job(namespace))
    until_made(seen, *ALL)
    with labelling(cluster, namespace) as times:
        wait_until("many labels", lambda: len(times) > 50, 60)
        began, first = time.monotonic(), len(times)
        cluster.kubectl("scale", "rlhfjob/job", "--replicas=4", seen.where)
        until_made(seen, *ALL, "generation-2", "generation-3")
        took = time.monotonic() - began
        writes = len(times) - first
        seen.until("the status of the scale", lambda: seen.job()["status"]["groups"][1]["desired"] == 4)
    assert writes >= 5, "nobody was in the way"
    assert took < 20, f"{took:.0f} s beside {writes} labels"


def test_a_definition_that_is_older_than_the_operator_is_told_by_an_event(
    cluster: Cluster, seen: Seen, namespace: str, tmp_path: Path
) -> None:
    body = yaml.safe_load(DEFINITION.read_text())
    for version in body["spec"]["versions"]:
        del version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["algorithm"]
        version["additionalPrinterColumns"] = []
    older = tmp_path / "older.yaml"
    older.write_text(yaml.safe_dump(body))
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={older}")
    try:
        cluster.apply(job(namespace))
        seen.until_event("DefinitionTooOld")
        [event, *_] = [
            event for event in cluster.get("events", seen.where)["items"] if event["reason"] == "DefinitionTooOld"
        ]
        assert "kubectl apply --server-side -f crds/rlhfjobs.yaml" in event["message"]
    finally:
        cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={DEFINITION}")
    until_made(seen, *ALL)


def test_the_operator_waits_for_a_definition_that_is_deleted_and_goes_on_when_it_is_back(
    cluster: Cluster, seen: Seen, namespace: str, operator: OperatorProcess
) -> None:
    cluster.apply(job(namespace))
    until_made(seen, *ALL)
    pid = operator.pid
    said = operator.log.stat().st_size
    cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.GROUP}")
    missing = "rlhfjobs.rlhf.dev is not installed: the operator waits for it"
    wait_until("/readyz to say so", lambda: operator.ready().startswith(missing), 120, check=operator.check)
    time.sleep(25)
    assert operator.pid == pid, "kopf ended the process 20 s later"
    assert operator.healthy()
    log = operator.log.read_bytes()[said:].decode()
    assert "Traceback" not in log
    assert log.count(missing) == 1
    cluster.define(DEFINITION)
    cluster.apply(job(namespace, name="other"))
    seen.until("the pods of a new job", lambda: len(seen.pods("other")) == len(ALL))
    assert operator.ready() == "ok"
    assert operator.pid == pid
    cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.GROUP}")
    operator.stop()
    operator.launch()
    wait_until("/readyz to say so", lambda: operator.ready().startswith(missing), 120, check=operator.check)
    cluster.define(DEFINITION)
    wait_until("it to lead", operator.leads, 120, check=operator.check)
