"""A changed pod template is rolled out: samples move, training continues from a checkpoint, no failure is counted."""

from typing import Any

import pytest
from tests.support.manifests import definition_rows as rows
from tests.support.operator.simulated_cluster import SimulatedCluster, template_with_image

from rlhf_common.names import Group
from rlhf_operator.manifests.rendering import template_hash
from rlhf_operator.reconcile.revisions.pinning import read

CHECKPOINTS = {"path": "/checkpoints"}


def change(cluster: SimulatedCluster, group: str, **fields: Any) -> None:
    cluster.job["spec"][group] |= fields
    cluster.job["metadata"]["generation"] += 1


def test_generation_gets_a_new_image_one_pod_at_a_time() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(cluster, "generation", template=template_with_image("new:1"))
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-generation-1"]
    restarting = cluster.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "RollingUpdate")
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.image("generation-1") == "new:1"
    assert sorted(cluster.deleting) == [], "the new one is not up"
    assert cluster.condition("Restarting")["message"] == (
        "1 of 2 generation pods have the previous template, and job-generation-1 has to be up before the next"
    )
    cluster.run()
    cluster.later(11)
    cluster.read(working={"generation": 1, "inference": 1, "training": 2})
    cluster.settle()
    assert sorted(cluster.deleting) == [], "it runs, and loads its model"
    cluster.later(11)
    cluster.read()
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-generation-0"]
    cluster.bring_up()
    cluster.settle()
    assert cluster.image("generation-0") == "new:1"
    assert cluster.condition("Restarting")["status"] == "False"
    assert cluster.condition("Resizing")["status"] == "False"
    assert cluster.counts == (0, 0)
    assert cluster.events[-1] != "NotRestarting"


def test_a_roll_goes_on_by_a_reading_that_says_the_same_as_the_one_before() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(cluster, "generation", template=template_with_image("new:1"))
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    cluster.run()
    cluster.later(3)
    cluster.read()
    cluster.settle()
    cluster.later(8)
    cluster.settle()
    assert sorted(cluster.deleting) == [], "the reading may mean the pod before"
    look = cluster.plan().requeue_after
    assert look is not None
    assert look <= 10
    cluster.later(look)
    cluster.read()
    assert [pod.name for pod in cluster.plan().delete] == ["job-generation-0"]


def test_a_broken_image_stops_at_one_pod_and_the_next_template_replaces_it() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(cluster, "generation", template=template_with_image("nosuch:1"))
    cluster.settle()
    cluster.finish_deletions()
    cluster.settle()
    cluster.wait_with("generation-1", "ImagePullBackOff", "no such image")
    for _ in range(5):
        cluster.later(60)
        cluster.read(working={"generation": 1, "inference": 1, "training": 2})
        cluster.settle()
    assert sorted(cluster.deleting) == []
    assert "cannot get the image" in cluster.running_message
    change(cluster, "generation", template=template_with_image("good:1"))
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-generation-1"], "it was never up, so nobody waits for it"


def test_training_rolls_as_a_whole_after_the_coordinator_has_saved_a_checkpoint() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(cluster, "training", template=template_with_image("new:1"))
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-coordinator"], "it saves a checkpoint, with the ranks' help"
    cluster.finish_deletions()
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-training-0", "job-training-1"]
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.image("training-0") == cluster.image("training-1") == "new:1"
    cluster.bring_up()
    cluster.settle()
    assert sorted(cluster.deleting) == []
    assert cluster.condition("Restarting")["status"] == "False"
    assert cluster.counts == (0, 0)


def test_without_checkpoints_the_coordinator_keeps_the_journal() -> None:
    cluster = SimulatedCluster(checkpoints=None).begin()
    change(cluster, "training", template=template_with_image("new:1"))
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-training-0", "job-training-1"]
    cluster.bring_up()
    cluster.settle()
    assert sorted(cluster.deleting) == []
    assert cluster.condition("Restarting")["status"] == "False"


@pytest.mark.parametrize(
    "change",
    [
        {"iterations": 200},
        {"samples": {"mode": "Disabled"}},
        {"samples": {"every": 1}},
        {"inference": {"incremental": "Disabled"}},
        {"training": {"criticOverlap": "Auto"}},
        {"training": {"weightSharing": "Disabled"}},
        {"training": {"profile": "Auto"}},
        {"checkpoints": {"dtype": "Float32"}},
    ],
)
def test_a_setting_that_is_read_at_the_start_restarts_the_coordinator_alone(change: dict[str, Any]) -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    for field, value in change.items():
        before = cluster.job["spec"].get(field)
        cluster.job["spec"][field] = {**before, **value} if isinstance(before, dict) else value
    cluster.settle()
    assert sorted(cluster.deleting) == ["job-coordinator"]
    restarting = cluster.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "RollingUpdate")
    assert restarting["message"].startswith("the coordinator has previous settings or templates")
    cluster.bring_up()
    cluster.settle()
    assert sorted(cluster.deleting) == []
    assert cluster.condition("Restarting")["status"] == "False"
    assert cluster.counts == (0, 0)


def test_a_field_that_may_change_in_a_live_job_replaces_pods_or_needs_no_new_pod() -> None:
    before, same = hashes_of(rows.whole("")), set()
    for field, value in rows.others():
        if hashes_of(rows.with_value(field, value)[0]) == before:
            same.add(field.path.partition("[")[0])
    assert same == {
        "spec.suspend",
        "spec.generation.replicas",
        "spec.inference.replicas",
        "spec.checkpoints.onDeletion",
        "spec.checkpoints.deletionDeadlineSeconds",
        "spec.runPolicy.backoffLimit",
        "spec.runPolicy.failurePolicy.rules",
        "spec.runPolicy.podStartTimeoutSeconds",
        "spec.runPolicy.hangTimeoutSeconds",
    }


def hashes_of(data: dict[str, Any]) -> list[str]:
    """Return the hash of each group's template of the job with this manifest."""
    job = read(data | {"metadata": {"name": "job", "namespace": "team", "uid": "job-uid"}})
    assert job is not None
    return [template_hash(job, group) for group in Group]


def test_all_pods_are_replaced_for_other_scrapes() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    cluster.job["spec"]["metrics"] = "Disabled"
    cluster.settle()
    assert "job-coordinator" in cluster.deleting
    for _ in range(6):
        cluster.bring_up()
        cluster.later(11)
        cluster.read()
        cluster.settle()
    assert cluster.deleting == {}
    scraped = {name: pod["metadata"]["annotations"]["prometheus.io/scrape"] for name, pod in cluster.pods.items()}
    assert scraped == dict.fromkeys(cluster.pods, "false")


@pytest.mark.parametrize(
    "change",
    [
        {"runPolicy": {"backoffLimit": 9, "ttlSecondsAfterFinished": 60}},
        {"checkpoints": CHECKPOINTS | {"onDeletion": "Save"}},
        {"iterations": 100},
        {"inference": {"replicas": 2, "overlap": "Enabled"}},
    ],
)
def test_what_the_operator_alone_reads_and_what_is_the_default_restart_nothing(change: dict[str, Any]) -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS, runPolicy={"backoffLimit": 2}).begin()
    del cluster.job["spec"]["iterations"]
    for field, value in change.items():
        cluster.job["spec"][field] = value
    cluster.settle()
    assert sorted(cluster.deleting) == []


def test_without_checkpoints_a_changed_setting_waits_and_the_job_says_so() -> None:
    cluster = SimulatedCluster(checkpoints=None).begin()
    cluster.job["spec"]["iterations"] = 200
    cluster.settle()
    assert sorted(cluster.deleting) == []
    restarting = cluster.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("False", "SettingsKept")
    assert cluster.events[-1] == "SettingsKept"


def test_a_coordinator_that_never_ran_is_replaced_as_nothing_is_lost_with_it() -> None:
    cluster = SimulatedCluster(checkpoints=None)
    cluster.settle()
    cluster.wait_with("coordinator", "ImagePullBackOff", "not found")
    cluster.job["spec"]["coordinator"] = {}
    change(cluster, "coordinator", template=template_with_image("right:1"))
    cluster.settle()
    assert "job-coordinator" in cluster.deleting
    assert "SettingsKept" not in cluster.events
    cluster.finish_deletions()
    cluster.settle()
    assert cluster.image("coordinator") == "right:1"
    assert cluster.condition("Restarting")["reason"] != "SettingsKept"


def test_neither_another_size_nor_another_operator_makes_pods_outdated() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    for body in cluster.pods.values():
        body["spec"]["containers"][0]["image"] = "operator-of-yesterday"
    change(cluster, "generation", replicas=3, template={"metadata": {}, "spec": {}})
    cluster.settle()
    assert sorted(cluster.deleting) == []
    assert cluster.condition("Restarting")["status"] == "False"


def test_pods_of_an_operator_that_knew_no_templates_are_left_alone() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    for body in cluster.pods.values():
        del body["metadata"]["annotations"]["rlhf.dev/template"]
    change(cluster, "training", template=template_with_image("new:1"))
    cluster.settle()
    assert sorted(cluster.deleting) == []


def test_a_template_that_is_refused_rolls_nothing() -> None:
    cluster = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(cluster, "generation", template={"spec": {"hostNetwork": True}})
    cluster.settle()
    assert sorted(cluster.deleting) == []
    assert cluster.condition("Planned")["reason"] == "InvalidManifest"
