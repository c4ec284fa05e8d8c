"""Runs one reconcile of one job: observe, decide, carry out the plan, and return when the next one is due.

If the status cannot be written, the rest of the plan is dropped. A reconcile may die at any line; the next one observes
what was done and continues.
"""

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final

from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator import failing_jobs, operator_logs
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ApiError, ConflictError, ForbiddenError, MissingError, RefusedError
from rlhf_operator.certificates import LIFETIME
from rlhf_operator.coordinator_client import Coordinators
from rlhf_operator.events import EventPoster
from rlhf_operator.failing_jobs import FailingJobs
from rlhf_operator.gang.apis import ServedApis
from rlhf_operator.index import Index
from rlhf_operator.job_certificates import JobCertificates
from rlhf_operator.job_objects import SETTLE_SECONDS, JobObjects
from rlhf_operator.job_revisions import NOTHING, JobRevisions
from rlhf_operator.manifests import Images
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.pod_dry_run import Trials
from rlhf_operator.queueing import Queueing
from rlhf_operator.reconcile import ObservedJob, ObservedPod, ReconcilePlan, reconcile
from rlhf_operator.reconcile.api_failure import first_status, tell
from rlhf_operator.reconcile.parsed_job import managed_elsewhere, parse_job
from rlhf_operator.reconcile.revisions.pinning import read
from rlhf_operator.reconcile_traces import ReconcileTrace, ReconcileTraces
from rlhf_operator.stored_job import read_part

log = logging.getLogger(__name__)

Json = dict[str, Any]

CONFLICT_RETRY_SECONDS: Final = 1.0
"""Seconds until a reconcile is repeated after a conflict, unless a change of the job starts it earlier."""
STATUS_ATTEMPTS: Final = 8
"""Most attempts to write one status while others write the job."""


class Controller:
    """Reconciles jobs for the work queue."""

    def __init__(
        self,
        client: KubernetesClient,
        index: Index,
        images: Images,
        metrics: OperatorMetrics,
        coordinators: Coordinators,
        events: EventPoster,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        certificate_lifetime: timedelta = LIFETIME,
        home: str = "",
        traces: ReconcileTraces | None = None,
    ) -> None:
        self._client, self._index, self._images, self._home = client, index, images, home
        self._metrics, self._coordinators, self._events = metrics, coordinators, events
        self._certificates = JobCertificates(client, certificate_lifetime)
        self._revisions = JobRevisions(client)
        self._queueing = Queueing(client)
        self._trials = Trials(client, images)
        self._clock = clock
        self._objects = JobObjects(client, index)
        self._failing = FailingJobs()
        self._written: dict[str, datetime] = {}
        self._traces = traces or ReconcileTraces()

    def use(self, served: ServedApis) -> None:
        """Let jobs use these APIs of gangs and queues from now on; before the first call they can use none."""
        self._queueing.served = served

    async def reconcile(self, key: str) -> float | None:
        """Reconcile one job; return the seconds until the next reconcile, or None to wait for a change.

        Raises ApiError, but no ConflictError.
        """
        trace = self._traces.begin(key)
        with operator_logs.reconciling(key, self._index.job(key), trace.id):
            return await self._measured(key, trace)

    async def _measured(self, key: str, trace: ReconcileTrace) -> float | None:
        begun, result, failure = time.perf_counter(), "error", "cancelled"
        try:
            requeue_after = await self._reconcile(key, trace)
            failure = ""
            result = "ok"
        except ConflictError:
            requeue_after, result, failure = CONFLICT_RETRY_SECONDS, "conflict", ""
        except ApiError as error:
            # Missing rights count as refusals.
            kind = RefusedError if isinstance(error, ForbiddenError) else type(error)
            self._metrics.errors.labels(kind.__name__).inc()
            failure = f"{kind.__name__}: {error}"
            log.warning("%s: %s", key, error, extra={"job": key})
            self._failing.fail(key, error)
            await self._tell_failure(key, error)
            raise
        except Exception as error:
            self._metrics.errors.labels("Bug").inc()
            failure = f"Bug: {type(error).__name__}: {error}"
            log.exception("%s: reconcile failed", key, extra={"job": key})
            raise
        else:
            if self._failing.succeed(key):
                requeue_after = 0.0  # to report that it is over
        finally:
            self._metrics.reconciles.labels(result).observe(time.perf_counter() - begun)
            trace.end(result, failure)
        return requeue_after

    async def _reconcile(self, key: str, trace: ReconcileTrace) -> float | None:
        job = self._index.job(key)
        if job is None:
            self._forget(key)
            return None
        with trace.step("observe"):
            observed = await self._observe(key, job)
        with trace.step("decide"):
            plan = reconcile(job, observed, self._clock())
        self._metrics.see(job, observed, plan)
        with trace.step("carry out"):
            requeue_after = await self._carry_out(key, job, plan)
        self._index.settle(key, observed.ended)
        return requeue_after

    def _forget(self, key: str) -> None:
        self._coordinators.forget(key)
        self._certificates.forget(key)
        self._trials.forget(key)
        self._objects.forget(key)
        self._revisions.forget(key)
        self._written.pop(key, None)
        self._metrics.forget(key)
        self._failing.succeed(key)

    async def _observe(self, key: str, job: Json) -> ObservedJob:
        uid, now = str(job["metadata"]["uid"]), self._clock()
        pods, taken = self._index.pods(key, uid)
        applied, stored_revision = self._index.applied(key, uid), NOTHING
        expire, verdict = None, ""
        if _at_work(job, pods):
            if not job["metadata"].get("deletionTimestamp"):
                verdict = await self._trials.verdict(key, job, pods)
            stored_revision = await self._revisions.current(key, uid, applied, job.get("status") or {}, pods)
            mounting = any(pod.phase == "Pending" and pod.scheduled is not None for pod in pods.values())
            needed = mounting or bool(self._coordinators.latest(key)[1])
            # A plan's status is written before its certificates are issued, so a job without a status has none yet.
            stored = await self._certificates.current(key, uid, now, needed=needed) if job.get("status") else None
            expire = stored.due if stored else None
            coordinator = next((pod for pod in pods.values() if pod.group == Group.COORDINATOR), None)
            if stored and coordinator and coordinator.active and coordinator.address and coordinator.phase == "Running":
                where = key, coordinator.address, stored.certificates
                self._coordinators.refresh(*where, coordinator.run_id, sign=coordinator.ready)
        else:
            self._coordinators.forget(key)
            self._revisions.forget(key)
        reading, unreachable = self._coordinators.latest(key)
        return ObservedJob(
            served=self._queueing.served,
            queue=await self._queueing.state(self._index, key, job),
            pods=pods,
            ended=self._index.ended(key, uid),
            taken=taken,
            unreadable=self._index.unreadable(key, uid),
            deleted=self._index.deleted(key, uid),
            applied=applied,
            stored_revision=stored_revision,
            certificates_expire=expire,
            reading=reading,
            unreachable=unreachable,
            refusals=self._objects.last(key).unwritten,
            occupied=self._objects.last(key).occupied,
            api_failure=self._failing.message(key),
            dry_run_problem=verdict,
            status_written=self._written.get(key),
            images=self._images,
            home=self._home,
        )

    async def _carry_out(self, key: str, job: Json, plan: ReconcilePlan) -> float | None:
        if plan.status is not None:
            await self._write_status(key, job, plan)
        for event in plan.events:
            self._events.post(job, event)
        if plan.finalizer is not None:
            await self._objects.hold(key, job, hold=plan.finalizer)
        meta = job["metadata"]
        if plan.delete_job:
            await self._client.delete(names.KIND, meta["namespace"], meta["name"], meta["uid"])
            return None
        delete_again = await self._objects.delete(key, plan.delete)
        await self._queueing.withdraw(self._index, key, meta["uid"], plan.withdraw)
        if plan.report is not None:
            await self._queueing.report(self._index, key, meta["uid"], plan.report, self._clock())
        if plan.resize is not None:
            self._coordinators.resize(key, plan.resize)
        await self._objects.label(key, plan.labels)
        parsed = (parse_job(job).job or read(job)) if plan.issue_certificates else None
        issue = partial(self._certificates.issue, key, parsed, self._clock()) if parsed else None
        requeue_after = await self._objects.apply(key, plan.apply, issue)
        wrote = plan.withdraw or plan.report or plan.status is not None
        reread = self._certificates.seconds_to_reread(key, self._clock())
        delays = [plan.requeue_after, requeue_after, delete_again, reread, SETTLE_SECONDS if wrote else None]
        return min((delay for delay in delays if delay is not None), default=None)

    async def _write_status(self, key: str, job: Json, plan: ReconcilePlan) -> None:
        """Write the status to a version of the job with the same `read_part` as `job`.

        Raises ConflictError if the job has changed or is gone, or after STATUS_ATTEMPTS conflicts, and other ApiErrors.
        """
        meta, version = job["metadata"], str(job["metadata"]["resourceVersion"])
        for attempt in range(STATUS_ATTEMPTS):
            manifest = {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": meta["name"], "namespace": meta["namespace"], "resourceVersion": version},
                "status": plan.status,
            }
            try:
                self._index.put_job(await self._client.apply_status(manifest))
            except MissingError as error:
                raise ConflictError(f"{key} is gone") from error
            except ConflictError:
                if attempt + 1 == STATUS_ATTEMPTS:
                    raise
                version = await self._later_version(key, job)
            else:
                self._written[key] = self._clock()
                return

    async def _later_version(self, key: str, job: Json) -> str:
        """Return the current resourceVersion of the job, and put the job into the index.

        Raises ConflictError if it is gone or the plan may have changed.
        """
        meta = job["metadata"]
        body = await self._client.get(names.KIND, meta["namespace"], meta["name"])
        if body is not None:
            self._index.put_job(body)
        newest = self._index.job(key) if body is not None else None
        if newest is None or read_part(newest) != read_part(job):
            raise ConflictError(f"{key} was changed")
        return str(newest["metadata"]["resourceVersion"])

    async def _tell_failure(self, key: str, error: ApiError) -> None:
        """Report in the job's status that several reconciles failed, or in an event if the status cannot be written."""
        job = self._index.job(key)
        if job is None:
            return
        message = self._failing.message(key)
        if message and not failing_jobs.is_status_write(error):
            stored = job if job.get("status") else {**job, "status": first_status(job, self._clock())}
            plan = tell(ReconcilePlan(), stored, message)
            try:
                if plan.status is not None:
                    await self._write_status(key, job, plan)
            except ConflictError:
                return  # another reconcile follows the newer version
            except ApiError as refusal:
                error = refusal
        if failing_jobs.is_status_write(error) and (event := self._failing.event(key, error)):
            self._events.post(job, event)


def _at_work(job: Json, pods: Mapping[str, ObservedPod]) -> bool:
    """Return whether this operator manages the job and the job is neither finished nor fully suspended."""
    if managed_elsewhere(job):
        return False
    status = job.get("status") or {}
    done = {
        condition["type"]
        for condition in status.get("conditions") or []
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed")
    }
    resting = (job.get("spec") or {}).get("suspend") and not pods
    return not done and not resting
