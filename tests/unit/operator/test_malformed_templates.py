"""A job with a malformed template reports it, keeps its pods, and can be deleted."""

from typing import Any

import pytest
from tests.support.operator.simulated_cluster import SimulatedCluster, stored_job

from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.reconcile.timestamps import rfc3339

SAVE = {"path": "/checkpoints", "onDeletion": "Save", "deletionDeadlineSeconds": 120}


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = {"a": value}
    return value


MALFORMED = [
    {"spec": {"containers": {"worker": {"image": "x"}}}},
    {"spec": "text"},
    {"spec": {"containers": [7]}},
    {"spec": {"containers": [{"name": "worker", "resources": "4Gi"}]}},
    {"spec": {"volumes": {"name": "data"}}},
    {"metadata": ["a"]},
    {"metadata": {"labels": {"a": 1}}},
    {"spec": {"schedulerName": {"a": "b"}}},
    {"spec": {"affinity": nested(400)}},
]
GROUPS = ("coordinator", "generation", "inference", "training")


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("template", MALFORMED, ids=range(len(MALFORMED)))
def test_it_is_said_and_nothing_is_started(group: str, template: Any) -> None:
    cluster = SimulatedCluster()
    cluster.job["spec"].setdefault(group, {})["template"] = template
    cluster.settle()
    assert cluster.pods == {}
    planned = cluster.condition("Planned")
    assert (planned["status"], planned["reason"]) == ("False", "InvalidManifest")
    assert f"spec.{group}.template" in planned["message"]
    assert cluster.events == ["InvalidManifest"], "told once"


@pytest.mark.parametrize("template", MALFORMED, ids=range(len(MALFORMED)))
def test_what_runs_goes_on_until_it_is_put_right(template: Any) -> None:
    cluster = SimulatedCluster().begin()
    before = cluster.workers
    right = cluster.job["spec"]["training"].get("template", {})
    cluster.job["spec"]["training"]["template"] = template
    cluster.settle()
    assert cluster.workers == before
    assert cluster.condition("Planned")["status"] == "False"
    assert cluster.phase == "Running"
    cluster.job["spec"]["training"]["template"] = right
    cluster.settle()
    assert cluster.condition("Planned")["status"] == "True"
    assert cluster.workers == before


BROKEN = [
    *({"training": {"template": template}} for template in MALFORMED),
    {"rollout": "text"},
    {"models": None},
    {"iterations": nested(400)},
]


@pytest.mark.parametrize("spec", BROKEN, ids=range(len(BROKEN)))
def test_deletion_with_a_last_checkpoint_does_not_depend_on_the_manifest(spec: dict[str, Any]) -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    cluster.job["spec"] |= spec
    cluster.job["metadata"]["deletionTimestamp"] = rfc3339(cluster.now)
    assert cluster.settle().requeue_after == 120
    assert [name for name, body in cluster.pods.items() if "deletionTimestamp" in body["metadata"]] == [
        "job-coordinator"
    ]
    cluster.finish_deletions()
    cluster.settle()
    assert not cluster.job["metadata"].get("finalizers")


@pytest.mark.parametrize(
    "spec", [None, "text", {"checkpoints": "text"}, {"checkpoints": {"deletionDeadlineSeconds": "x"}}]
)
def test_deletion_does_not_hang_whatever_the_manifest_is(spec: Any) -> None:
    cluster = SimulatedCluster(checkpoints=SAVE).begin()
    cluster.job["spec"] = spec
    cluster.job["metadata"]["deletionTimestamp"] = rfc3339(cluster.now)
    cluster.settle()
    cluster.later(300)
    cluster.settle()
    assert not cluster.job["metadata"].get("finalizers")


@pytest.mark.parametrize("levels", [100, 1000, 100_000])
def test_a_manifest_of_any_depth_is_refused_and_not_walked_into(levels: int) -> None:
    body = stored_job() | {}
    body["spec"]["generation"] = {"replicas": 1, "engineArgs": nested(levels)}
    assert "spec.generation.engineArgs.a.a" in parse_job(body).problem


def test_warnings_are_told_by_a_job_that_runs() -> None:
    cluster = SimulatedCluster(checkpoints=None)
    cluster.job["spec"]["training"]["optimizer"] = {"warmupSteps": 100_000}
    cluster.settle()
    planned = cluster.condition("Planned")
    assert planned["status"] == "True"
    assert planned["message"].startswith(
        "the manifest is valid; warning: spec.training.optimizer.warmupSteps = 100000: "
    )
    assert cluster.pods


def test_checkpoints_without_a_volume_start_nothing() -> None:
    cluster = SimulatedCluster(checkpoints={"path": "/elsewhere"})
    cluster.settle()
    assert cluster.pods == {}
    assert cluster.condition("Planned")["message"].startswith(
        'spec.checkpoints.path = "/elsewhere": in training pods nothing is mounted there'
    )
