"""A real job in real pods: kubectl apply, and the policy is trained by the operator's pods on a real node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests import local_job

from . import environment, images
from .cluster import Cluster
from .operator_process import OperatorProcess
from .processes import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRAIN_TIMEOUT = 400.0  # seconds for the tiny job with six processes; under two minutes on two idle cores
ITERATIONS = 6


@pytest.fixture(scope="module")
def cluster(node_cluster: Cluster) -> Cluster:
    """The real node, the definition, and an image that finds this machine's environment."""
    node_cluster.nodes["n1"].import_image(images.mounted(Path(environment.PYTHON).parent))
    node_cluster.apply(ROOT / "crds" / "rlhfjobs.yaml")
    return node_cluster


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> Iterator[OperatorProcess]:
    """The operator beside it."""
    image = images.MOUNTED
    with OperatorProcess(cluster, f"--operator-image={image}", f"--worker-image={image}") as process:
        yield process


def tiny_job(cluster: Cluster, name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """The tiny job in namespace `name`, with its files in `folder`; applied by the caller."""
    job: dict[str, Any] = yaml.safe_load(local_job.write_job(folder, **more).read_text())
    spec = job["spec"]
    job["metadata"] = {"name": "tiny", "namespace": name}
    for model in ("actor", "critic"):
        if model in spec["models"]:
            spec["models"][model]["path"] = str(folder / "policy")
    spec["models"]["reward"]["function"]["file"] = str(folder / "reward.py")
    spec["prompts"]["path"] = str(folder / "prompts.jsonl")
    spec["checkpoints"] = {"path": str(folder / "checkpoints"), "every": 4}
    (folder / "checkpoints").mkdir()
    for each in (folder, folder / "checkpoints"):
        each.chmod(0o777)
    for each in (folder / "policy").iterdir():
        each.chmod(0o644)  # safetensors writes 0600, and pods are another user
    code, data = environment.folders(), {"data": folder}
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    cluster.apply([namespace, *environment.volumes(code, name), *environment.volumes(data, name, writable=True)])
    volumes, mounts = environment.pod_spec(code)
    more_volumes, more_mounts = environment.pod_spec(data, writable=True)
    container = {
        "name": "worker",
        "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
        "volumeMounts": mounts + more_mounts,
    }
    for group in ("generation", "inference", "training"):
        spec[group]["template"] = {"spec": {"containers": [container], "volumes": volumes + more_volumes}}
    return job


def condition(job: dict[str, Any], kind: str) -> dict[str, Any]:
    """A condition of a job; empty when it is not there yet."""
    conditions = job.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})


def wait_for(cluster: Cluster, operator: OperatorProcess, name: str, kind: str, timeout: float) -> dict[str, Any]:
    """Waits for a condition of the job in namespace `name`."""
    seen: dict[str, Any] = {}

    def holds() -> bool:
        operator.check()
        seen.update(cluster.get("rlhfjob", "tiny", f"--namespace={name}"))
        if kind != "Failed":
            assert condition(seen, "Failed").get("status") != "True", condition(seen, "Failed")["message"]
        return condition(seen, kind).get("status") == "True"

    wait_until(f"{kind} of {name}/tiny", holds, timeout, every=1)
    return seen


def actor(folder: Path) -> dict[str, bytes]:
    """File name -> bytes of the last actor's weights."""
    found = (folder / "checkpoints" / f"iteration-{ITERATIONS:06d}" / "actor").glob("*.safetensors")
    weights = {path.name: path.read_bytes() for path in found}
    assert weights
    return weights


@pytest.mark.timeout(900)
def test_jobs_train_in_pods_to_the_same_weights_whatever_happens_to_them(
    cluster: Cluster, operator: OperatorProcess, tmp_path: Path
) -> None:
    calm, troubled = tmp_path / "calm", tmp_path / "troubled"
    cluster.apply(tiny_job(cluster, "calm", calm, iterations=ITERATIONS))
    done = wait_for(cluster, operator, "calm", "Complete", TRAIN_TIMEOUT)
    assert done["status"]["progress"]["summary"] == f"{ITERATIONS}/{ITERATIONS}"
    assert done["status"]["restarts"] == {"failures": 0, "disruptions": 0, "accounted": []}

    cluster.apply(tiny_job(cluster, "troubled", troubled, iterations=ITERATIONS))
    where = "--namespace=troubled"
    wait_for(cluster, operator, "troubled", "Running", TRAIN_TIMEOUT)
    cluster.kubectl("scale", "rlhfjob/tiny", "--replicas=3", where)
    cluster.kubectl("delete", "pod/tiny-generation-0", "--wait=false", where)
    operator.kill()
    cluster.kubectl("delete", "pod/tiny-coordinator", "--grace-period=1", where)
    operator.start()
    done = wait_for(cluster, operator, "troubled", "Complete", TRAIN_TIMEOUT)
    assert actor(troubled) == actor(calm)
    restarts = done["status"]["restarts"]
    assert restarts["failures"] == 0, restarts
