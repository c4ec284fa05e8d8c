"""`rlhf top`: the live view of `rlhf run` for a job in a cluster. Pure: objects and a metrics page in, a JobStatus out.

Rule: the coordinator's metrics page, read through the API server, where the user may; else the status, which the
operator refreshes every ten seconds and which knows no single worker.
"""

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from rlhf_api import control_pb2 as pb
from rlhf_api.conditions import ConditionType
from rlhf_api.names import METRICS_PREFIX, Group
from rlhf_cli.cluster.stored import Stored, shortened
from rlhf_cli.cluster.workers import Worker, reasons


def from_metrics(page: str, job: Stored, pods: Sequence[Worker]) -> pb.JobStatus:
    """Raises ValueError for what is no metrics page."""
    series = _series(page)
    phases = [each.labels["phase"] for each in series.get("phase", ()) if each.value]
    status = pb.JobStatus(
        job=job.name,
        phase=phases[0] if phases else job.phase,
        iteration=int(_first(series.get("iteration", ()), job.iteration)),
        iterations=job.iterations,
        ledger={each.labels["state"]: int(each.value) for each in series.get("samples", ())},
        weight_version=int(_first(series.get("weight_version", ()), 0)),
        metrics={each.labels["name"]: each.value for each in series.get("iteration_metric", ())},
        restarts={each.labels["worker"]: int(each.value) for each in series.get("worker_restarts_total", ())},
    )
    rates = {each.labels["worker"]: each.value for each in series.get("worker_tokens_per_second", ())}
    states = {each.labels["worker"]: each.labels["state"] for each in series.get("worker_state", ()) if each.value}
    told = reasons([each for each in pods if each.pod.group != Group.COORDINATOR])
    for name, state in states.items():
        status.workers.add(
            worker=name, state=state, activity=told.get(name, ""), tokens_per_second=rates.get(name, 0.0)
        )
    _fusion(status, series, job)
    return _common(status, job, pods)


def from_status(job: Stored, pods: Sequence[Worker]) -> pb.JobStatus:
    """What the status and the pods know."""
    status = pb.JobStatus(
        job=job.name,
        phase=str(job.progress.get("stage") or job.phase) if not job.finished else job.phase,
        iteration=job.iteration,
        iterations=job.iterations,
    )
    ours = [each for each in pods if each.pod.group != Group.COORDINATOR]
    told = reasons(ours)
    for each in ours:
        status.workers.add(worker=each.name, state=each.state, activity=shortened(told[each.name], 120))
        status.restarts[each.name] = each.restarts
    return _common(status, job, pods)


def _common(status: pb.JobStatus, job: Stored, pods: Sequence[Worker]) -> pb.JobStatus:
    status.pool.extend(each.name for each in pods if each.in_pool and each.name not in status.pool)
    status.last_checkpoint = str((job.status.get("lastCheckpoint") or {}).get("path") or "")
    status.seconds_left = job.seconds_left
    if job.holds(ConditionType.FAILED):
        failed = job.condition(ConditionType.FAILED)
        status.failure.CopyFrom(pb.Failure(reason=str(failed.get("reason")), message=job.told(ConditionType.FAILED)))
    return status


def _fusion(status: pb.JobStatus, series: Mapping[str, Sequence[Sample]], job: Stored) -> None:
    """Who keeps the long tail; what is only planned is not in the metrics."""
    pool = [each.labels["worker"] for each in series.get("fusion_pool", ()) if each.value]
    if not pool:
        return
    status.pool.extend(pool)
    status.fusion.threshold = int(_first(series.get("fusion_threshold", ()), 0))
    status.fusion.released.extend(each.labels["worker"] for each in series.get("fusion_released", ()) if each.value)
    status.replicas["generation"] = int((job.spec.get("generation") or {}).get("replicas", 1))


def _series(page: str) -> dict[str, list[Sample]]:
    """Name without prefix -> samples."""
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix(METRICS_PREFIX), []).append(sample)
    return found


def _first(samples: Sequence[Sample], otherwise: float) -> float:
    return samples[0].value if samples else otherwise
