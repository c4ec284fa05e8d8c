"""A job with several turns in pods of a real node: its environment is a ConfigMap, with a key of a Secret.

It must earn the same rewards as on this machine. Rule: the manifest is the calculator's of the examples, deterministic
and with fewer iterations.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.cluster import Cluster
from tests.cluster.jobs_in_pods.quickstart_job import NAMESPACE, PATIENCE, PLACE, rewards, wait_for
from tests.cluster.jobs_in_pods.tiny_job import in_pods
from tests.cluster.operator_process import OperatorProcess, beside_node
from tests.support.jobs.chaos import run_job

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "calculator"
NAME = "calculator"
ITERATIONS = 6
LICENSE = "sk-granted"
LICENSED = f"""
import os

if os.environ.get("LICENSE") != {LICENSE!r}:
    raise RuntimeError("no license")
"""


@pytest.fixture
def operator(node_cluster: Cluster) -> Iterator[OperatorProcess]:
    """Yield the operator beside a real node that has an image with this machine's environment."""
    with beside_node(node_cluster) as process:
        yield process


def calculator(folder: Path) -> dict[str, Any]:
    """Return the example's job, with its assets in `folder`."""
    prepare = [sys.executable, str(EXAMPLE / "prepare.py"), "--folder", str(folder)]
    subprocess.run(prepare, check=True, capture_output=True, timeout=PATIENCE)
    job: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    job["spec"] |= {"iterations": ITERATIONS, "deterministic": True}
    job["spec"]["models"]["actor"]["path"] = str(folder / "policy")
    job["spec"]["prompts"]["path"] = str(folder / "prompts.jsonl")
    return job


def test_an_environment_in_a_config_map_trains_in_pods_as_from_a_file_on_one_machine(
    node_cluster: Cluster, operator: OperatorProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = calculator(tmp_path)
    manifest, code = tmp_path / "job.yaml", tmp_path / "licensed.py"
    code.write_text((EXAMPLE / "environment.py").read_text() + LICENSED)
    key = {"name": "license", "key": "key"}
    job["spec"]["rollout"]["environment"] |= {"file": str(code), "env": [{"name": "LICENSE", "secretKeyRef": key}]}
    monkeypatch.setenv("RLHF_SECRET_LICENSE_KEY", LICENSE)
    manifest.write_text(yaml.safe_dump({**job, "metadata": {"name": NAME}}))
    run_job(manifest, tmp_path / "here")

    environment = job["spec"]["rollout"]["environment"]
    environment |= {"configMap": "my-calculator"}
    del environment["file"]
    in_pods(node_cluster, job, tmp_path)
    secret = {"name": "license", "namespace": NAMESPACE}
    node_cluster.apply(
        [job, {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "stringData": {"key": LICENSE}}]
    )
    command = f"kubectl create configmap my-calculator {PLACE} --from-file=environment.py=<your file>"
    wait_for(node_cluster, "Running", "False", command, name=NAME)
    data = {"environment.py": code.read_text()}
    named = {"name": "my-calculator", "namespace": NAMESPACE}
    node_cluster.apply([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": named, "data": data}])
    wait_for(node_cluster, "Complete", name=NAME)
    written = tmp_path / "checkpoints" / "run" / "metrics.jsonl"
    assert rewards(written) == rewards(tmp_path / "here" / "metrics.jsonl")
    assert read_metrics(written)[-1]["rewards/reward/metrics/turns"] > 1, "some ask, and go on after the answer"
