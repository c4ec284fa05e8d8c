"""Jobs that run when their operator is upgraded: as the version before left one, and as this version starts one."""

import itertools
import json
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tests.support.queued_cluster import WORKLOAD_KEY, QueuedCluster
from tests.support.simulated_cluster import CONFIG_MAP, IMAGES, SimulatedCluster

from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_operator.gang.kueue_workload import PodPlacement
from rlhf_operator.reconcile.last_applied import FINGERPRINT

Json = dict[str, Any]

PREVIOUS = Path(__file__).parents[1] / "unit/operator/reconcile/previous/objects.yaml"


@cache
def _written() -> bytes:
    """What the version before left, read once: every job gets a copy."""
    return pickle.dumps(yaml.safe_load(PREVIOUS.read_text()))


def previous_objects() -> Json:
    """Return the objects of the version before, to be changed at will."""
    result: Json = pickle.loads(_written())
    return result


class Previous(QueuedCluster):
    """A job that trains, as the operator before revisions left it; see previous/make.py."""

    def __init__(self) -> None:
        super().__init__()
        result = previous_objects()
        self.job, self.pods = result["job"], result["pods"]
        places = {place: place.rpartition("/") for place in result["objects"]}
        self.bodies = {(kind, name): result["objects"][place] for place, (kind, _, name) in places.items()}
        self.applied = {place: body["metadata"]["annotations"][FINGERPRINT] for place, body in self.bodies.items()}
        self.statuses[WORKLOAD_KEY[1]] = result["workload"]["status"]
        self.flavors = {"h200": PodPlacement({"gpu": "h200"})}
        self.certificates = True
        self.version, self._numbers = 1000, itertools.count(1000)
        self.later(30)
        self.read()
        self.see()


def started() -> QueuedCluster:
    """A job that this version has started, in a queue, with the template of the fixture."""
    cluster = QueuedCluster()
    cluster.job["spec"] = previous_objects()["job"]["spec"]
    cluster.job = with_defaults(cluster.job, job_schema())
    cluster.images = IMAGES
    cluster.settle()
    cluster.admit()
    cluster.begin()
    return cluster


def uids(cluster: SimulatedCluster) -> dict[str, str]:
    return {name: body["metadata"]["uid"] for name, body in cluster.pods.items()}


def container(cluster: SimulatedCluster, worker: str) -> Json:
    [own] = [item for item in cluster.pods[cluster.name(worker)]["spec"]["containers"] if item["name"] == "worker"]
    return dict(own)


def document(cluster: SimulatedCluster) -> Json:
    result: Json = json.loads(cluster.bodies[CONFIG_MAP]["data"]["job.json"])
    return result


def edit(cluster: SimulatedCluster, **spec: Any) -> None:
    cluster.job["spec"] |= spec
    cluster.job["metadata"]["generation"] += 1


def settle(cluster: SimulatedCluster, rounds: int = 6) -> None:
    """Turns and kubelets until nothing changes."""
    for _ in range(rounds):
        cluster.later(11)
        cluster.read()
        cluster.settle()
        if not cluster.finish_deletions():
            cluster.run()
            cluster.later(11)
            cluster.read()
            cluster.settle()
