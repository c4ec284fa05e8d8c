"""Objects of other owners, and the job's own that a foreign finalizer keeps."""

from __future__ import annotations

import base64
import copy

import pytest
from tests.support.operator.controlled_cluster import KEY, PODS, ControlledCluster, object_names, writes
from tests.support.operator.fake_api_server import FakeApiServer

from rlhf_common import names
from rlhf_operator import job_objects
from rlhf_operator.reconcile import job_status


async def test_an_object_that_is_not_the_jobs_is_left_as_it_is_and_no_pod_is_made_behind_it(
    server: FakeApiServer,
) -> None:
    strange = server.put(
        "Service",
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"namespace": "team", "name": "job", "labels": {names.LABEL_JOB_NAME: "job"}},
            "spec": {"ports": [{"port": 80}]},
        },
    )
    before = copy.deepcopy(strange)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        assert server.get("Service", "team", "job") == before
        assert object_names(server)["Pod"] == []
        assert "Service job" in operator.condition("Running")["message"]
        server.drop("Service", "team", "job")
        await operator.settle()
        assert object_names(server)["Pod"] == PODS


async def test_a_pod_with_the_jobs_labels_and_another_owner_is_neither_taken_nor_deleted(server: FakeApiServer) -> None:
    async with ControlledCluster(server) as operator:
        await operator.settle()
    body = copy.deepcopy(server.get("Pod", "team", "job-generation-0"))
    assert body is not None
    body["metadata"] |= {"name": "imposter", "uid": "uid-imposter", "ownerReferences": []}
    server.put("Pod", body)
    async with ControlledCluster(server) as operator:
        await operator.settle()
    assert server.names("Pod") == sorted([*PODS, "imposter"])
    assert not [write for write in server.writes() if write[0] == "DELETE"]


async def test_a_pod_that_a_finalizer_keeps_is_deleted_once_a_minute_at_most(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the API server does not show that the deletion was forced."""
    async with ControlledCluster(server) as operator:
        await operator.settle()
        body = copy.deepcopy(server.get("Pod", "team", "job-generation-0"))
        assert body is not None
        asked = {"deletionTimestamp": "2026-08-22T10:00:00Z", "deletionGracePeriodSeconds": 30}
        body["metadata"] |= asked | {"finalizers": ["example.org/audit"]}

        def deletions() -> int:
            return len([path for method, path in server.writes() if method == "DELETE" and path.endswith("-0")])

        delays = []
        for _ in range(8):
            server.put("Pod", body)
            delays.append(await operator.reconcile())
        assert deletions() == 1
        assert all(delay is not None and delay > 5 for delay in delays[-2:]), "nothing is written, so nothing is to see"
        condition = operator.condition("Running")["message"]
        assert "job-generation-0 cannot be removed: finalizer example.org/audit of another controller" in condition
        monkeypatch.setattr(job_objects, "DELETE_AGAIN_SECONDS", 0.0)
        server.put("Pod", body)
        await operator.reconcile()
        assert deletions() == 2


async def test_a_damaged_authority_is_reported_with_the_remedy(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_status, "PROGRESS_SECONDS", 0.0)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        body = copy.deepcopy(server.get("Secret", "team", "job-authority"))
        assert body is not None
        server.put("Secret", {**body, "data": body["data"] | {"ca.key": base64.b64encode(b"damaged").decode()}})
        server.drop("Secret", "team", "job-certificates")
        operator.controller._certificates.forget(KEY)
        await operator.settle()
        message = operator.condition("Running")["message"]
        assert "Secret job-authority holds no usable authority any more" in message
        assert "kubectl delete secret/job-authority --namespace=team" in message


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "NetworkPolicy", "Secret"])
async def test_an_object_that_a_finalizer_keeps_is_not_written_again_and_again_and_is_named(
    server: FakeApiServer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_status, "PROGRESS_SECONDS", 0.0)
    async with ControlledCluster(server) as operator:
        await operator.settle()
        name = server.names(kind)[-1]
        body = copy.deepcopy(server.get(kind, "team", name))
        assert body is not None
        asked = {"deletionTimestamp": "2026-08-22T10:00:00Z", "finalizers": ["example.org/audit"]}
        server.put(kind, {**body, "metadata": body["metadata"] | asked})
        operator.controller._certificates.forget(KEY)
        await operator.settle()
        before = writes(server)
        for _ in range(4):
            requeue_after = await operator.reconcile()
            assert requeue_after is None or requeue_after > 5
        assert [write for write in writes(server)[len(before) :] if write[0] != "POST"] == []
        message = operator.condition("Running")["message"]
        assert f"{kind} {name}" in message
        assert "cannot be removed: finalizer example.org/audit of another controller keeps" in message
        server.drop("Pod", "team", "job-generation-0")
        await operator.settle()
        assert object_names(server)["Pod"] == (
            PODS if kind != "Secret" else [pod for pod in PODS if "generation" not in pod]
        )
        server.drop(kind, "team", name)
        operator.controller._certificates.forget(KEY)
        for _ in range(3):
            await operator.settle()
        assert name in object_names(server)[kind]
        assert object_names(server)["Pod"] == PODS
