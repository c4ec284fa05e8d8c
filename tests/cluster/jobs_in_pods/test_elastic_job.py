"""Pods join, leave, and gather the long tail while iterations of a real job continue, with bitwise equal results.

Rule: generation pods get little processor time when an iteration must last until the cluster has observed it, and the
gate in the reward keeps it open. Watches observe the pool's short-lived label.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import environment, images
from tests.cluster.cluster import Cluster
from tests.cluster.faults.chaos_faults import Timer
from tests.cluster.jobs_in_pods.gated_job import NAME, OPEN, GatedJob, scraped, total
from tests.cluster.jobs_in_pods.undisturbed import Undisturbed
from tests.cluster.node import Node
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.support.jobs.chaos import digest

from rlhf_coordinator.reports.trackers import timeline_json
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

pytestmark = pytest.mark.full


ROOT = Path(__file__).parents[3]
PATIENCE = 600.0  # seconds for any one fact
SHAPE = {"iterations": 4, "batch": 32, "responses": 300}
"""Size of the job."""
ROWS = 3
"""Samples that a worker decodes at once. The others wait, and are left for pods that join."""
FUSION = {"interStage": {"mode": "Fixed", "threshold": ROWS, "pool": 1, "transfer": "KV"}}
LOOK_SECONDS = 30.0  # between two checks whether the job has failed
POOL = "rlhf.dev/migration-pool"
SLOW, CRAWL, FREE = 10, 1, -1
"""Processor time of a container in percent of a core; -1 is no limit."""


@pytest.fixture(scope="module")
def node(node_cluster: Cluster) -> Node:
    """Return the real node, with the definition and an image that finds this machine's environment."""
    node_cluster.nodes["n1"].import_image(images.mounted(Path(environment.PYTHON).parent))
    node_cluster.define(ROOT / "crds" / "rlhfjobs.yaml")
    return node_cluster.nodes["n1"]


@pytest.fixture
def operator(node_cluster: Cluster, node: Node) -> Iterator[OperatorProcess]:
    """Yield the operator beside it."""
    image = images.MOUNTED
    arguments = (f"--coordinator-image={image}", f"--worker-image={image}")
    # An operator that loses its Lease on a busy machine would restart with new counts.
    with OperatorProcess(node_cluster, *arguments, "--no-leader-election") as process:
        yield process


class Elastic:
    """The job under test, with its observations."""

    def __init__(self, job: GatedJob, node: Node, operator: OperatorProcess) -> None:
        self.job, self._node, self._operator = job, node, operator
        self._look, self._address = Timer(0), ""
        self._containers: dict[str, str] = {}

    @property
    def run(self) -> Path:
        """Return its run folder."""
        return self.job.folder / "checkpoints" / "run"

    def until(self, event: str, holds: Callable[[], object], every: float = 0.5) -> None:
        """Wait for a fact; raise if the job has failed."""
        wait_until(event, holds, PATIENCE, check=self._check, every=every)

    def limit(self, percent: int, *workers: str) -> None:
        """Limit containers to a percentage of a core, as on a busy node."""
        quota = percent * 1000 if percent > 0 else percent  # microseconds in 100 ms
        for worker in workers:
            container = self._running(worker)
            self._node.run(["runc", "--root=/run/containerd/runc/k8s.io", "update", f"--cpu-quota={quota}", container])

    def hold_as_they_join(self, *workers: str) -> None:
        """Keep each worker from ending the iteration alone until all of them have decoded.

        A worker is slow from its first command on, and at a crawl from its first tokens on.
        """
        new, slow = set(workers), set[str]()

        def all_decode() -> bool:
            self._address = self._address or self.job.address()
            samples = scraped(self._address)
            for worker in sorted(new):
                if worker not in slow and total(samples, "rlhf_worker_state", worker=worker, state="Busy"):
                    self.limit(SLOW, worker)
                    slow.add(worker)
                if total(samples, "rlhf_worker_tokens_per_second", worker=worker):
                    self.limit(CRAWL, worker)
                    new.remove(worker)
            return not new

        self.until(f"{' and '.join(workers)} to decode", all_decode, every=0.1)

    def _running(self, worker: str) -> str:
        """Return the id of a worker's container, once the API server has it.

        It is queried once, because none of them restarts and a tail is short.
        """
        self._containers[worker] = self._containers.get(worker) or self._found(worker)
        return self._containers[worker]

    def _found(self, worker: str) -> str:
        container = ""

        def runs() -> bool:
            nonlocal container
            container = self.job.container(worker)
            return bool(container)

        self.until(f"{worker} to run", runs)
        return container

    def has(self, generation: int, inference: int) -> bool:
        """Return whether the groups have these sizes, all their workers are ready, and no resize is under way."""
        groups = {group["name"]: group for group in self.job.seen().get("status", {}).get("groups", [])}
        sizes = [(groups[name]["desired"], groups[name]["ready"]) for name in ("generation", "inference")]
        settled = self.job.condition("Resizing").get("status") == "False"
        return sizes == [(generation, generation), (inference, inference)] and settled

    def decoding(self, iteration: int, least: int) -> bool:
        """Return whether at least `least` samples of this iteration are being decoded.

        It queries only the coordinator, because this state lasts for seconds.
        """
        self._address = self._address or self.job.address()
        samples = scraped(self._address)
        in_it = total(samples, "rlhf_iteration") == iteration
        return in_it and total(samples, "rlhf_samples", state="decoding") >= least

    def events(self, *kinds: str) -> list[dict[str, str]]:
        """Return the events of the run of these kinds."""
        lines = (self.run / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] in kinds]

    def labelled(self) -> list[str]:
        """Return the pods with the label of the pool."""
        return self.job.kubectl("get", "pods", f"--selector={POOL}=true", "--output=name").split()

    def metric(self, name: str) -> float:
        """Return a metric of the operator for this job."""
        return self._operator.metric(name, namespace=self.job.where.partition("=")[2])

    def _check(self) -> None:
        self._operator.check()
        if self._look():
            self._look = Timer(LOOK_SECONDS)
            failed = self.job.condition("Failed")
            assert failed.get("status") != "True", failed["message"]


@pytest.fixture
def elastic(node_cluster: Cluster, node: Node, operator: OperatorProcess, tmp_path: Path) -> Elastic:
    """Return the job, stopped in its first iteration by the gate, with all responses decoded."""
    job = GatedJob(node_cluster, "elastic", tmp_path / "elastic", forgiven=0, **SHAPE)
    spec = job.manifest["spec"]
    spec["generation"]["maxBatchSize"] = ROWS
    spec["generation"]["speculation"] = {
        "mode": "Disabled"
    }  # drafts would end a tail before the cluster has observed it
    spec["fusion"] = FUSION
    spec["runPolicy"]["workerTimeoutSeconds"] = int(PATIENCE)  # a worker that crawls is not lost
    job.apply()
    result = Elastic(job, node, operator)
    result.until("all responses of the first iteration", lambda: job.series("rlhf_unfinished_samples") == 0)
    return result


def outcome(run: Path) -> list[dict[str, Any]]:
    """Return the results of every iteration, independent of the worker."""
    names = ("iteration", "reward", "tokens", "kl", "kl_per_token", "response_tokens_max", "samples/truncated")
    return [{name: line.get(name) for name in names} for line in read_metrics(run / "metrics.jsonl")]


def test_pods_join_gather_and_leave_in_the_middle_of_iterations_and_no_bit_changes(
    node_cluster: Cluster, operator: OperatorProcess, elastic: Elastic, tmp_path: Path
) -> None:
    job = elastic.job
    table, pods = tmp_path / "rlhf.watch", tmp_path / "pods.watch"
    text = 'jsonpath={.metadata.name} {.metadata.labels.rlhf\\.dev/migration-pool}{"\\n"}'
    watches = [node_cluster.watch(table, "rlhf", job.where), node_cluster.watch(pods, "pods", job.where, "-o", text)]
    try:
        with Undisturbed(
            tmp_path / "undisturbed", "--set=spec.fusion.interStage.mode=Disabled", **SHAPE
        ) as undisturbed:
            _grow_and_gather(elastic, pods)
            _shrink(elastic)
            job.allow(OPEN)
            elastic.until("Complete", lambda: job.condition("Complete").get("status") == "True")
            run = undisturbed.finished()
    finally:
        for watch in watches:
            watch.kill()
            watch.wait()
    assert digest(job.folder / "checkpoints") == digest(run / "checkpoints") != ""
    assert outcome(elastic.run) == outcome(run)

    status = job.seen()["status"]
    assert (status["restarts"]["failures"], status["restarts"]["disruptions"]) == (0, 0)
    assert {group["restarts"] for group in status["groups"]} == {0}
    assert elastic.events("worker-restarted", "worker-lost", "worker-failed", "migration-failed") == []
    left = {event["worker"]: event["message"] for event in elastic.events("worker-left")}
    assert set(left) == {"generation-1", "generation-2", "generation-3"}
    assert any("; 0 samples" not in message for message in left.values()), "they had samples, and gave them back"
    spans = list(timeline_json.read_spans(elastic.run / timeline_json.FILE))
    did = {(span.iteration, span.worker, span.name.partition("/")[0]) for span in spans}
    assert did >= {(1, "generation-2", "decode"), (1, "generation-3", "decode")}, "they joined the iteration"
    # It joins in the third iteration, whose remaining scores inference-0 may already have.
    assert ("inference-1", "score") in {(worker, name) for _, worker, name in did}
    formed = elastic.events("pool-formed")
    members = {f"{NAME}-{worker}" for event in formed for worker in event["workers"].split(",")}
    shown = {line.split()[0] for line in pods.read_text().splitlines() if line.endswith(" true")}
    assert shown
    assert shown <= members
    assert re.search(r"\s1/4\s", table.read_text()), table.read_text()
    elastic.until("two resizes", lambda: operator.metric("rlhf_pool_resize_duration_seconds_count") >= 2)
    elastic.until(
        "the event", lambda: "PoolFormed" in job.kubectl("get", "events", "--output=jsonpath={.items[*].reason}")
    )


def _grow_and_gather(elastic: Elastic, pods: Path) -> None:
    """Run the second iteration: two pods join, then its tail consolidates, and pods get the label and lose it."""
    job = elastic.job
    old, new = ("generation-0", "generation-1"), ("generation-2", "generation-3")
    elastic.until("the label of the first iteration's pool to go", lambda: elastic.labelled() == [])
    before, seen = len(elastic.events("pool-formed")), len(pods.read_text())
    elastic.limit(CRAWL, *old)
    job.allow(1)
    elastic.until("samples of the second iteration", lambda: elastic.decoding(1, 2 * ROWS))
    job.kubectl("scale", f"rlhfjob/{NAME}", "--replicas=4")
    elastic.hold_as_they_join(*new)
    elastic.until("4 generation workers", lambda: elastic.has(4, 1))
    # The tail may gather on any of them; one at full speed ends it before the operator reads the coordinator again.
    elastic.limit(SLOW, *new, *old)
    elastic.until("the tail to gather", lambda: len(elastic.events("pool-formed")) > before, every=0.1)
    elastic.limit(CRAWL, *old, *new)
    elastic.until("the label on a pod", lambda: " true\n" in pods.read_text()[seen:])
    elastic.until("the metric", lambda: elastic.metric("rlhf_pool_replicas") == 1)
    status = job.seen()["status"]
    assert status["migrationPool"]["threshold"] == ROWS
    assert status["plan"]["interStage"] == "as set in the manifest"
    elastic.limit(SLOW, *old, *new)


def _shrink(elastic: Elastic) -> None:
    """Run the third iteration: three of four generation pods leave while they decode, and inference gets another."""
    job = elastic.job
    job.allow(2)
    elastic.until("samples of the third iteration", lambda: elastic.decoding(2, 3 * ROWS), every=0.1)
    job.patch(generation={"replicas": 1}, inference={"replicas": 2})
    elastic.until("1 generation and 2 inference workers", lambda: elastic.has(1, 2))
    elastic.limit(FREE, "generation-0")
    elastic.until("no label", lambda: elastic.labelled() == [])
