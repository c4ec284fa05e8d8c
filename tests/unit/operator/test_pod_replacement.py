"""A changed pod template is rolled: samples move on, training goes on from a checkpoint, nothing is counted."""

from typing import Any

import pytest
from tests.support.simulated_cluster import FILES, SimulatedCluster

CHECKPOINTS = {"path": "/checkpoints"}


def template(image: str) -> dict[str, Any]:
    """With the volume that checkpoints lie on, as ranks need it."""
    [container] = FILES["containers"]
    return {"spec": FILES | {"containers": [container | {"image": image}]}}


def leaving(world: SimulatedCluster) -> list[str]:
    return sorted(name for name, body in world.pods.items() if "deletionTimestamp" in body["metadata"])


def image(world: SimulatedCluster, worker: str) -> str:
    return str(world.pods[world.name(worker)]["spec"]["containers"][0]["image"])


def change(world: SimulatedCluster, group: str, **fields: Any) -> None:
    world.job["spec"][group] |= fields
    world.job["metadata"]["generation"] += 1


def come_up(world: SimulatedCluster) -> None:
    world.finish_deletions()
    world.settle()
    world.run()
    world.later(11)
    world.read()


def uncounted(world: SimulatedCluster) -> bool:
    restarts = world.job["status"]["restarts"]
    return (restarts["failures"], restarts["disruptions"]) == (0, 0)


def test_generation_gets_a_new_image_one_pod_at_a_time() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(world, "generation", template=template("new:1"))
    world.settle()
    assert leaving(world) == ["job-generation-1"]
    restarting = world.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "RollingUpdate")
    world.finish_deletions()
    world.settle()
    assert image(world, "generation-1") == "new:1"
    assert leaving(world) == [], "the new one is not up"
    assert world.condition("Restarting")["message"] == (
        "1 of 2 generation pods have the template from before, and job-generation-1 has to be up before the next"
    )
    world.run()
    world.later(11)
    world.read(working={"generation": 1, "inference": 1, "training": 2})
    world.settle()
    assert leaving(world) == [], "it runs, and loads its model"
    world.later(11)
    world.read()
    world.settle()
    assert leaving(world) == ["job-generation-0"]
    come_up(world)
    world.settle()
    assert image(world, "generation-0") == "new:1"
    assert world.condition("Restarting")["status"] == "False"
    assert world.condition("Resizing")["status"] == "False"
    assert uncounted(world)
    assert world.events[-1] != "NotRestarting"


def test_a_broken_image_stops_at_one_pod_and_the_next_template_replaces_it() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(world, "generation", template=template("nosuch:1"))
    world.settle()
    world.finish_deletions()
    world.settle()
    world.wait_with("generation-1", "ImagePullBackOff", "no such image")
    for _ in range(5):
        world.later(60)
        world.read(working={"generation": 1, "inference": 1, "training": 2})
        world.settle()
    assert leaving(world) == []
    assert "cannot get the image" in world.condition("Running")["message"]
    change(world, "generation", template=template("good:1"))
    world.settle()
    assert leaving(world) == ["job-generation-1"], "it was never up, so nobody waits for it"


def test_training_rolls_as_a_whole_after_the_coordinator_has_saved_a_checkpoint() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(world, "training", template=template("new:1"))
    world.settle()
    assert leaving(world) == ["job-coordinator"], "it saves a checkpoint, with the ranks' help"
    world.finish_deletions()
    world.settle()
    assert leaving(world) == ["job-training-0", "job-training-1"]
    world.finish_deletions()
    world.settle()
    assert image(world, "training-0") == image(world, "training-1") == "new:1"
    come_up(world)
    world.settle()
    assert leaving(world) == []
    assert world.condition("Restarting")["status"] == "False"
    assert uncounted(world)


def test_without_checkpoints_the_coordinator_keeps_the_journal() -> None:
    world = SimulatedCluster(checkpoints=None).begin()
    change(world, "training", template=template("new:1"))
    world.settle()
    assert leaving(world) == ["job-training-0", "job-training-1"]
    come_up(world)
    world.settle()
    assert leaving(world) == []
    assert world.condition("Restarting")["status"] == "False"


def test_a_setting_that_is_read_at_the_start_restarts_the_coordinator_alone() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    world.job["spec"]["iterations"] = 200
    world.settle()
    assert leaving(world) == ["job-coordinator"]
    restarting = world.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("True", "RollingUpdate")
    assert restarting["message"].startswith("the coordinator has settings or templates from before")
    come_up(world)
    world.settle()
    assert leaving(world) == []
    assert world.condition("Restarting")["status"] == "False"
    assert uncounted(world)


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
    world = SimulatedCluster(checkpoints=CHECKPOINTS, runPolicy={"backoffLimit": 2}).begin()
    del world.job["spec"]["iterations"]
    for field, value in change.items():
        world.job["spec"][field] = value
    world.settle()
    assert leaving(world) == []


def test_without_checkpoints_a_changed_setting_waits_and_the_job_says_so() -> None:
    world = SimulatedCluster(checkpoints=None).begin()
    world.job["spec"]["iterations"] = 200
    world.settle()
    assert leaving(world) == []
    restarting = world.condition("Restarting")
    assert (restarting["status"], restarting["reason"]) == ("False", "SettingsKept")
    assert world.events[-1] == "SettingsKept"


def test_neither_another_size_nor_another_operator_makes_pods_outdated() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    for body in world.pods.values():
        body["spec"]["containers"][0]["image"] = "operator-of-yesterday"
    change(world, "generation", replicas=3, template={"metadata": {}, "spec": {}})
    world.settle()
    assert leaving(world) == []
    assert world.condition("Restarting")["status"] == "False"


def test_pods_of_an_operator_that_knew_no_templates_are_left_alone() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    for body in world.pods.values():
        del body["metadata"]["annotations"]["rlhf.dev/template"]
    change(world, "training", template=template("new:1"))
    world.settle()
    assert leaving(world) == []


def test_a_template_that_is_refused_rolls_nothing() -> None:
    world = SimulatedCluster(checkpoints=CHECKPOINTS).begin()
    change(world, "generation", template={"spec": {"hostNetwork": True}})
    world.settle()
    assert leaving(world) == []
    assert world.condition("Planned")["reason"] == "InvalidManifest"
