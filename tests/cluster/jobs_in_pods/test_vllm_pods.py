"""Jobs that decode with vLLM, in pods of the installed chart: the image, its pods, and the message without vLLM.

Rule: generation workers run from images/worker.Dockerfile with vLLM for CPU, as named by the chart's value, and take
torch from this machine; all other workers are those of the other end-to-end test. The node enforces NetworkPolicies and
advertises GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.fixture import own_cluster
from tests.cluster.jobs_in_pods.quickstart_job import NAMESPACE, PATIENCE, PLACE, adapted, install, rewards, wait_for
from tests.cluster.processes import wait_until
from tests.support.model_folders import models

from rlhf_common.names import METRICS_PORT, WORKER_PORT

pytestmark = pytest.mark.full


ITERATIONS = {"ppo": 14, "grpo": 8}
"""Iterations after which the reward has risen."""
GPUS = 4
SHARED_BYTES = 3 * 2**30
"""Bytes of /dev/shm of a worker with four processes."""
WHERE = """
import importlib.util, json, os
names = ("VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT", "HF_HUB_OFFLINE", "VLLM_SERVER_DEV_MODE")
# Found and not imported, which takes longer than the job.
print(json.dumps({
    "places": [importlib.util.find_spec(name).origin for name in ("rlhf_workers", "vllm", "torch")],
    "environment": {name: os.environ.get(name) for name in names},
    "user": os.getuid(),
}))
"""
LISTENING = """
LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
for name in ("tcp", "tcp6"):
    for line in open("/proc/net/" + name).read().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and not address.startswith(LOOPBACK):
            print(int(address.rpartition(":")[2], 16))
"""
"""Prints the ports at which the pod listens beyond its loopback."""
NOT_STARTED = "container not found"
"""kubectl's message about a container that its node has yet to start."""
NOT_INSTALLED = "raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm')"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield the release on a real node, with the image of vLLM as its image.vllmWorker."""
    mounted = images.mounted(Path(environment.PYTHON).parent)
    archives = [mounted, images.operator(), images.coordinator(), images.worker_vllm()]
    with own_cluster(request, level="node", network_policies=True, gpus=GPUS, images=archives) as result:
        install(result, images.WORKER_VLLM)
        result.apply(environment.volumes(environment.folders(), NAMESPACE))
        yield result


@pytest.fixture(scope="module")
def objects(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return kind -> object of the quickstart, with generation workers that use vLLM; apply all but the job."""
    shared = tmp_path_factory.mktemp("shared")
    shared.chmod(0o777)
    resources: dict[str, Any] = adapted(shared)
    spec = resources["RLHFJob"]["spec"]
    spec["deterministic"] = False
    spec["generation"]["engine"] = "vllm"
    template = spec["generation"]["template"] = json.loads(json.dumps(spec["generation"]["template"]))
    [container] = template["spec"]["containers"]
    quickstart = [mount for mount in container["volumeMounts"] if mount["name"] == "quickstart"]
    container["volumeMounts"] = [*quickstart, environment.base_packages()]
    cluster.apply(body for kind, body in resources.items() if kind != "RLHFJob")
    return {**resources, "shared": shared}


def variant(objects: dict[str, Any], name: str, **spec: Any) -> dict[str, Any]:
    """Return the job with another name and separate checkpoints."""
    job: dict[str, Any] = copy.deepcopy(objects["RLHFJob"])
    job["metadata"]["name"] = name
    job["spec"] |= {"checkpoints": {"path": f"/quickstart/{name}", "every": 30}, **spec}
    return job


def inside(cluster: Cluster, pod: str, program: str) -> str:
    """Return the output of a program in a pod, once its container runs: a job runs while other workers still start."""
    printed: list[str] = []

    def ran() -> bool:
        try:
            printed.append(cluster.kubectl("exec", pod, PLACE, "--", "python", "-c", program))
        except ClusterError as error:
            if NOT_STARTED not in str(error):
                raise
        return bool(printed)

    wait_until(f"the container of {pod}", ran, PATIENCE, every=1)
    return printed[0]


def rewards_so_far(objects: dict[str, Any], name: str) -> list[float]:
    written = objects["shared"] / name / "run" / "metrics.jsonl"
    return rewards(written) if written.exists() else []


def climbed(objects: dict[str, Any], name: str) -> None:
    learnt = rewards_so_far(objects, name)
    print(f"reward of {name}: {[round(value, 3) for value in learnt]}")
    assert sum(learnt[-3:]) / 3 > learnt[0] + 0.1, learnt


def test_ppo_trains_by_vllm_from_the_built_image_with_no_port_but_ours(
    cluster: Cluster, objects: dict[str, Any]
) -> None:
    """Leave the job more iterations than the test waits for: it must not end before the test has looked into its
    pod."""
    cluster.apply(variant(objects, "ppo", iterations=120))
    wait_for(cluster, "Running", name="ppo")
    pod = cluster.get("pod", "ppo-generation-0", PLACE)
    assert pod["spec"]["containers"][0]["image"] == images.WORKER_VLLM
    said = json.loads(inside(cluster, "ppo-generation-0", WHERE).splitlines()[-1])
    project, engine, torch = said["places"]
    assert project.startswith("/opt/rlhf/")
    assert engine.startswith("/opt/rlhf/")
    assert torch.startswith("/usr/local/lib/")
    assert said["user"] == 10001
    assert said["environment"] == {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": "/tmp/vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_SERVER_DEV_MODE": None,
    }
    ports: set[int] = set()

    def listens() -> bool:
        """Return whether it listens; it may still build its engine while the other one decodes."""
        ports.update(map(int, inside(cluster, "ppo-generation-0", LISTENING).split()))
        return ports >= {WORKER_PORT, METRICS_PORT}

    wait_until("the worker to listen", listens, PATIENCE, every=1)
    wait_until("its iterations", lambda: len(rewards_so_far(objects, "ppo")) >= ITERATIONS["ppo"], PATIENCE, every=1)
    job = cluster.get("rlhfjob", "ppo", PLACE)
    assert job["status"]["restarts"]["failures"] == 0, job["status"]["restarts"]
    assert job["status"]["plan"]["engine"] == "vllm: spec.generation.engine names it"
    climbed(objects, "ppo")
    assert ports == {WORKER_PORT, METRICS_PORT}, "nothing of vLLM listens beyond the pod's loopback"
    cluster.kubectl("delete", "rlhfjob", "ppo", PLACE)


def test_grpo_trains_by_vllm_too(cluster: Cluster, objects: dict[str, Any]) -> None:
    algorithm = {"grpo": {"groupSize": 8, "klCoefficient": 0.01, "clipRange": 0.2, "epochs": 1, "miniBatchSize": 64}}
    job = variant(objects, "grpo", iterations=ITERATIONS["grpo"], algorithm=algorithm)
    del job["spec"]["models"]["critic"]
    cluster.apply(job)
    wait_for(cluster, "Complete", name="grpo")
    climbed(objects, "grpo")


def test_an_image_without_vllm_is_told_in_words(cluster: Cluster, objects: dict[str, Any]) -> None:
    """Simulate the missing library with a module that raises Python's error."""
    hidden = objects["shared"] / "hidden"
    hidden.mkdir()
    (hidden / "vllm.py").write_text(NOT_INSTALLED)
    job = variant(objects, "without", iterations=1)
    [container] = job["spec"]["generation"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "PYTHONPATH", "value": "/quickstart/hidden"}]
    cluster.apply(job)
    seen = wait_for(cluster, "Failed", says="vLLM is not installed in this worker", name="without")
    [failed] = [item for item in seen["status"]["conditions"] if item["type"] == "Failed"]
    assert "spec.generation.engine" in failed["message"]
    assert "image.vllmWorker" in failed["message"]
    cluster.kubectl("delete", "rlhfjob", "without", PLACE)


def test_a_worker_gets_all_its_gpus_and_bounded_shared_memory_and_one_that_finds_none_waits(
    cluster: Cluster, objects: dict[str, Any]
) -> None:
    """Check the pods; the advertised GPUs are not real, so the worker's computation on them is not tested."""
    job = variant(objects, "split", iterations=1)
    generation = job["spec"]["generation"]
    generation |= {"replicas": 2, "gpusPerReplica": GPUS, "parallelism": {"tensor": GPUS}}
    generation["template"]["spec"]["initContainers"] = [
        {
            "name": "measure",
            "image": images.MOUNTED,
            "command": ["python3", "-c", "import os; s = os.statvfs('/dev/shm'); print(s.f_frsize * s.f_blocks)"],
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    ]
    models.write_policy(objects["shared"] / "four-heads")
    job["spec"]["models"]["actor"]["path"] = "/quickstart/four-heads"
    cluster.apply(job)
    first, second = "split-generation-0", "split-generation-1"

    def placed() -> dict[str, str]:
        pods = cluster.get("pods", PLACE, "--selector=rlhf.dev/job-name=split,rlhf.dev/group=generation")["items"]
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName", "") for pod in pods}

    wait_until("one of both to have a node", lambda: sum(map(bool, placed().values())) == 1, PATIENCE, every=1)
    [running] = [name for name, node in placed().items() if node]
    waiting = second if running == first else first
    limits = cluster.get("pod", running, PLACE)["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == str(GPUS)
    measured: list[str] = []

    def logged() -> bool:
        with contextlib.suppress(ClusterError):  # not started yet
            measured[:] = cluster.kubectl("logs", running, PLACE, "--container=measure").split()
        return bool(measured)

    wait_until("the size of /dev/shm", logged, PATIENCE, every=1)
    assert int(measured[0]) == SHARED_BYTES
    wait_until(
        "the reason of the other",
        lambda: "Insufficient nvidia.com/gpu" in json.dumps(cluster.get("pod", waiting, PLACE)["status"]),
        PATIENCE,
        every=1,
    )
    cluster.kubectl("delete", "rlhfjob", "split", PLACE)
