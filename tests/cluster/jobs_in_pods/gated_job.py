"""The tiny job with a gate in its reward, observed by its files, its coordinator's metrics, and the API server.

The gate is what keeps a job together with what a test does to it, on a machine of any speed: a response is scored only
while no more iterations are trained than the file GATE allows, so a job never runs ahead, and its results do not change
by it. Rule: an API server that is down just then is no error, only nothing seen. How far training is, is read from the
job's own record of iterations, which is there whatever happens to the cluster.
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
"""One line an iteration, each once, in order."""
OPEN = 1_000_000
"""More iterations than any job has: the gate is open to the end."""
NOT_MADE_BY_US = "events"
"""Events outlive what they tell of, by intent."""


class GatedJob:
    """The tiny job in namespace `namespace`, with its files in `folder`; `manifest` may be changed before `apply`."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, *, forgiven: int, **more: Any) -> None:
        """`forgiven`: the job's backoffLimit; one failure more fails the job. `more`: what `write_job` takes."""
        self.cluster, self.folder, self.where = cluster, folder, f"--namespace={namespace}"
        self.manifest = tiny_job(cluster, namespace, folder, **more)
        spec = self.manifest["spec"]
        spec["runPolicy"] = {"backoffLimit": forgiven}
        spec["models"]["reward"]["timeoutSeconds"] = 3600  # the gate may be closed for as long as a fault takes
        gated = GATED_REWARD.format(folder=str(folder), record=RECORD, gate=GATE)
        (folder / "reward.py").write_text(gated + local_job.REWARD.replace("def score(", "def digits("))
        self.allow(0)

    def apply(self) -> None:
        """kubectl apply."""
        self.cluster.apply(self.manifest)

    def allow(self, iterations: int) -> None:
        """Lets it train until it has trained so many."""
        partial = self.folder / f"{GATE}.partial"
        partial.write_text(str(iterations))
        partial.replace(self.folder / GATE)

    def trained(self) -> int:
        """Iterations trained so far."""
        path = self.folder / RECORD
        return path.read_text().count("\n") if path.exists() else 0

    def seen(self) -> dict[str, Any]:
        """The RLHFJob; empty while the API server does not answer."""
        return self.get("rlhfjob", NAME)

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition; empty when it is not there, or not to be read."""
        return condition(self.seen(), kind)

    def restarts(self) -> tuple[int, int]:
        """(failures, disruptions) as the status counts them; (-1, -1) while they cannot be read."""
        counts = self.seen().get("status", {}).get("restarts")
        return (counts["failures"], counts["disruptions"]) if counts else (-1, -1)

    def pod(self, worker: str) -> dict[str, Any]:
        """The pod of a worker; empty when there is none, or the API server does not answer."""
        return self.get("pod", f"{NAME}-{worker}")

    def container(self, worker: str) -> str:
        """Id of its running container; empty while none runs, or while its pod is on its way out."""
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
        """Sum of a series of the coordinator's metrics over what has these labels; -1 while it does not answer."""
        samples = scraped(self.address())
        return total(samples, name, **labels) if samples else -1.0

    def address(self) -> str:
        """Of the coordinator; empty while it has none."""
        return str(self.pod("coordinator").get("status", {}).get("podIP", ""))

    def uid(self, name: str) -> str:
        """Uid of an object given as kind/name; empty when there is none."""
        return str(self.get(*name.split("/")).get("metadata", {}).get("uid", ""))

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """kubectl in the job's namespace."""
        return self.cluster.kubectl(*arguments, self.where, **options)

    def patch(self, **spec: Any) -> None:
        """What `kubectl edit` does."""
        self.kubectl("patch", "rlhfjob", NAME, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def get(self, *what: str) -> dict[str, Any]:
        """One object; empty when it is not there or the API server does not answer."""
        text = self.answer("get", *what, "--ignore-not-found", "--output=json", self.where)
        return dict(json.loads(text)) if text else {}

    def answer(self, *arguments: str) -> str | None:
        """What kubectl says; None while the API server does not answer."""
        try:
            return self.cluster.kubectl(*arguments).strip()
        except (ClusterError, subprocess.TimeoutExpired):
            return None

    def left(self) -> list[str]:
        """Kind/name of everything in the namespace that carries the job's name or belongs to it, of any kind."""
        kinds = self.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "--output=name").split()
        wanted = ",".join(kind for kind in kinds if not kind.startswith(NOT_MADE_BY_US))
        return sorted(
            f"{item['kind']}/{item['metadata']['name']}"
            for item in json.loads(self.kubectl("get", wanted, "--output=json"))["items"]
            if _of_the_job(item["metadata"])
        )


def scraped(address: str) -> list[Sample]:
    """What the coordinator at an address serves at this moment; empty while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{address}:{METRICS_PORT}/metrics", timeout=5) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    except OSError:
        return []
    return [sample for family in families for sample in family.samples]


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Sum of a series over what has these labels."""
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def _of_the_job(metadata: dict[str, Any]) -> bool:
    labels, owners = metadata.get("labels", {}), metadata.get("ownerReferences", [])
    named = metadata["name"] == NAME or metadata["name"].startswith(f"{NAME}-")
    return named or labels.get("rlhf.dev/job-name") == NAME or any(owner["kind"] == "RLHFJob" for owner in owners)
