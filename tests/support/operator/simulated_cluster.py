"""A job's part of a cluster in memory, as bodies of the API server: carries out plans and plays the kubelet.

For tests of `reconcile`; other tests check that the real API server accepts the plans.
"""

import copy
import functools
import itertools
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from rlhf_common import names
from rlhf_operator.gang.apis import ServedApis, kind_of
from rlhf_operator.gang.kueue_queue import KueueState, QueuePriority
from rlhf_operator.gang.kueue_workload import KueueWorkload, PodPlacement
from rlhf_operator.manifests import Images, identity
from rlhf_operator.reconcile import CoordinatorReading, ObservedJob, ObservedPod, ReconcilePlan, pod_of, reconcile
from rlhf_operator.reconcile.last_applied import FINGERPRINT
from rlhf_operator.reconcile.observed.stored_revision import StoredRevision
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.reconcile.timestamps import rfc3339
from rlhf_operator.untrusted import UnreadableObject

Json = dict[str, Any]

ROOT = Path(__file__).parents[3]
START = datetime(2026, 8, 22, 10, 0, 0, tzinfo=UTC)
CONFIG_MAP = ("ConfigMap", "job-job")
"""(kind, name) of the job's ConfigMap."""
IMAGES = Images("example.org/operator:1", "example.org/worker:1")
"""Images of an installation."""
EVERYBODY = ["coordinator", "generation-0", "generation-1", "inference-0", "training-0", "training-1"]
"""Pods of the job, without its name."""


@functools.cache
def _example() -> Json:
    """Return the example of PPO; callers copy it before they change it."""
    return dict(yaml.safe_load((ROOT / "examples/ppo.yaml").read_text()))


def stored_job(**spec: Any) -> Json:
    """Return a stored RLHFJob with 2 generation, 1 inference and 2 training workers; `spec` replaces fields."""
    job = copy.deepcopy(_example())
    job["spec"] |= {
        "generation": {"replicas": 2},
        "inference": {"replicas": 1},
        "training": {"parallelism": {"pipeline": 2}, "microBatchSize": 8},
        "runPolicy": {"backoffLimit": 2},
    }
    job["spec"] |= {"suspend": False} | spec
    _mount_checkpoints(job["spec"])
    job["metadata"] = {"name": "job", "namespace": "team", "uid": "job-uid", "generation": 1, "resourceVersion": "1"}
    return job


FILES: Json = {
    "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": "files"}}],
    "containers": [{"name": "worker", "volumeMounts": [{"name": "files", "mountPath": "/checkpoints"}]}],
}
"""Part of a pod template: the volume of the checkpoints."""


def template_with_image(image: str) -> Json:
    """Return a pod template with the volume of the checkpoints, as ranks need it, and that image."""
    [container] = FILES["containers"]
    return {"spec": FILES | {"containers": [container | {"image": image}]}}


def _mount_checkpoints(spec: Json) -> None:
    """Add the volume that a job with checkpoints needs if its ranks have no template."""
    ranks = "generation" if spec.get("placement") == "Colocated" else "training"
    if spec.get("checkpoints") and "template" not in spec[ranks]:
        spec[ranks] = spec[ranks] | {"template": {"spec": copy.deepcopy(FILES)}}


class SimulatedCluster:
    """One job and its objects."""

    def __init__(self, **spec: Any) -> None:
        self.job = stored_job(**spec)
        self.now = START
        self.pods: dict[str, Json] = {}
        self.applied: dict[tuple[str, str], str] = {}
        self.certificates = False
        self.reading: CoordinatorReading | None = None
        self.refusals: dict[str, str] = {}
        self.dry_run_problem = ""
        self.api_failure = ""
        self.occupied: dict[str, str] = {}
        self.written: datetime | None = None
        self.events: list[str] = []
        self.reported: list[dict[str, int]] = []
        self.deleted = False
        self.served = ServedApis()
        self.workload: KueueWorkload | None = None
        self.flavors: dict[str, PodPlacement] = {}
        self.priority: QueuePriority | None = None
        self.elastic = False
        """Whether the job has Kueue's annotation for growth by slices."""
        self.taken: frozenset[str] = frozenset()
        """Names of pods of others."""
        self.bodies: dict[tuple[str, str], Json] = {}
        self.images = Images()
        self._numbers = itertools.count()

    # -- the operator

    def plan(self, gone: Collection[str] = ()) -> ReconcilePlan:
        """Return the plan of reconcile now; `gone`: pods whose end arrives during the observation."""
        read = [pod_of(body) for body in self.pods.values()]
        result = [pod for pod in read if isinstance(pod, ObservedPod)]
        observed = ObservedJob(
            stored_revision=self.stored_revision(),
            images=self.images,
            pods={pod.name: pod for pod in result},
            taken=self.taken | {pod.name for pod in read if isinstance(pod, UnreadableObject)},
            unreadable=tuple(("Pod", pod) for pod in read if isinstance(pod, UnreadableObject)),
            ended=tuple(pod for pod in result if pod.name in gone),
            applied=self.applied,
            certificates_expire=START + timedelta(days=200) if self.certificates else None,
            reading=self.reading,
            refusals=self.refusals,
            api_failure=self.api_failure,
            dry_run_problem=self.dry_run_problem,
            occupied=self.occupied,
            status_written=self.written,
            served=self.served,
            queue=KueueState(self.workload, self.flavors, self.priority, elastic=self.elastic),
        )
        return reconcile(copy.deepcopy(self.job), observed, self.now)

    def stored_revision(self) -> StoredRevision:
        """Return the stored revision in the ConfigMap."""
        body = self.bodies.get(("ConfigMap", "job-job"), {})
        return StoredRevision.from_data(body.get("data", {}))

    def carry_out(self, plan: ReconcilePlan, *, only_status: bool = False) -> None:
        """Carry out a plan in the controller's order; `only_status`: the operator dies after the status."""
        if plan.status is not None:
            self.job["status"] = copy.deepcopy(plan.status)
            self.written = self.now
            self.events += [event.reason for event in plan.events]
        if only_status:
            return
        if plan.finalizer is not None:
            self.job["metadata"]["finalizers"] = [names.FINALIZER] if plan.finalizer else []
        if plan.delete_job:
            self.deleted = True
        for item in plan.delete:
            body = self.pods[item.name]
            assert body["metadata"]["uid"] == item.uid
            if item.force and not body["metadata"].get("finalizers"):
                del self.pods[item.name]
            elif item.force:
                self.ask_deletion(item.name, 0)
            else:
                self.ask_deletion(item.name, 30 if item.grace is None else item.grace)
        if plan.resize is not None and self.reading is not None:
            self.reading = replace(self.reading, replicas={**self.reading.replicas, **plan.resize})
            self.reported.append(dict(plan.resize))
        for label in plan.labels:
            body = self.pods[label.name]
            assert body["metadata"]["uid"] == label.uid
            body["metadata"]["labels"] |= {names.LABEL_POOL: "true"}
            if not label.pooled:
                del body["metadata"]["labels"][names.LABEL_POOL]
        self.certificates = self.certificates or plan.issue_certificates
        self._apply(plan)

    def _apply(self, plan: ReconcilePlan) -> None:
        for place in plan.withdraw:
            del self.applied[place], self.bodies[place]
        for manifest in plan.apply:
            kind, name = kind_of(manifest), manifest["metadata"]["name"]
            if kind == "Pod":
                assert name not in self.pods, f"{name} exists"
                self.pods[name] = self._created(manifest)
            else:
                self.applied[kind, name] = manifest["metadata"]["annotations"][FINGERPRINT]
                self.bodies[kind, name] = manifest

    def settle(self, rounds: int = 12) -> ReconcilePlan:
        """Repeat until nothing is left to do, without passing time; return the last plan."""
        for _ in range(rounds):
            plan = self.plan()
            if plan.idle:
                return plan
            self.carry_out(plan)
        raise AssertionError(f"still busy after {rounds} rounds: {plan}")

    def later(self, seconds: float) -> None:
        """Let time pass."""
        self.now += timedelta(seconds=seconds)

    # -- the cluster

    def _created(self, manifest: Json) -> Json:
        body = copy.deepcopy(manifest)
        body["metadata"] |= {
            "uid": f"uid-{next(self._numbers)}",
            "resourceVersion": str(next(self._numbers)),
            "creationTimestamp": rfc3339(self.now),
        }
        body["status"] = {"phase": "Pending"}
        return body

    def name(self, worker: str) -> str:
        """Return the pod name of `generation-0`."""
        parsed = parse_job(self.job).job
        assert parsed is not None
        return f"{identity.service_name(parsed)}-{worker}"

    def run(self, *workers: str) -> None:
        """Let the kubelet start pods; all pending ones if none is named."""
        for name, body in self.pods.items():
            wanted = (
                name in {self.name(worker) for worker in workers} if workers else body["status"]["phase"] == "Pending"
            )
            if wanted and not body["metadata"].get("deletionTimestamp"):
                body["status"] |= {
                    "phase": "Running",
                    "podIP": "10.0.0.1",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [{"name": "worker", "restartCount": 0, "state": self._running()}],
                }

    def _running(self) -> Json:
        return {"running": {"startedAt": rfc3339(self.now)}}

    def end(self, worker: str, code: int, *, message: str = "", reason: str = "Error", restarted: bool = True) -> None:
        """End our container of a pod; the kubelet restarts it unless it ended well."""
        status = self.pods[self.name(worker)]["status"]
        others = [each for each in status.get("containerStatuses") or [] if each["name"] != "worker"]
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else reason,
            "message": message,
            "finishedAt": rfc3339(self.now),
            "containerID": f"containerd://{next(self._numbers):016x}ffff",
        }
        ours: Json = {"name": "worker", "restartCount": 1, "lastState": {"terminated": ended}}
        if code == 0:
            # The phase follows later, when the kubelet has ended the pod.
            ours, status["phase"] = {"name": "worker", "state": {"terminated": ended}}, "Running"
        elif restarted:
            ours["state"] = self._running()
        else:
            ours["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
        status["containerStatuses"] = [ours, *others]

    def add_sidecar(self, *workers: str) -> None:
        """Let another container run that ends when the kubelet kills it; in all pods if none is named."""
        for name in [self.name(worker) for worker in workers] or list(self.pods):
            sidecar = {"name": "mesh", "restartCount": 0, "state": self._running()}
            statuses = self.pods[name]["status"]["containerStatuses"]
            statuses[:] = [*(each for each in statuses if each["name"] != "mesh"), sidecar]

    def end_for_good(self, worker: str, code: int) -> None:
        """End our container of a deleted pod, in which the kubelet restarts nothing."""
        self.end(worker, code)
        status = self.pods[self.name(worker)]["status"]
        ours, *others = status["containerStatuses"]
        ended = ours.get("lastState") or ours["state"]
        status["containerStatuses"] = [{"name": "worker", "state": ended}, *others]
        status["conditions"] = [{"type": "Ready", "status": "False"}]

    def evict(self, worker: str) -> None:
        """Let the kubelet fail the pod as a whole."""
        target = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        self.pods[self.name(worker)]["status"] |= {"phase": "Failed", "reason": "Evicted", "conditions": [target]}

    def fail(self, worker: str, reason: str, message: str, *, killed: bool = False) -> None:
        """Let the kubelet fail the pod for its own reasons; `killed`: a container was running."""
        status = self.pods[self.name(worker)]["status"]
        status |= {"phase": "Failed", "reason": reason, "message": message, "conditions": [], "containerStatuses": []}
        if killed:
            status["containerStatuses"] = [{"name": "worker", "state": {"terminated": self.killed()}}]

    def killed(self) -> Json:
        """Return the end of a container that the kubelet kills."""
        name = f"containerd://{next(self._numbers):016x}ffff"
        return {"exitCode": 137, "reason": "Error", "finishedAt": rfc3339(self.now), "containerID": name}

    def wait_with(self, worker: str, reason: str, message: str = "") -> None:
        """Keep the pod's container from starting."""
        state = {"waiting": {"reason": reason, "message": message}}
        status = self.pods[self.name(worker)]["status"]
        status["containerStatuses"] = [{"name": "worker", "state": state}]
        if not status.get("conditions"):
            placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(self.now)}
            status["conditions"] = [placed]

    def gate(self, worker: str, *gates: str) -> None:
        """Give the pod exactly these scheduling gates, as a webhook would."""
        body = self.pods[self.name(worker)]
        body["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]
        placed = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        body["status"]["conditions"] = [placed] if gates else []

    def cannot_schedule(self, worker: str, message: str) -> None:
        """Let the scheduler find no node."""
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.pods[self.name(worker)]["status"]["conditions"] = [condition]

    def ask_deletion(self, name: str, grace: int = 30) -> None:
        """Request the deletion of a pod; it ends when its kubelet says so. A later call can shorten its grace."""
        meta = self.pods[name]["metadata"]
        before = meta.get("deletionGracePeriodSeconds", grace + 1)
        if grace < before:
            asked = datetime.fromisoformat(meta["deletionTimestamp"]) if "deletionTimestamp" in meta else None
            began = self.now if asked is None else asked - timedelta(seconds=before)
            meta["deletionTimestamp"] = rfc3339(began + timedelta(seconds=grace))
            meta["deletionGracePeriodSeconds"] = grace

    def finish_deletions(self) -> list[str]:
        """Let kubelets carry out the requested deletions."""
        deleted = {
            name: body["metadata"] for name, body in self.pods.items() if "deletionTimestamp" in body["metadata"]
        }
        gone = [name for name, meta in deleted.items() if not meta.get("finalizers")]
        for name in gone:
            del self.pods[name]
        return gone

    def read(self, phase: str = "Generating", iteration: int = 3, **more: Any) -> None:
        """Let the coordinator answer."""
        working = {"generation": 2, "inference": 1, "training": 2}
        replicas = self.reading.replicas if self.reading else {"generation": 2, "inference": 1, "training": 2}
        coordinator = pod_of(self.pods["job-coordinator"]) if "job-coordinator" in self.pods else None
        run_id = coordinator.run_id if isinstance(coordinator, ObservedPod) else ""
        fields = {"working": working, "replicas": replicas, "run_id": run_id} | more
        self.reading = CoordinatorReading(self.now, phase, iteration, 100, **fields)

    # -- the user's view

    def condition(self, kind: str) -> Json:
        """Return a condition."""
        [found] = [condition for condition in self.job["status"]["conditions"] if condition["type"] == kind]
        return dict(found)

    @property
    def phase(self) -> str:
        """Return the PHASE column."""
        return str(self.condition("Running")["reason"])

    @property
    def running_message(self) -> str:
        """Return the message of the condition Running."""
        return str(self.condition("Running")["message"])

    @property
    def counts(self) -> tuple[int, int]:
        """Return the failures and disruptions counted so far."""
        restarts = self.job["status"]["restarts"]
        return restarts["failures"], restarts["disruptions"]

    def turn(self) -> None:
        """Settle, let leaving pods end, and settle again."""
        self.settle()
        self.finish_deletions()
        self.settle()

    def begin(self) -> "SimulatedCluster":
        """Start all pods."""
        self.settle()
        self.run()
        self.read()
        self.later(11)
        self.read()
        self.settle()
        return self

    def bring_up(self) -> None:
        """End the leaving pods and start the new ones."""
        self.finish_deletions()
        self.settle()
        self.run()
        self.later(11)
        self.read()

    def image(self, worker: str) -> str:
        """Return the image of our container in a pod."""
        return str(self.pods[self.name(worker)]["spec"]["containers"][0]["image"])

    @property
    def deleting(self) -> dict[str, int]:
        """Return the pods under deletion with their grace periods in seconds."""
        metas = [body["metadata"] for body in self.pods.values()]
        return {meta["name"]: meta["deletionGracePeriodSeconds"] for meta in metas if meta.get("deletionTimestamp")}

    @property
    def workers(self) -> list[str]:
        """Return the names of the pods without the job's."""
        return sorted(name.removeprefix("job-") for name in self.pods)
