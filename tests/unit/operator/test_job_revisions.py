"""Which requests the knowledge of what jobs run by costs, and what is known when there is nothing to be read."""

import asyncio
from typing import Any

from tests.support.simulated_cluster import SimulatedCluster
from tests.unit.operator.test_upgrade import CONFIG, IMAGES

from rlhf_api.names import Group
from rlhf_operator.job_revisions import NOTHING, JobRevisions
from rlhf_operator.reconcile import ObservedPod, pod_of

Json = dict[str, Any]


class Store:
    """Answers from a world, and counts."""

    def __init__(self, world: SimulatedCluster) -> None:
        self.world, self.asked = world, list[str]()

    async def get(self, kind: str, namespace: str, name: str) -> Json | None:
        self.asked.append(f"{kind} {name}")
        return self.world.pods.get(name) if kind == "Pod" else self.world.bodies.get((kind, name))


def known(revisions: JobRevisions, world: SimulatedCluster) -> Any:
    pods = {name: pod for name, body in world.pods.items() if isinstance(pod := pod_of(body), ObservedPod)}
    status = world.job.get("status") or {}
    return asyncio.run(revisions.current("team/job", "job-uid", world.applied, status, pods))


def test_a_config_map_is_read_when_it_is_news_and_a_job_that_has_none_costs_nothing() -> None:
    world = SimulatedCluster()
    store = Store(world)
    revisions = JobRevisions(store)  # type: ignore[arg-type]
    assert known(revisions, world) == NOTHING
    assert store.asked == []
    world.images = IMAGES
    world.begin()
    first = known(revisions, world)
    assert first.data == world.bodies[CONFIG]["data"]
    assert known(revisions, world) is known(revisions, world) is first
    assert store.asked == ["ConfigMap job-job"]
    world.job["spec"]["generation"] = {"replicas": 3}
    world.settle()
    assert known(revisions, world).data == world.bodies[CONFIG]["data"] != first.data
    assert store.asked == ["ConfigMap job-job"] * 2
    del world.applied[CONFIG], world.bodies[CONFIG]
    assert known(revisions, world).data, "deleted, and this process still knows it"
    assert len(store.asked) == 2


def test_of_a_job_without_a_revision_one_pod_of_each_group_is_read() -> None:
    world = SimulatedCluster()
    world.images = IMAGES
    world.begin()
    del world.job["status"]["revision"]
    store = Store(world)
    found = known(JobRevisions(store), world)  # type: ignore[arg-type]
    pods = ["Pod job-coordinator", "Pod job-generation-0", "Pod job-inference-0", "Pod job-training-0"]
    assert store.asked == ["ConfigMap job-job", *pods]
    assert found.running[Group.COORDINATOR].image == IMAGES.coordinator
