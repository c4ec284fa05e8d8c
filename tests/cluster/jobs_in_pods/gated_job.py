"""The tiny job with a gate in its reward, observed through its files, its coordinator's metrics, and the API server.

The gate synchronises a job with a test on a machine of any speed: a response is scored only while fewer iterations are
trained than the file GATE allows. A job therefore never runs ahead, and its results do not change. Rule: an unavailable
API server is no error; the job is then not observed. The number of trained iterations comes from the job's own record,
which exists in any state of the cluster.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.cluster.cluster import Cluster, ClusterError
from tests.cluster.jobs_in_pods.tiny_job import condition, tiny_job
from tests.support.jobs import local_job

from rlhf_common.names import METRICS_PORT

NAME = "tiny"
GATE = "gate"
GATED_REWARD = """\
import pathlib
import time

FOLDER = pathlib.Path({folder!r})


def number(path, of):
    try:
        return of(path.read_text())
    except (OSError, ValueError):
        return 0


def score(prompt, response, record):
    while number(FOLDER / {record!r}, lambda text: text.count("\\n")) >= number(FOLDER / {gate!r}, int):
        time.sleep(0.05)
    return digits(prompt, response, record)


"""
RECORD = "checkpoints/run/metrics.jsonl"
"""Record with one line per iteration, each once, in order."""
OPEN = 1_000_000
"""Number of iterations that opens the gate permanently; more than any job has."""
NOT_MADE_BY_US = "events"
"""Kind of objects that may remain: events outlive their subject by design."""


class GatedJob:
    """The tiny job in namespace `namespace`, with its files in `folder`; `manifest` may be changed before `apply`."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, *, forgiven: int, **more: Any) -> None:
        """`forgiven`: the job's backoffLimit; one more failure fails the job. `more`: arguments of `write_job`."""
        self.cluster, self.folder, self.where = cluster, folder, f"--namespace={namespace}"
        self.manifest = tiny_job(cluster, namespace, folder, **more)
        spec = self.manifest["spec"]
        spec["runPolicy"] = {"backoffLimit": forgiven}
        spec["models"]["reward"]["timeoutSeconds"] = 3600  # the gate may be closed as long as a fault takes
        gated = GATED_REWARD.format(folder=str(folder), record=RECORD, gate=GATE)
        (folder / "reward.py").write_text(gated + local_job.REWARD.replace("def score(", "def digits("))
        self.allow(0)

    def apply(self) -> None:
        """Apply the manifest with kubectl."""
        self.cluster.apply(self.manifest)

    def allow(self, iterations: int) -> None:
        """Let the job train until this number of iterations is trained."""
        partial = self.folder / f"{GATE}.partial"
        partial.write_text(str(iterations))
        partial.replace(self.folder / GATE)

    def trained(self) -> int:
        """Return the number of trained iterations."""
        path = self.folder / RECORD
        return path.read_text().count("\n") if path.exists() else 0

    def seen(self) -> dict[str, Any]:
        """Return the RLHFJob; empty while the API server does not answer."""
        return self.get("rlhfjob", NAME)

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition; empty if it is missing or cannot be read."""
        return condition(self.seen(), kind)

    def restarts(self) -> tuple[int, int]:
        """Return (failures, disruptions) of the status; (-1, -1) while it cannot be read."""
        counts = self.seen().get("status", {}).get("restarts")
        return (counts["failures"], counts["disruptions"]) if counts else (-1, -1)

    def pod(self, worker: str) -> dict[str, Any]:
        """Return the pod of a worker; empty if there is none, or the API server does not answer."""
        return self.get("pod", f"{NAME}-{worker}")

    def container(self, worker: str) -> str:
        """Return the id of its running container; empty if none runs, or if its pod is terminating."""
        pod = self.pod(worker)
        if not pod or "deletionTimestamp" in pod["metadata"]:
            return ""
        result = (
            container_status
            for container_status in pod["status"].get("containerStatuses", [])
            if container_status["state"].get("running")
        )
        return next((str(item["containerID"]).rpartition("/")[2] for item in result), "")

    def series(self, name: str, **labels: str) -> float:
        """Return the sum of the coordinator's series with these labels; -1 while it does not answer."""
        samples = scraped(self.address())
        return total(samples, name, **labels) if samples else -1.0

    def address(self) -> str:
        """Return the address of the coordinator; empty while it has none."""
        return str(self.pod("coordinator").get("status", {}).get("podIP", ""))

    def uid(self, name: str) -> str:
        """Return the uid of an object given as kind/name; empty if there is none."""
        return str(self.get(*name.split("/")).get("metadata", {}).get("uid", ""))

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """Run kubectl in the job's namespace."""
        return self.cluster.kubectl(*arguments, self.where, **options)

    def patch(self, **spec: Any) -> None:
        """Change the spec like `kubectl edit`."""
        self.kubectl("patch", "rlhfjob", NAME, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def get(self, *resource: str) -> dict[str, Any]:
        """Return one object; empty if it is missing or the API server does not answer."""
        text = self.answer("get", *resource, "--ignore-not-found", "--output=json", self.where)
        return dict(json.loads(text)) if text else {}

    def answer(self, *arguments: str) -> str | None:
        """Return kubectl's output; None while the API server does not answer."""
        try:
            return self.cluster.kubectl(*arguments).strip()
        except (ClusterError, subprocess.TimeoutExpired):
            return None

    def left(self) -> list[str]:
        """Return kind/name of every object in the namespace that has the job's name or belongs to it."""
        kinds = self.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
        wanted = ",".join(kind for kind in kinds if not kind.startswith(NOT_MADE_BY_US))
        return sorted(
            f"{item['kind']}/{item['metadata']['name']}"
            for item in json.loads(self.kubectl("get", wanted, "--output=json"))["items"]
            if _of_the_job(item["metadata"])
        )


def scraped(address: str) -> list[Sample]:
    """Return the metrics that the coordinator at an address serves now; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError:
        return []
    return [sample for family in families for sample in family.samples]


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Return the sum of a series over the samples with these labels."""
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def _of_the_job(metadata: dict[str, Any]) -> bool:
    labels, owners = metadata.get("labels", {}), metadata.get("ownerReferences", [])
    named = metadata["name"] == NAME or metadata["name"].startswith(f"{NAME}-")
    return named or labels.get("rlhf.dev/job-name") == NAME or any(owner["kind"] == "RLHFJob" for owner in owners)
