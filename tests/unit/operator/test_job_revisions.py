"""Requests for the revisions of jobs, and the result without any stored revision."""

import asyncio
from typing import Any

from tests.support.operator.simulated_cluster import CONFIG_MAP, IMAGES, SimulatedCluster

from rlhf_operator.job_revisions import NOTHING, JobRevisions
from rlhf_operator.reconcile import ObservedPod, pod_of

Json = dict[str, Any]


class Store:
    """Answers from a cluster, and counts requests."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster, self.asked = cluster, list[str]()

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        self.asked.append(f"{kind} {name}")
        return self.cluster.bodies.get((kind, name))


def remembered(revisions: JobRevisions, cluster: SimulatedCluster) -> Any:
    pods = {name: pod for name, body in cluster.pods.items() if isinstance(pod := pod_of(body), ObservedPod)}
    status = cluster.job.get("status") or {}
    return asyncio.run(revisions.current("team/job", "job-uid", cluster.applied, status, pods))


def test_a_config_map_is_read_when_it_is_news_and_a_job_that_has_none_costs_nothing() -> None:
    cluster = SimulatedCluster()
    store = Store(cluster)
    revisions = JobRevisions(store)  # type: ignore[arg-type]
    assert remembered(revisions, cluster) == NOTHING
    assert store.asked == []
    cluster.images = IMAGES
    cluster.begin()
    first = remembered(revisions, cluster)
    assert first.data == cluster.bodies[CONFIG_MAP]["data"]
    assert remembered(revisions, cluster) is remembered(revisions, cluster) is first
    assert store.asked == ["ConfigMap job-job"]
    cluster.job["spec"]["generation"] = {"replicas": 3}
    cluster.settle()
    assert remembered(revisions, cluster).data == cluster.bodies[CONFIG_MAP]["data"] != first.data
    assert store.asked == ["ConfigMap job-job"] * 2
    del cluster.applied[CONFIG_MAP], cluster.bodies[CONFIG_MAP]
    assert remembered(revisions, cluster).data, "deleted, and this process still knows it"
    assert len(store.asked) == 2
