"""The quickstart's manifest on a real node under the installed chart, as the end-to-end tests adapt and observe it.

Rule: the manifest is that of the examples; `adapted` changes it: this machine's Python in the worker pods instead of an
image with torch, a local volume, small requests, and few iterations that can be repeated bit for bit.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import yaml
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs_in_pods.tiny_job import condition
from tests.cluster.processes import wait_until
from tests.cluster.releases.chart import CHART, HOME, RELEASE

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "quickstart-cluster.yaml"
PREPARE = ROOT / "examples" / "quickstart" / "prepare.py"
NAMESPACE = "team-rl"
ITERATIONS = int(os.environ.get("RLHF_QUICKSTART_ITERATIONS", "24"))  # of the example's 120; the reward rises at once
PATIENCE = 1800.0  # seconds for any step: a job of six processes
PLACE = f"--namespace={NAMESPACE}"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def install(cluster: Cluster, vllm_worker: str = images.MOUNTED, coordinator: str = images.COORDINATOR) -> None:
    """Install the release in its namespace; `vllm_worker` is the image of workers that decode with vLLM."""
    for name in (HOME, NAMESPACE):
        cluster.add_namespace(name, RESTRICTED)
    values: dict[str, Any] = {"image": {"registry": "localhost"}}
    for name, image in (
        ("operator", images.OPERATOR),
        ("coordinator", coordinator),
        ("worker", images.MOUNTED),
        ("vllmWorker", vllm_worker),
    ):
        repository, _, tag = image.removeprefix("localhost/").partition(":")
        values["image"][name] = {"repository": repository, "tag": tag}
    values["networkPolicy"] = {"enabled": True, "apiServerPorts": [int(cluster.server.rpartition(":")[2])]}
    flags = [f"--set-json={name}={json.dumps(value)}" for name, value in values.items()]
    cluster.helm("install", RELEASE, str(CHART), f"--namespace={HOME}", *flags)
    cluster.wait_defined("rlhfjobs.rlhf.dev")


def adapted(shared: Path) -> dict[str, dict[str, Any]]:
    """Return kind -> object of the example, in the namespace of the test; `shared` is its volume."""
    result = {item["kind"]: copy.deepcopy(item) for item in yaml.safe_load_all(EXAMPLE.read_text())}
    for entry in result.values():
        entry["metadata"]["namespace"] = NAMESPACE
    spec = result["RLHFJob"]["spec"] = json.loads(json.dumps(result["RLHFJob"]["spec"]))  # a deep copy
    spec |= {"iterations": ITERATIONS, "deterministic": True}
    volumes, mounts = environment.pod_spec(environment.folders())
    for group in ("generation", "inference", "training"):
        template = spec[group]["template"]["spec"]
        template["volumes"] += volumes
        container = template["containers"][0]
        container["volumeMounts"] += mounts
        container["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}}
    assets = spec["coordinator"]["template"]["spec"]["initContainers"][0]
    assets |= {"image": images.MOUNTED, "command": ["python", str(PREPARE), *assets["command"][2:]]}
    assets["volumeMounts"] += mounts
    claim = result["PersistentVolumeClaim"]
    result["PersistentVolume"] = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{NAMESPACE}-quickstart"},
        "spec": {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": claim["spec"]["resources"]["requests"],
            "claimRef": {"namespace": NAMESPACE, "name": claim["metadata"]["name"]},
            "hostPath": {"path": str(shared), "type": "Directory"},
        },
    }
    return result


def wait_for(
    cluster: Cluster, kind: str, status: str = "True", says: str = "", name: str = "quickstart"
) -> dict[str, Any]:
    """Wait for a condition of a job; return the job."""
    seen: dict[str, Any] = {}

    def holds() -> bool:
        seen.update(cluster.get("rlhfjob", name, PLACE))
        failed = condition(seen, "Failed")
        assert kind == "Failed" or failed.get("status") != "True", failed["message"]
        result = condition(seen, kind)
        return result.get("status") == status and says in result["message"]

    try:
        wait_until(f"{kind}={status} {says}", holds, PATIENCE, every=1)
    except TimeoutError as error:
        raise ClusterError(f"{error}\n{cluster.kubectl('describe', 'rlhfjob', name, PLACE)}") from error
    return seen


def rewards(metrics: Path) -> list[float]:
    """Return the mean reward of each iteration whose line is complete; for a repeated one the last line counts."""
    lines = [json.loads(line) for line in metrics.read_text().rpartition("\n")[0].splitlines()]
    return list({line["iteration"]: float(line["reward"]) for line in lines}.values())
