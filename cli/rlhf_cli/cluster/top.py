"""`rlhf top`: the live view of `rlhf run`, for a job in a cluster.

Rule: the numbers come from the coordinator's metrics page if it is readable, otherwise from the job's status.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Group as RenderGroup
from rich.console import RenderableType
from rich.live import Live

from rlhf_cli.cluster.cluster_job import ClusterJob, shortened
from rlhf_cli.cluster.cluster_pod import ClusterPod, event_time, explanations, notable_events
from rlhf_cli.cluster.cluster_session import ClusterSession, now
from rlhf_cli.cluster.job_details import JobDetails, as_metrics, read_details
from rlhf_cli.live_view import render
from rlhf_common import control_pb2 as pb
from rlhf_common.conditions import ConditionType
from rlhf_common.metrics import fusion, run, samples, storage
from rlhf_common.metrics import job as job_metrics
from rlhf_common.names import Group
from rlhf_operator.api_client.errors import ForbiddenError, MissingError, RefusedError, UnavailableError

EVENTS_SHOWN: Final = 4
"""Maximum number of latest events below the live view."""
PAUSE_FACTOR: Final = 4
"""Least ratio of the pause after a refresh to the duration of the refresh."""
_NO_METRICS: Final = "the coordinator's metrics cannot be read ({why}), so this is the status, ten seconds old at most"


async def top(session: ClusterSession, name: str, every: float, *, once: bool) -> int:
    """Show the live view until the end of the job, at least `every` seconds between refreshes. Return the exit code.

    With `once`, or where no live view is possible, print it once.
    """
    if once or not session.live:
        details = await read_details(session, name, now())
        session.out.print(await _view(session, details))
        return 0
    with Live(console=session.out, auto_refresh=False, vertical_overflow="crop") as shown:
        in_outage = False
        while True:
            began = time.monotonic()
            try:
                details = await read_details(session, name, now())
                shown.update(await _view(session, details), refresh=True)
                in_outage = False
                if details.job.finished:
                    return 0
            except UnavailableError as error:
                if not in_outage:
                    session.note(f"{error}; trying again")
                in_outage = True
            # A job of a thousand pods is read less often, because the API server has other clients.
            await asyncio.sleep(max(every, PAUSE_FACTOR * (time.monotonic() - began)))


def status_from_metrics(page: str, job: ClusterJob, pods: Sequence[ClusterPod]) -> pb.JobStatus:
    """Return the status that a coordinator's metrics page describes. Raises ValueError for a page that is no metrics
    page, or whose series lack a label.
    """
    try:
        return _status_from_series(_series(page), job, pods)
    except KeyError as error:
        raise ValueError(f"a series of the metrics page has no label {error}") from error


def _status_from_series(
    series: Mapping[str, Sequence[Sample]], job: ClusterJob, pods: Sequence[ClusterPod]
) -> pb.JobStatus:
    phases = [sample.labels["phase"] for sample in series.get(job_metrics.PHASE.name, ()) if sample.value]
    status = pb.JobStatus(
        job=job.name,
        phase=phases[0] if phases else job.phase,
        iteration=int(_first(series.get(job_metrics.ITERATION.name, ()), job.iteration)),
        iterations=job.iterations,
        ledger={sample.labels["state"]: int(sample.value) for sample in series.get(samples.SAMPLES.name, ())},
        weight_version=int(_first(series.get(storage.WEIGHT_VERSION.name, ()), 0)),
        metrics={sample.labels["name"]: sample.value for sample in series.get(run.ITERATION_METRIC.name, ())},
        restarts={
            sample.labels["worker"]: int(sample.value) for sample in series.get(samples.WORKER_RESTARTS.name, ())
        },
    )
    rates = {sample.labels["worker"]: sample.value for sample in series.get(samples.WORKER_TOKENS.name, ())}
    states = {
        sample.labels["worker"]: sample.labels["state"]
        for sample in series.get(samples.WORKER_STATE.name, ())
        if sample.value
    }
    activities = explanations([pod for pod in pods if pod.pod.group != Group.COORDINATOR])
    for name, state in states.items():
        status.workers.add(
            worker=name, state=state, activity=activities.get(name, ""), tokens_per_second=rates.get(name, 0.0)
        )
    _add_pool(status, series, job)
    return _with_common_fields(status, job, pods)


def status_from_job(job: ClusterJob, pods: Sequence[ClusterPod]) -> pb.JobStatus:
    """Return the status that the job's status and pods describe."""
    status = pb.JobStatus(
        job=job.name,
        phase=str(job.progress.get("stage") or job.phase) if not job.finished else job.phase,
        iteration=job.iteration,
        iterations=job.iterations,
    )
    workers = [pod for pod in pods if pod.pod.group != Group.COORDINATOR]
    activities = explanations(workers)
    for pod in workers:
        status.workers.add(worker=pod.name, state=pod.state, activity=shortened(activities[pod.name], 120))
        status.restarts[pod.name] = pod.restarts
    return _with_common_fields(status, job, pods)


def _with_common_fields(status: pb.JobStatus, job: ClusterJob, pods: Sequence[ClusterPod]) -> pb.JobStatus:
    status.pool.extend(pod.name for pod in pods if pod.in_pool and pod.name not in status.pool)
    status.last_checkpoint = str((job.status.get("lastCheckpoint") or {}).get("path") or "")
    status.seconds_left = job.seconds_left
    if job.holds(ConditionType.FAILED):
        reason = str(job.condition(ConditionType.FAILED).get("reason"))
        status.failure.CopyFrom(pb.Failure(reason=reason, message=job.message(ConditionType.FAILED)))
    return status


def _add_pool(status: pb.JobStatus, series: Mapping[str, Sequence[Sample]], job: ClusterJob) -> None:
    """Add the migration pool once it exists; the metrics do not contain a planned pool."""
    pool = [sample.labels["worker"] for sample in series.get(fusion.POOL.name, ()) if sample.value]
    if not pool:
        return
    status.pool.extend(pool)
    status.fusion.threshold = int(_first(series.get(fusion.THRESHOLD.name, ()), 0))
    released = (sample.labels["worker"] for sample in series.get(fusion.RELEASED.name, ()) if sample.value)
    status.fusion.released.extend(released)
    status.replicas["generation"] = int((job.spec.get("generation") or {}).get("replicas", 1))


def _series(page: str) -> dict[str, list[Sample]]:
    """Return the samples of a metrics page by name."""
    series: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            series.setdefault(sample.name, []).append(sample)
    return series


def _first(samples: Sequence[Sample], default: float) -> float:
    return samples[0].value if samples else default


async def _view(session: ClusterSession, details: JobDetails) -> RenderableType:
    status, notes = await _status(session, details)
    status.waiting_for.extend(_waits(details, status))
    return RenderGroup(render(status, as_metrics(details.iterations), [*_events(details), *notes]))


async def _status(session: ClusterSession, details: JobDetails) -> tuple[pb.JobStatus, Sequence[str]]:
    """Return (status, notes on its source)."""
    job = details.job
    if job.finished or not details.pods:
        return status_from_job(job, details.pods), ()
    pod = f"{job.name}-{Group.COORDINATOR}"
    try:
        page = await session.api.metrics(job.namespace, pod)
        return status_from_metrics(page, job, details.pods), ()
    except ForbiddenError as error:
        return status_from_job(job, details.pods), [_NO_METRICS.format(why=error)]
    except (MissingError, RefusedError, UnavailableError, ValueError):
        return status_from_job(job, details.pods), [_NO_METRICS.format(why="its pod does not answer")]


def _waits(details: JobDetails, status: pb.JobStatus) -> list[str]:
    """Return the text after "waits for" in the job's state, if any."""
    if status.HasField("failure") or details.job.finished:
        return []
    waits = details.job.state.partition("waits for ")[2]
    return [waits] if waits else []


def _events(details: JobDetails) -> list[str]:
    return [
        f"{at.astimezone():%H:%M:%S} {event.get('reason')}: {' '.join(str(event.get('note')).split())}"
        for event in notable_events(details.events)[-EVENTS_SHOWN:]
        if (at := event_time(event)) is not None
    ]
