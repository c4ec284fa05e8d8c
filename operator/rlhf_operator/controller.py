"""One turn for one job: gather what is observed, reconcile, carry out the plan, say when to look again.

Rule: decides nothing; `reconcile` does. The status is written first, under the version of the job that it was made
from: when somebody was faster nothing else of the plan is done, and the turn is taken again with the newer version. A
turn may die at any line: the next one sees what was done and goes on from there.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from rlhf_api import names
from rlhf_api.names import Group
from rlhf_operator.certificates import LIFETIME
from rlhf_operator.cluster import CONCURRENCY, Cluster, ClusterError, ConflictError, MissingError, RefusedError
from rlhf_operator.coordinator_client import Coordinators
from rlhf_operator.events import Recorder
from rlhf_operator.gang.apis import Served, kind_of
from rlhf_operator.index import Index
from rlhf_operator.job_certificates import JobCertificates
from rlhf_operator.manifests import Images
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.queueing import Queueing
from rlhf_operator.reconcile import Deletion, Observed, Plan, Pod, PoolLabel, reconcile
from rlhf_operator.reconcile.admission import admit
from rlhf_operator.reconcile.placement import foreign
from rlhf_operator.reward_functions import given
from rlhf_operator.trial import Trials
from rlhf_operator.untrusted import owner_of

log = logging.getLogger(__name__)

Json = dict[str, Any]

AT_ONCE: Final = CONCURRENCY // 2
"""Requests of one job at once: a job of thousands of pods leaves slots to a small one that comes beside it, and an API
server that answers it before long."""
SETTLE_SECONDS: Final = 0.2
"""After a turn that wrote something: what its own writes changed is seen without an event of a watch."""
SOON_SECONDS: Final = 1.0
"""After a conflict: the newer version comes by the watch, this is if it does not."""


class Controller:
    """Turns for the work queue."""

    def __init__(
        self,
        cluster: Cluster,
        index: Index,
        images: Images,
        metrics: OperatorMetrics,
        coordinators: Coordinators,
        recorder: Recorder,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        certificate_lifetime: timedelta = LIFETIME,
    ) -> None:
        self._cluster, self._index, self._images = cluster, index, images
        self._metrics, self._coordinators, self._recorder = metrics, coordinators, recorder
        self._certificates = JobCertificates(cluster, certificate_lifetime)
        self._queueing = Queueing(cluster)
        self._trials = Trials(cluster, images)
        self._clock = clock
        self._refusals: dict[str, dict[str, str]] = {}
        self._written: dict[str, datetime] = {}

    def use(self, served: Served) -> None:
        """APIs of gangs and queues that jobs may use from now on; none before."""
        self._queueing.served = served

    async def turn(self, key: str) -> float | None:
        """Seconds until the next one is needed; None: only when something happens. Raises ClusterError."""
        begun, result = time.perf_counter(), "error"
        try:
            again = await self._turn(key)
            result = "ok"
        except ConflictError:
            again, result = SOON_SECONDS, "conflict"
        except ClusterError as error:
            self._metrics.errors.labels(type(error).__name__).inc()
            log.warning("%s: %s", key, error, extra={"job": key})
            raise
        except Exception:
            self._metrics.errors.labels("Bug").inc()
            log.exception("%s: reconcile failed", key, extra={"job": key})
            raise
        finally:
            self._metrics.reconciles.labels(result).observe(time.perf_counter() - begun)
        return again

    async def _turn(self, key: str) -> float | None:
        job = self._index.job(key)
        if job is None:
            self._forget(key)
            return None
        observed = await self._observe(key, job)
        plan = reconcile(job, observed, self._clock())
        self._metrics.see(job, observed, plan)
        again = await self._carry_out(key, job, plan)
        self._index.settle(key, observed.ended)
        return again

    def _forget(self, key: str) -> None:
        self._coordinators.forget(key)
        self._certificates.forget(key)
        self._trials.forget(key)
        self._refusals.pop(key, None)
        self._written.pop(key, None)
        self._metrics.forget(key)

    async def _observe(self, key: str, job: Json) -> Observed:
        uid, now = str(job["metadata"]["uid"]), self._clock()
        pods, taken = self._index.pods(key, uid)
        expire, verdict = None, ""
        if _at_work(job, pods):
            if not job["metadata"].get("deletionTimestamp"):
                verdict = await self._trials.verdict(key, job, pods)
            starting = not pods or any(each.phase == "Pending" for each in pods.values())
            # The status is written before certificates are issued, so a job without one has none to read.
            held = await self._certificates.current(key, uid, now, starting=starting) if job.get("status") else None
            expire = held.due if held else None
            coordinator = next((each for each in pods.values() if each.group == Group.COORDINATOR), None)
            if held and coordinator and coordinator.active and coordinator.address and coordinator.phase == "Running":
                sign = coordinator.uid, coordinator.ready, coordinator.end
                self._coordinators.refresh(key, coordinator.address, held.certificates, sign)
        else:
            self._coordinators.forget(key)
        reading, unreachable = self._coordinators.latest(key)
        workload = self._index.workload(key, uid)
        return Observed(
            served=self._queueing.served,
            workload=workload,
            flavors=await self._queueing.flavors(workload),
            priority=await self._queueing.priority(job),
            pods=pods,
            ended=self._index.ended(key, uid),
            taken=taken,
            unreadable=self._index.unreadable(key, uid),
            applied=self._index.applied(key),
            certificates_expire=expire,
            reading=reading,
            unreachable=unreachable,
            refusals=self._refusals.get(key, {}),
            verdict=verdict,
            status_written=self._written.get(key),
            images=self._images,
        )

    async def _carry_out(self, key: str, job: Json, plan: Plan) -> float | None:
        if plan.status is not None:
            await self._write_status(key, job, plan)
        for event in plan.events:
            self._recorder.post(job, event)
        if plan.finalizer is not None:
            await self._hold(key, job, hold=plan.finalizer)
        if plan.delete_job:
            meta = job["metadata"]
            await self._cluster.delete(names.KIND, meta["namespace"], meta["name"], meta["uid"])
            return None
        await self._delete(key, job, plan.delete)
        await self._queueing.withdraw(self._index, key, plan.withdraw)
        if plan.report is not None:
            await self._queueing.report(self._index, key, plan.report, self._clock())
        if plan.resize is not None:
            self._coordinators.resize(key, plan.resize)
        await self._label(key, job, plan.labels)
        if plan.issue_certificates and (parsed := admit(job).job) is not None:
            issue = partial(self._certificates.issue, key, parsed, self._clock())
            await _all([issue, partial(self._apply, key, job, plan.apply)])
            return 0.0
        if not await self._apply(key, job, plan.apply):
            return 0.0
        wrote = plan.apply or plan.delete or plan.withdraw or plan.report or plan.status is not None
        looks = [each for each in (plan.look_again_after, SETTLE_SECONDS if wrote else None) if each is not None]
        return min(looks, default=None)

    async def _write_status(self, key: str, job: Json, plan: Plan) -> None:
        meta = job["metadata"]
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {each: meta[each] for each in ("name", "namespace", "resourceVersion")},
            "status": plan.status,
        }
        try:
            self._index.put_job(await self._cluster.apply_status(manifest))
        except MissingError as error:
            raise ConflictError(f"{key} is gone") from error
        self._written[key] = self._clock()

    async def _hold(self, key: str, job: Json, *, hold: bool) -> None:
        """Sets or takes away our finalizer; those of others are not ours."""
        meta = {each: job["metadata"][each] for each in ("name", "namespace", "uid")}
        if hold:
            meta["finalizers"] = [names.FINALIZER]
        manifest = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": meta}
        await self._patch(key, manifest)

    async def _label(self, key: str, job: Json, labels: Sequence[PoolLabel]) -> None:
        """Server-side apply of one label: taking it out of what we apply takes it away."""
        namespace = job["metadata"]["namespace"]
        manifests = [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": each.name, "namespace": namespace, "uid": each.uid}
                | ({"labels": {names.LABEL_POOL: "true"}} if each.pooled else {}),
            }
            for each in labels
        ]
        await _all([partial(self._patch, key, each) for each in manifests])

    async def _patch(self, key: str, manifest: Json) -> None:
        """Applies to an object that exists; one that is gone or another by now is no news."""
        try:
            await self._cluster.apply(manifest)
        except (ConflictError, MissingError):
            return
        except RefusedError as error:
            name = f"{manifest['kind']} {manifest['metadata']['name']}"
            log.warning("%s: %s is not changed: %s", key, name, error, extra={"job": key})

    async def _delete(self, key: str, job: Json, pods: Sequence[Deletion]) -> None:
        namespace = job["metadata"]["namespace"]
        delete = partial(self._cluster.delete, "Pod", namespace)
        await _all([partial(delete, each.name, each.uid, force=each.force, grace=each.grace) for each in pods])

    async def _apply(self, key: str, job: Json, manifests: Sequence[Json]) -> bool:
        """False when another turn is to follow at once."""
        others = [each for each in manifests if each["kind"] != "Pod"]
        pods = [each for each in manifests if each["kind"] == "Pod"]
        refused: dict[str, str] = {}
        await _all([partial(self._try, key, job, each, refused) for each in others])
        pods, lacking = await given(self._cluster, pods)
        # What was refused for one is refused for the next.
        await _all([partial(self._try, key, job, each, refused) for each in pods], lambda: not refused)
        refused |= lacking
        before = self._refusals.pop(key, {})
        if refused:
            self._refusals[key] = refused
        news = bool(before) != bool(refused)
        return not news

    async def _try(self, key: str, job: Json, manifest: Json, refused: dict[str, str]) -> None:
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        try:
            if kind == "Pod":
                await self._create_pod(key, job, manifest)
            else:
                self._index.put_other(key, kind, (await self._cluster.apply(manifest))["metadata"])
        except (RefusedError, MissingError) as error:
            if name not in self._refusals.get(key, {}):
                log.warning("%s: %s %s is refused: %s", key, kind, name, error, extra={"job": key})
            refused[name] = str(error)

    async def _create_pod(self, key: str, job: Json, manifest: Json) -> None:
        name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
        try:
            answer = await self._cluster.create(manifest)
        except ConflictError:
            there = await self._cluster.get("Pod", namespace, name)
            if there is None:
                return
            if owner_of(there["metadata"]) != job["metadata"]["uid"]:
                raise RefusedError(f"another pod of this name exists in namespace {namespace}") from None
            answer = there
        self._index.put_pod(key, answer)


def _at_work(job: Json, pods: Mapping[str, Pod]) -> bool:
    """Neither finished nor suspended to the end, nor somebody else's."""
    if foreign(job):
        return False
    status = job.get("status") or {}
    done = {
        each["type"]
        for each in status.get("conditions") or []
        if each["status"] == "True" and each["type"] in ("Complete", "Failed")
    }
    resting = (job.get("spec") or {}).get("suspend") and not pods
    return not done and not resting


async def _all(requests: Sequence[Callable[[], Awaitable[object]]], wanted: Callable[[], bool] = lambda: True) -> None:
    """Carries out requests, AT_ONCE at a time, while they are `wanted`.

    After an error no more are begun; those under way are waited for, as they may succeed. Raises the first error.
    """
    waiting, errors = iter(requests), list[ClusterError]()

    async def serve() -> None:
        for each in waiting:
            if errors or not wanted():
                return
            try:
                await each()
            except ClusterError as error:
                errors.append(error)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(AT_ONCE, len(requests))):
            tasks.create_task(serve())
    if errors:
        raise errors[0]
