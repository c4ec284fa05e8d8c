"""An operator upgrade replaces no pod of a running job, and later edits change only their fields."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.operator.next_operator_version import FIELD, forget, next_version
from tests.support.operator.queued_cluster import WORKLOAD_KEY, QueuedCluster
from tests.support.operator.simulated_cluster import CONFIG_MAP, IMAGES, SimulatedCluster
from tests.support.operator.upgraded_job import container, document, edit, settle, started, uids

from rlhf_api import manifest
from rlhf_api.problems import ManifestError, Problem
from rlhf_api.structural_schema import job_schema, with_defaults
from rlhf_operator.manifests import Images
from rlhf_operator.reconcile.revisions.revision import digest, digests, trusted

Json = dict[str, Any]

OURS = "registry.example.com/ours:7"
"""Image in the template of generation."""


@pytest.fixture
def upgraded() -> Iterator[QueuedCluster]:
    """Return a job started by this version, managed by the next one."""
    cluster = started()
    with next_version() as images:
        cluster.images = images
        cluster.job = with_defaults(cluster.job, job_schema())
        assert cluster.job["spec"]["rollout"][FIELD] == "Auto"
        yield cluster


def test_no_pod_is_replaced_and_no_process_meets_another_job(upgraded: QueuedCluster) -> None:
    before, text, workload = (
        uids(upgraded),
        upgraded.bodies[CONFIG_MAP]["data"]["job.json"],
        upgraded.bodies[WORKLOAD_KEY],
    )
    settle(upgraded, 2)
    assert uids(upgraded) == before
    assert upgraded.bodies[CONFIG_MAP]["data"]["job.json"] == text
    assert upgraded.bodies[WORKLOAD_KEY] == workload, "nothing is asked of the queue anew"
    assert upgraded.condition("Admitted")["status"] == "True"
    assert upgraded.condition("Restarting")["status"] == "False"
    assert upgraded.job["status"]["revision"]["coordinatorImage"] == IMAGES.coordinator
    assert upgraded.job["status"]["revision"]["workerImage"] == IMAGES.worker
    assert upgraded.settle().idle


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("worker", ["coordinator", "generation-1", "inference-0"])
def test_a_pod_that_is_lost_comes_back_as_it_was(upgraded: QueuedCluster, worker: str) -> None:
    settle(upgraded, 1)
    before, others = container(upgraded, worker), uids(upgraded)
    SimulatedCluster.evict(upgraded, worker)
    settle(upgraded, 3)
    after = container(upgraded, worker)
    name = upgraded.name(worker)
    assert uids(upgraded)[name] != others.pop(name)
    assert {each: uid for each, uid in uids(upgraded).items() if each != name} == others
    for part in ("image", "command", "resources", "livenessProbe", "readinessProbe", "startupProbe"):
        assert after.get(part) == before.get(part), part
    assert "next" not in after["image"]


def test_a_roll_that_is_under_way_goes_on_with_what_the_image_understands() -> None:
    cluster = started()
    generation = cluster.pods["job-generation-0"]["metadata"]["annotations"]
    generation["rlhf.dev/template"] = "of-a-template-before"
    was, command = uids(cluster), container(cluster, "generation-1")["command"]
    with next_version() as images:
        cluster.images = images
        cluster.job = with_defaults(cluster.job, job_schema())
        settle(cluster, 6)
        assert {name for name, uid in uids(cluster).items() if was[name] != uid} == {"job-generation-0"}
        assert container(cluster, "generation-0")["command"] == command


def test_containers_that_restart_are_left_alone(upgraded: QueuedCluster) -> None:
    before = uids(upgraded)
    upgraded.end("coordinator", 137, reason="OOMKilled")
    upgraded.end("generation-0", 1)
    settle(upgraded, 2)
    assert uids(upgraded) == before


def test_a_live_field_changes_the_coordinator_and_nothing_else(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    before, was = document(upgraded), uids(upgraded)
    edit(upgraded, iterations=77)
    settle(upgraded)
    after = copy.deepcopy(before)
    after["spec"]["iterations"] = 77
    assert document(upgraded) == after
    changed = {name for name, uid in uids(upgraded).items() if was[name] != uid}
    assert changed == {"job-coordinator"}
    assert container(upgraded, "coordinator")["image"] == IMAGES.coordinator


def test_replicas_change_the_size_and_nothing_else(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    before, was = document(upgraded), uids(upgraded)
    edit(upgraded, generation=upgraded.job["spec"]["generation"] | {"replicas": 1})
    settle(upgraded)
    assert {name: uid for name, uid in was.items() if name != "job-generation-1"} == uids(upgraded)
    before["spec"]["generation"]["replicas"] = 1
    assert document(upgraded) == before


def test_a_template_changes_its_group_in_what_it_says(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    was, before = uids(upgraded), container(upgraded, "generation-0")
    generation = copy.deepcopy(upgraded.job["spec"]["generation"])
    generation["template"]["spec"]["containers"][0]["env"].append({"name": "MORE", "value": "2"})
    edit(upgraded, generation=generation)
    settle(upgraded, 8)
    changed = {name for name, uid in uids(upgraded).items() if was[name] != uid}
    assert changed == {"job-generation-0", "job-generation-1"}
    after = container(upgraded, "generation-0")
    assert {"name": "MORE", "value": "2"} in after["env"]
    assert (after["image"], after["command"], after["resources"]) == (OURS, before["command"], before["resources"])


def test_a_new_field_waits_for_the_next_start_and_the_user_is_told(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    before, was = document(upgraded), uids(upgraded)
    edit(upgraded, rollout=upgraded.job["spec"]["rollout"] | {FIELD: "Fast"})
    settle(upgraded, 2)
    assert (document(upgraded), uids(upgraded)) == (before, was)
    reported = upgraded.condition("Planned")
    assert reported["status"] == "True"
    assert reported["message"].startswith(f"spec.rollout.{FIELD}: unknown to the version that runs the job")


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("visited", [True, False])
def test_a_rule_of_the_new_version_does_not_stop_a_job_that_runs(
    upgraded: QueuedCluster, monkeypatch: pytest.MonkeyPatch, *, visited: bool
) -> None:
    """`visited` tells whether the rule comes with a version after the next one, or with the next one."""
    if visited:
        settle(upgraded, 1)
    was = uids(upgraded)
    SimulatedCluster.evict(upgraded, "generation-0")
    take = manifest.parse_stored

    def stricter(data: Json) -> Any:
        problems = [Problem("spec.seed", 7, "must be even in this version")]
        if data["spec"]["iterations"] > 1000:
            problems.append(Problem("spec.iterations", 1001, "must be at most 1000"))
        take(data)
        raise ManifestError(problems)

    monkeypatch.setattr(manifest, "parse_stored", stricter)
    forget()
    settle(upgraded, 2)
    assert {name for name, uid in uids(upgraded).items() if was[name] != uid} == {"job-generation-0"}
    planned = upgraded.condition("Planned")
    assert (planned["status"], "must be even in this version" in planned["message"]) == ("True", True)
    edit(upgraded, iterations=1001)
    settle(upgraded, 2)
    assert "must be at most 1000" in upgraded.condition("Planned")["message"]
    assert upgraded.condition("Planned")["status"] == "False", "an edit must not break a rule"
    edit(upgraded, iterations=90)
    settle(upgraded)
    assert upgraded.condition("Planned")["status"] == "True"
    assert document(upgraded)["spec"]["iterations"] == 90, "and need not put right what it does not touch"
    assert upgraded.pods.keys() == was.keys()


def test_a_group_whose_template_is_refused_now_gets_no_pods_and_harms_no_other() -> None:
    """Inference had no pod, and a template that the previous version accepted. An edit of it is rejected."""
    cluster = SimulatedCluster(inference={"replicas": 0})
    cluster.images = IMAGES
    cluster.begin()
    template: Json = {"spec": {"hostNetwork": True}}
    data = cluster.bodies[CONFIG_MAP]["data"]
    cluster.job["spec"]["inference"]["template"] = template
    revision = json.loads(data["revision.json"])
    revision["job"]["spec"]["inference"]["template"] = template
    data["revision.json"] = json.dumps(revision)
    cluster.job["status"]["revision"]["digest"] = digest(data)
    was = uids(cluster)
    SimulatedCluster.evict(cluster, "generation-0")
    settle(cluster, 2)
    assert cluster.condition("Planned")["status"] == "True"
    assert cluster.pods.keys() == was.keys()
    template = template | {"metadata": {"labels": {"team": "rl"}}}
    edit(cluster, inference=cluster.job["spec"]["inference"] | {"replicas": 1, "template": template})
    settle(cluster, 2)
    assert "hostNetwork" in cluster.condition("Planned")["message"]
    assert cluster.condition("Planned")["status"] == "False"
    assert cluster.pods.keys() == was.keys()


def test_a_definition_that_is_newer_than_the_operator_harms_no_job_that_runs() -> None:
    cluster = started()
    before, was = document(cluster), uids(cluster)
    cluster.job["spec"]["rollout"]["later"] = {"mode": "Auto"}
    cluster.pods["job-generation-0"]["status"] |= {"phase": "Failed", "reason": "Evicted"}
    settle(cluster, 2)
    assert cluster.pods.keys() == was.keys()
    assert uids(cluster)["job-generation-0"] != was["job-generation-0"]
    planned = cluster.condition("Planned")
    assert planned["status"] == "True"
    assert "a new start would be refused: spec.rollout.later" in planned["message"]
    edit(cluster, iterations=90)
    settle(cluster)
    before["spec"]["iterations"] = 90
    assert document(cluster) == before
    new = SimulatedCluster()
    new.job["spec"]["rollout"]["later"] = {"mode": "Auto"}
    new.settle()
    assert new.pods == {}
    assert "spec.rollout.later" in new.condition("Planned")["message"]


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("how", ["deleted", "corrupt", "not JSON", "another pod", "no status", "half a status"])
def test_a_revision_that_is_lost_is_made_anew_and_replaces_no_pod(how: str) -> None:
    """The installation has other images now."""
    cluster = started()
    cluster.images = Images("example.org/operator:later", "example.org/worker:later")
    was, data = uids(cluster), cluster.bodies[CONFIG_MAP]["data"]
    if how == "deleted":
        del cluster.bodies[CONFIG_MAP], cluster.applied[CONFIG_MAP]
    elif how == "corrupt":
        data["revision.json"] = data["revision.json"][:500]
    elif how == "not JSON":
        data["job.json"] = "[" * 5000
    elif how == "another pod":
        evil = json.loads(data["revision.json"])
        evil["pods"]["generation"]["spec"]["hostNetwork"] = True
        data["revision.json"] = json.dumps(evil)
    elif how == "no status":
        del cluster.job["status"]["revision"]
    else:
        cluster.job["status"]["revision"] = {"workerImage": IMAGES.worker}
    settle(cluster, 2)
    assert uids(cluster) == was
    for worker in ("generation-0", "inference-0"):
        SimulatedCluster.evict(cluster, worker)
    settle(cluster, 2)
    assert "hostNetwork" not in cluster.pods["job-generation-0"]["spec"]
    assert container(cluster, "generation-0")["image"] == OURS
    images = cluster.images if how in ("no status", "half a status") else IMAGES
    assert container(cluster, "inference-0")["image"] == images.worker
    changed = {name for name, uid in uids(cluster).items() if was[name] != uid}
    assert changed == {"job-generation-0", "job-inference-0"}
    assert cluster.settle().idle


def test_an_operator_that_dies_between_status_and_config_map_loses_nothing(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    before, revision = document(upgraded), json.loads(upgraded.bodies[CONFIG_MAP]["data"]["revision.json"])
    edit(upgraded, iterations=77)
    upgraded.carry_out(upgraded.plan(), only_status=True)
    settle(upgraded)
    before["spec"]["iterations"] = 77
    assert document(upgraded) == before
    after = json.loads(upgraded.bodies[CONFIG_MAP]["data"]["revision.json"])
    assert after["pods"]["generation"] == revision["pods"]["generation"]
    assert "previousDigest" not in upgraded.job["status"]["revision"]


def test_a_start_that_is_under_way_goes_on_as_it_began() -> None:
    cluster = SimulatedCluster()
    cluster.images = IMAGES
    cluster.carry_out(cluster.plan())
    cluster.carry_out(cluster.plan())
    assert cluster.pods, "some are there"
    del cluster.pods["job-generation-1"]
    with next_version() as images:
        cluster.images = images
        cluster.job = with_defaults(cluster.job, job_schema())
        cluster.settle()
        assert container(cluster, "generation-1")["image"] == IMAGES.worker
        assert FIELD not in document(cluster)["spec"]["rollout"]


def test_a_job_that_has_not_started_starts_by_the_new_version() -> None:
    cluster = QueuedCluster()
    cluster.settle()
    with next_version() as images:
        cluster.images = images
        cluster.job = with_defaults(cluster.job, job_schema())
        cluster.settle()
        cluster.admit()
        cluster.begin()
        assert container(cluster, "generation-1")["image"] == images.worker
        pod_sets = cluster.bodies[WORKLOAD_KEY]["spec"]["podSets"]
        asked = [pod_set["template"]["spec"]["containers"][0]["resources"]["requests"] for pod_set in pod_sets]
        assert {item["memory"] for item in asked} == {"2Gi"}


def test_suspending_and_resuming_takes_the_new_version(upgraded: QueuedCluster) -> None:
    settle(upgraded, 1)
    edit(upgraded, suspend=True)
    upgraded.end_all()
    assert "revision" not in upgraded.job["status"]
    edit(upgraded, suspend=False)
    upgraded.settle()
    upgraded.admit()
    upgraded.begin()
    assert container(upgraded, "coordinator")["image"] == upgraded.images.coordinator
    assert container(upgraded, "coordinator")["command"] == ["next"]
    assert document(upgraded)["spec"]["rollout"][FIELD] == "Auto"
    assert upgraded.job["status"]["revision"]["workerImage"] == upgraded.images.worker


OWNERS = ("runAsUser", "runAsGroup", "fsGroup")


def owners(cluster: SimulatedCluster) -> set[Any]:
    """Return the users and groups of all pods."""
    return {body["spec"]["securityContext"].get(name) for body in cluster.pods.values() for name in OWNERS}


@pytest.mark.parametrize("lost", [False, True])
def test_a_job_whose_user_the_cluster_chooses_goes_on_so(lost: bool) -> None:
    """It holds after a restart of its pods by an edit, and after its revision was recreated."""
    cluster = QueuedCluster()
    cluster.images = Images("example.org/operator:1", "example.org/worker:1", None)
    cluster.settle()
    cluster.admit()
    cluster.begin()
    assert owners(cluster) == {None}
    revision = trusted(cluster.stored_revision(), digests(cluster.job["status"]))
    assert revision is not None
    assert revision.images == cluster.images
    if lost:
        del cluster.job["status"]["revision"]
    template = {"spec": {"containers": [{"name": "worker", "env": [{"name": "COLOUR", "value": "red"}]}]}}
    edit(cluster, generation=cluster.job["spec"]["generation"] | {"template": template})
    settle(cluster)
    assert {"name": "COLOUR", "value": "red"} in container(cluster, "generation-0")["env"]
    assert owners(cluster) == {None}
