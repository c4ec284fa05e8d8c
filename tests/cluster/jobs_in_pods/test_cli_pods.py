"""`rlhf logs` and `rlhf top` with pods that really run: streams through the API server, a restart, a metrics page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[3]
TIMEOUT = 240.0  # seconds for any one step
NAMESPACE = "cli-pods"
METRICS = """rlhf_iteration 4
rlhf_phase{phase="Scoring"} 1
rlhf_samples{state="scored"} 3
rlhf_samples{state="generated"} 5
rlhf_worker_state{worker="generation-0",state="Busy"} 1
rlhf_worker_tokens_per_second{worker="generation-0"} 321
"""
COORDINATOR = f"""
import http.server, json
CLOSED = "iteration 3 (4 of 9): reward 0.5, 8.0 samples/s, 2 s"
for message in ("Generating (iteration 3)", "Training (iteration 3)", CLOSED):
    print(json.dumps({{"time": "2026-01-01T00:00:00+00:00", "level": "INFO", "message": message}}), flush=True)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write({METRICS!r}.encode())
http.server.HTTPServer(("", 7790), Page).serve_forever()
"""
WORKER = """
import os, sys, time
if not os.path.exists("/state/seen"):
    open("/state/seen", "w").close(); print("first life", flush=True); time.sleep(1); sys.exit(3)
print("second life", flush=True); time.sleep(3600)
"""


def pod(name: str, group: str, script: str) -> dict[str, Any]:
    """Return a pod of the job with another program in it."""
    labels = {"rlhf.dev/job-name": name, "rlhf.dev/group": group, "rlhf.dev/index": "0"}
    container = {
        "name": "worker",
        "image": images.PYTHON,
        "command": ["python3", "-c", script],
        "volumeMounts": [{"name": "state", "mountPath": "/state"}],
    }
    spec = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsUser": 0},
        "volumes": [{"name": "state", "emptyDir": {}}],
        "containers": [container],
    }
    suffix = group if group == "coordinator" else f"{group}-0"
    meta = {"name": f"{name}-{suffix}", "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@pytest.fixture(scope="module")
def job(node_cluster: Cluster) -> Iterator[str]:
    """Yield the name of a job with two pods."""
    node_cluster.nodes["n1"].import_image(images.python())
    node_cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
    node_cluster.add_namespace(NAMESPACE)
    body: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "grpo.yaml").read_text())
    name = str(body["metadata"]["name"])
    body["metadata"]["namespace"] = NAMESPACE
    node_cluster.apply([body, pod(name, "coordinator", COORDINATOR), pod(name, "generation", WORKER)])
    yield name
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def start(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    """Start the command like a user, with its output in a pipe."""
    command = [sys.executable, "-m", "rlhf_cli.main", *arguments, f"--namespace={NAMESPACE}"]
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rlhf(cluster: Cluster, *arguments: str) -> str:
    """Run the command; return its output, including standard error."""
    return start(cluster, *arguments).communicate(timeout=TIMEOUT)[0]


def says(cluster: Cluster, *parts: str, of: tuple[str, ...]) -> None:
    """Wait until a command's output has all of these: pods start to serve, and kubelets to report, after a while."""

    def said() -> bool:
        output = rlhf(cluster, *of)
        return all(part in output for part in parts)

    wait_until(f"{parts} in rlhf {' '.join(of)}", said, TIMEOUT, every=1)


def test_logs_are_followed_over_a_restart_to_the_end_of_the_job(node_cluster: Cluster, job: str) -> None:
    following = start(node_cluster, "logs", job, "--follow")
    try:
        says(
            node_cluster,
            "coordinator   00:00:00 INFO iteration 3 (4 of 9)",
            "generation-0  second life",
            of=("logs", job),
        )
        assert "coordinator   00:00:00 INFO Training (iteration 3)" in rlhf(node_cluster, "logs", job)
        assert rlhf(node_cluster, "logs", job, "--group=generation", "--previous") == "first life\n"
        assert rlhf(node_cluster, "logs", job, "--group=coordinator", "--tail=1", "--raw").startswith('{"time"')

        says(node_cluster, "4 of 100 iterations", "Scoring", "3/8 samples", "321", of=("top", job))
        says(node_cluster, "Last iterations", "generation-0   Ready   n1     1", of=("describe", job))

        reported = {
            "type": "Complete",
            "status": "True",
            "reason": "AllIterationsTrained",
            "message": "all are trained",
        }
        status = {"conditions": [reported | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
        patch = f"--patch={json.dumps({'status': status})}"
        where = f"--namespace={NAMESPACE}"
        node_cluster.kubectl("patch", "rlhfjob", job, where, "--subresource=status", "--type=merge", patch)
        node_cluster.kubectl("delete", "pods", "--all", where)
        output, _ = following.communicate(timeout=TIMEOUT)
        assert following.returncode == 0
        assert output.count("second life") == 1
    finally:
        following.kill()
