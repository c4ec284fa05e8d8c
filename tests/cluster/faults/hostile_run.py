"""One run with a hostile tenant: three healthy jobs train beside it, and untouchable objects are compared at the end.

Rule: the tenant posts for at least a given time, at a steady pace, and keeps no more pods and jobs than a quota would
allow. The healthy jobs are gated, so that they train from its first object to its last on a machine of any speed. At
the end they are Complete with the weights of `rlhf run`; one operator process served throughout; its memory is flat;
and every compared object has the uid, content and resourceVersion of its creation.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes import client, config
from tests.cluster import images
from tests.cluster.cluster import Cluster
from tests.cluster.faults.hostile import Hostile, Post
from tests.cluster.jobs_in_pods.gated_job import NAME, OPEN, GatedJob
from tests.cluster.operating.job_fixture import ROOT
from tests.cluster.operator_process import OperatorProcess
from tests.cluster.processes import wait_until
from tests.support.jobs.chaos import digest

Json = dict[str, Any]

HEALTHY: Final = 3
"""Number of jobs beside the tenant, each in its own namespace."""
TENANT: Final = "hostile"
KEPT: Final = {"Pod": 60, "RLHFJob": 30}
"""Objects that the tenant leaves, as under a quota; it deletes the oldest beyond that."""
PACE_SECONDS: Final = 0.15
"""Seconds between two posts: about five per second, beside the work for the jobs."""
LEAST_POSTS: Final = 50
"""The tenant stops after more accepted objects than this, on a machine of any speed."""
SAMPLE_SECONDS: Final = 5.0
LEAST_SAMPLES: Final = 9
"""Least number of memory samples while the tenant has its full number of objects, on a machine of any speed."""
FLAT: Final = 1.1
"""Bound of the ratio between the median memory of the last third and of the middle third of the samples. Larger growth
suggests that data of deleted objects is retained.
"""
PATIENCE: Final = 900.0  # seconds for any fact
PATHS: Final = {
    "Pod": "/api/v1/namespaces/{}/pods",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
    "RLHFJob": "/apis/rlhf.dev/v1alpha1/namespaces/{}/rlhfjobs",
}


@dataclass
class TenantOutcome:
    """The result of a run."""

    seed: int
    minutes: float = 0.0
    """Requested minutes."""
    posted: dict[str, int] = field(default_factory=dict)
    """Kind -> number of objects that the API server accepted."""
    refused: int = 0
    """Number of posts that the API server refused."""
    trained: list[int] = field(default_factory=list)
    """Iterations of the healthy jobs while the tenant posted."""
    weights: list[str] = field(default_factory=list)
    restarts: list[tuple[int, int]] = field(default_factory=list)
    """(failures, disruptions) of the healthy jobs."""
    operators: int = 0
    """Number of operator processes; 1: it never restarted."""
    bugs: int = 0
    """Reconciles that failed with an internal error."""
    healthy: bool = False
    """Whether /healthz was ok at the end."""
    memory: list[float] = field(default_factory=list)
    """Resident memory of the operator in MB, every SAMPLE_SECONDS."""
    filling: int = 0
    """Number of first samples while the tenant had fewer objects than its full number."""
    foreign: int = 0
    """Number of compared objects."""
    changed: list[str] = field(default_factory=list)
    """Compared objects that have changed, or that our field managers wrote to."""
    seconds: float = 0.0

    @property
    def growth(self) -> float:
        """Return the median memory of the last third divided by that of the middle third, without the filling phase."""
        steady = self.memory[self.filling :]
        third = len(steady) // 3
        if not third:
            return 0.0
        return statistics.median(steady[-third:]) / statistics.median(steady[third:-third])

    @property
    def flat(self) -> bool:
        """Return whether memory did not grow."""
        return 0.0 < self.growth <= FLAT

    def written(self) -> Json:
        """Return the result as JSON."""
        return asdict(self) | {"growth": round(self.growth, 3), "flat": self.flat}


class Tenant:
    """Posts objects, and remembers those that must stay."""

    def __init__(self, cluster: Cluster, namespace: str, outcome: TenantOutcome) -> None:
        self._api: Any = config.new_client_from_config(str(cluster.kubeconfig))
        self._namespace, self._outcome = namespace, outcome
        self._posted = Counter[str]()
        self._kept: dict[str, deque[str]] = {kind: deque() for kind in KEPT}
        self.foreign: dict[tuple[str, str, str], Json] = {}
        """(namespace, kind, name) -> object as the API server returned it."""

    @property
    def full(self) -> bool:
        """Return whether it has its full number of objects, so that a new one replaces an older one."""
        return all(len(self._kept[kind]) >= most for kind, most in KEPT.items())

    def ask(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Send one request; raises ApiException."""
        url = self._api.configuration.host + path
        answer = self._api.call_api(method, url, header_params={"Content-Type": kind}, body=body)
        content = answer.read()
        if answer.status >= 300:
            raise client.ApiException(status=answer.status, reason=content[:200])
        return dict(json.loads(content))

    def post(self, posted: Post) -> None:
        """Post an object; a refusal is only counted."""
        name = str(posted.body["metadata"]["name"])
        place = PATHS[posted.kind].format(self._namespace)
        try:
            if posted.edit and name in self._kept["RLHFJob"]:
                spec = {"spec": {"generation": posted.body["spec"]["generation"]}}
                self.ask("PATCH", f"{place}/{name}", spec, "application/merge-patch+json")
            else:
                self._created(posted, self.ask("POST", place, posted.body))
            if posted.status is not None:
                patch = {"status": posted.status}
                self.ask("PATCH", f"{place}/{name}/status", patch, "application/strategic-merge-patch+json")
        except client.ApiException:
            self._outcome.refused += 1
        self._outcome.posted = dict(self._posted)

    def _created(self, posted: Post, answer: Json) -> None:
        self._posted[posted.kind] += 1
        name = str(posted.body["metadata"]["name"])
        if posted.foreign:
            self.foreign[self._namespace, posted.kind, name] = answer
        if posted.kind in self._kept:
            names = self._kept[posted.kind]
            names.append(name)
            if len(names) > KEPT[posted.kind]:
                self._delete(posted.kind, names.popleft())

    def _delete(self, kind: str, name: str) -> None:
        options = {"propagationPolicy": "Background"} | ({"gracePeriodSeconds": 0} if kind == "Pod" else {})
        try:
            self.ask("DELETE", f"{PATHS[kind].format(self._namespace)}/{name}", options)
        except client.ApiException:
            self._outcome.refused += 1

    def guard(self, body: Json) -> None:
        """Create an object of a user without jobs."""
        meta = body["metadata"]
        answer = self.ask("POST", PATHS[body["kind"]].format(meta["namespace"]), body)
        self.foreign[meta["namespace"], body["kind"], meta["name"]] = answer

    def compare(self) -> list[str]:
        """Return the foreign objects that have changed, and the tenant's pods that our field managers wrote to."""
        result = []
        for (namespace, kind, name), before in self.foreign.items():
            try:
                after = self.ask("GET", f"{PATHS[kind].format(namespace)}/{name}")
            except client.ApiException as error:
                result.append(f"{kind} {namespace}/{name}: {error.status}")
                continue
            if after != before:
                result.append(f"{kind} {namespace}/{name}: {_differs(before, after)}")
        for item in self.ask("GET", PATHS["Pod"].format(self._namespace))["items"]:
            managers = {entry["manager"] for entry in item["metadata"].get("managedFields") or []}
            written = sorted(manager for manager in managers if manager.startswith("rlhf-operator"))
            if written and not _of_a_job(item):
                result.append(f"Pod {item['metadata']['name']}: written by {', '.join(written)}")
        return result


def _of_a_job(pod: Json) -> bool:
    """Return whether the operator created it for a job of the tenant."""
    managed = pod["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by")
    return bool(managed == "rlhf-operator")


def _differs(before: Json, after: Json) -> str:
    reported = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return f"{', '.join(sorted(reported))} changed; owners: {after['metadata'].get('ownerReferences')}"


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


def run(cluster: Cluster, folder: Path, iterations: int, outcome: TenantOutcome, *, minutes: float) -> None:
    """Run the tenant for `minutes` beside healthy jobs with `iterations`; raises if one fails or the operator ends."""
    start, outcome.minutes = time.monotonic(), minutes
    places = [f"healthy-{outcome.seed}-{number}" for number in range(HEALTHY)]
    arguments = (f"--coordinator-image={images.MOUNTED}", f"--worker-image={images.MOUNTED}")
    jobs = [_job(cluster, place, folder / place, iterations) for place in places]
    cluster.add_namespace(TENANT)
    tenant = Tenant(cluster, TENANT, outcome)
    for place in (*places, TENANT):
        for body in _unrelated(place):
            tenant.guard(body)
    # An operator with a Lease may lose it on a busy machine and restart for that reason rather than because of the
    # tenant.
    with OperatorProcess(cluster, *arguments, "--no-leader-election") as operator:
        outcome.operators, pid = 1, operator.pid
        for job in jobs:
            job.apply()
            job.allow(1)
        wait_until("the healthy jobs to train", lambda: all(job.trained() for job in jobs), PATIENCE, every=1)
        targets = [(NAME, job.uid(f"rlhfjob/{NAME}")) for job in jobs]
        hostile = Hostile(outcome.seed, TENANT, _manifest(), targets, images.PYTHON)
        _post(tenant, hostile, operator, jobs, iterations, outcome)
        for job in jobs:
            job.allow(OPEN)

        def complete() -> bool:
            failed = [job.condition("Failed").get("message") for job in jobs]
            assert not any(job.condition("Failed").get("status") == "True" for job in jobs), failed
            return all(job.condition("Complete").get("status") == "True" for job in jobs)

        wait_until("the healthy jobs to be Complete", complete, PATIENCE, check=operator.check, every=1)
        outcome.healthy = operator.healthy()
        outcome.operators += operator.pid != pid
        outcome.bugs = operator.log.read_text(errors="replace").count("reconcile failed")
        outcome.restarts = [job.restarts() for job in jobs]
        outcome.weights = [digest(job.folder / "checkpoints") for job in jobs]
        outcome.foreign, outcome.changed = len(tenant.foreign), tenant.compare()
    outcome.seconds = round(time.monotonic() - start, 1)


def _post(
    tenant: Tenant,
    hostile: Hostile,
    operator: OperatorProcess,
    jobs: list[GatedJob],
    iterations: int,
    outcome: TenantOutcome,
) -> None:
    begun = sampled = time.monotonic()
    until = begun + outcome.minutes * 60
    for move in hostile.moves():
        for item in move:
            tenant.post(item)
            time.sleep(PACE_SECONDS)
        now = time.monotonic()
        if now - sampled >= SAMPLE_SECONDS:
            sampled = now
            operator.check()
            outcome.memory.append(round(resident(operator.pid), 1))
            outcome.filling += not tenant.full
            outcome.trained = [job.trained() for job in jobs]
            share = min((now - begun) / (outcome.minutes * 60), 1.0)
            for job in jobs:
                job.allow(1 + int(share * (iterations - 1)))
            print(f"[{now - begun:6.1f} s] {outcome.memory[-1]} MB, trained {outcome.trained}", flush=True)
        steady = len(outcome.memory) - outcome.filling
        if now >= until and steady >= LEAST_SAMPLES and sum(outcome.posted.values()) > LEAST_POSTS:
            return
        assert now < begun + outcome.minutes * 60 + PATIENCE, f"the tenant has posted {outcome.posted} and keeps on"


def _job(cluster: Cluster, place: str, folder: Path, iterations: int) -> GatedJob:
    job = GatedJob(cluster, place, folder, forgiven=1000, iterations=iterations)
    spec = job.manifest["spec"]
    spec["generation"]["replicas"] = 1
    # Three coordinators that each request a core would wait for each other on a small machine.
    small = {"name": "worker", "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}
    spec["coordinator"] = {"template": {"spec": {"containers": [small]}}}
    return job


def _manifest() -> Json:
    """Return a valid job for the tenant to change."""
    job: Json = yaml.safe_load((ROOT / "examples" / "ppo.yaml").read_text())
    job["spec"] |= {"generation": {"replicas": 2}, "inference": {"replicas": 1}}
    job["spec"]["training"] = {"parallelism": {"pipeline": 2}, "microBatchSize": 8}
    return job


def _unrelated(namespace: str) -> list[Json]:
    """Return objects that anybody may have in a namespace, with names that jobs might derive."""
    core: list[Json] = [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "wild-certificates"}, "stringData": {"a": "b"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings-job"}, "data": {"a": "b"}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "db"}, "spec": {"ports": [{"port": 5432}]}},
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "default-deny"},
            "spec": {"podSelector": {"matchLabels": {"app": "db"}}, "policyTypes": ["Ingress"]},
        },
    ]
    return [item | {"metadata": {**item["metadata"], "namespace": namespace}} for item in core]


def load() -> Json:
    """Return the load of the machine."""
    return {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
