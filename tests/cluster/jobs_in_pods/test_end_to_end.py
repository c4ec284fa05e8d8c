"""The whole product on a real node: Helm installs the operator's image, and kubectl apply of the quickstart trains it.

The node enforces NetworkPolicies, including the chart's, so they must allow all connections that a job and its operator
need. Rule: the manifest is that of the examples, adapted by quickstart_job.py.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.fixture import own_cluster
from tests.cluster.jobs_in_pods.quickstart_job import (
    ITERATIONS,
    NAMESPACE,
    PATIENCE,
    PLACE,
    adapted,
    install,
    rewards,
    wait_for,
)
from tests.cluster.processes import wait_until
from tests.cluster.releases.chart import HOME, RELEASE


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the release on a real node, from images/operator.Dockerfile and images/coordinator.Dockerfile."""
    archives = [images.mounted(Path(environment.PYTHON).parent), images.operator(), images.coordinator()]
    with own_cluster(request, level="node", network_policies=True, images=archives) as result:
        install(result)
        yield result


def actor(checkpoints: Path) -> dict[str, bytes]:
    """Return file name -> bytes of the last actor's weights."""
    result = {
        path.name: path.read_bytes() for path in (checkpoints / f"iteration-{ITERATIONS:06d}" / "actor").iterdir()
    }
    assert any(name.endswith(".safetensors") for name in result)
    return result


def on_this_machine(job: dict[str, Any], reward: str, shared: Path, folder: Path) -> Path:
    """Run `rlhf run` of the same job with the same files; return its run folder."""
    spec = copy.deepcopy(job["spec"])
    for group in ("generation", "inference", "training", "coordinator"):
        del spec[group]["template"]
    for model in ("actor", "critic"):
        spec["models"][model]["path"] = spec["models"][model]["path"].replace("/quickstart", str(shared), 1)
    spec["prompts"]["path"] = spec["prompts"]["path"].replace("/quickstart", str(shared), 1)
    spec["models"]["reward"] = {"function": {"file": "reward.py"}}
    spec["checkpoints"]["path"] = "checkpoints"
    folder.mkdir()
    (folder / "reward.py").write_text(reward)
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump({**job, "metadata": {"name": "quickstart"}, "spec": spec}))
    run = folder / "run"
    command = [f"{Path(sys.executable).parent}/rlhf", "run", str(manifest), f"--run-dir={run}", "--plain"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:]
    return run


def operators_pod(cluster: Cluster) -> dict[str, Any]:
    """Return the ready pod of the release that has the Lease."""
    cluster.kubectl("rollout", "status", f"deployment/{RELEASE}", f"--namespace={HOME}", f"--timeout={PATIENCE:.0f}s")
    result: dict[str, Any] = {}

    def leads() -> bool:
        pods = cluster.get("pods", f"--namespace={HOME}")["items"]
        lease = cluster.kubectl(
            "get", "lease", "rlhf-operator", f"--namespace={HOME}", "--output=name", "--ignore-not-found"
        )
        holder = ""
        if lease:
            holder = cluster.get("lease", "rlhf-operator", f"--namespace={HOME}")["spec"].get("holderIdentity") or ""
        result.update(next((pod for pod in pods if holder.startswith(pod["metadata"]["name"] + "_")), {}))
        return bool(result)

    wait_until("a pod of the release to hold the Lease", leads, PATIENCE, every=1)
    return result


def never_failed(cluster: Cluster, pod: dict[str, Any]) -> None:
    """Fail if the operator in this pod ended for another reason than an expired Lease on a busy machine."""
    [container] = pod["status"]["containerStatuses"]
    if container["restartCount"]:
        said = cluster.kubectl("logs", pod["metadata"]["name"], f"--namespace={HOME}", "--previous")
        assert f"the lease {HOME}/rlhf-operator was not renewed" in said, said[-4000:]


def test_the_operators_pod_runs_from_the_image_with_nothing_of_this_machine(cluster: Cluster) -> None:
    pod = operators_pod(cluster)
    program = "import importlib.util as u, os, rlhf_operator as o; print(o.__file__, u.find_spec('torch'), os.getuid())"
    where = f"--namespace={HOME}"
    reported = cluster.kubectl("exec", pod["metadata"]["name"], where, "--", "python", "-c", program).split()
    assert reported[0].startswith("/opt/rlhf/lib/")
    assert reported[1:] == ["None", "10001"]
    with pytest.raises(ClusterError, match="Read-only file system"):
        cluster.kubectl("exec", pod["metadata"]["name"], where, "--", "python", "-c", "open('/opt/rlhf/x', 'w')")


def test_the_quickstart_trains_in_pods_as_on_one_machine_though_operator_and_coordinator_are_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    objects = adapted(shared)
    cluster.apply(environment.volumes(environment.folders(), NAMESPACE))
    reward = objects.pop("ConfigMap")
    cluster.apply(objects.values())
    wait_for(cluster, "Running", "False", "kubectl create configmap quickstart-reward")
    cluster.apply(reward)
    job = wait_for(cluster, "Running")
    assert (job["status"]["restarts"]["failures"], job["status"]["restarts"]["disruptions"]) == (0, 0)
    pods = {item["metadata"]["name"]: item for item in cluster.get("pods", PLACE)["items"]}
    coordinator = pods["quickstart-coordinator"]["spec"]["containers"][0]
    assert coordinator["image"] == images.COORDINATOR
    reading = {
        name for name, pod in pods.items() if "rlhf.dev/reward-content" in pod["metadata"].get("annotations", {})
    }
    assert reading == {"quickstart-generation-0", "quickstart-generation-1", "quickstart-inference-0"}

    leader = operators_pod(cluster)["metadata"]["name"]
    cluster.kubectl("delete", f"pod/{leader}", "--grace-period=0", "--force", f"--namespace={HOME}")
    cluster.kubectl("delete", "pod/quickstart-coordinator", "--grace-period=1", PLACE)
    job = wait_for(cluster, "Complete")
    print(cluster.kubectl("get", "rlhf", PLACE), cluster.kubectl("describe", "rlhf", "quickstart", PLACE), sep="\n")
    assert job["status"]["plan"]["engine"].startswith("torch: the worker has no GPU"), "of engine: Auto"
    assert job["status"]["progress"]["summary"] == f"{ITERATIONS}/{ITERATIONS}"
    assert job["status"]["lastCheckpoint"]["path"].endswith(f"/iteration-{ITERATIONS:06d}")
    assert job["status"]["restarts"]["failures"] == 0, job["status"]["restarts"]

    run = on_this_machine(objects["RLHFJob"], reward["data"]["reward.py"], shared, tmp_path / "local")
    learnt = rewards(shared / "checkpoints" / "run" / "metrics.jsonl")
    assert learnt == rewards(run / "metrics.jsonl")
    assert sum(learnt[-5:]) / 5 > learnt[0] + 0.2
    assert actor(shared / "checkpoints") == actor(tmp_path / "local" / "checkpoints")

    cluster.kubectl("delete", "rlhfjob", "quickstart", PLACE)
    kinds = "pods,services,secrets,networkpolicies"
    wait_until("all of the job to be gone", lambda: not cluster.get(kinds, PLACE)["items"], PATIENCE, every=1)
    never_failed(cluster, operators_pod(cluster))
