"""The plan for `spec.devices`: the coordinator reports it, the status records it, and pods follow from spec and record.

Rule: pure. A job with the reported sizes is checked like a manifest.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api.device_sizes import DevicePlanRecord, plan_request, planned_document
from rlhf_common.conditions import ConditionType
from rlhf_operator.reconcile.conditions import StoredConditions
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading, ObservedJob
from rlhf_operator.reconcile.parsed_job import parse_job

Json = dict[str, Any]

FIELD: Final = "devices"
"""Field of `status.plan` with the record."""


class PlanRefusedError(ValueError):
    """A reported plan that no pods may be created from; the message says why."""


def with_sizes(stored: Mapping[str, Any], observed: ObservedJob) -> Mapping[str, Any]:
    """Return the stored job with the sizes of its recorded plan; unchanged without a usable one."""
    spec = stored.get("spec")
    if not isinstance(spec, Mapping) or not spec.get("devices"):
        return stored
    parsed, status = parse_job(stored), stored.get("status") or {}
    if parsed.job is None or not parsed.job.spec.awaits_plan:
        return stored
    try:
        plan = DevicePlanRecord.model_validate((status.get("plan") or {}).get(FIELD))
    except ValidationError:
        return stored
    # The status says that a job is suspended while its last pods have ended and startTime is still there.
    suspended = StoredConditions.from_status(status).holds(ConditionType.SUSPENDED)
    live = bool(observed.pods or (status.get("startTime") and not suspended))
    return _sized(stored, plan) if live or plan.request == plan_request(parsed.job.spec) else stored


def recorded(
    stored: Mapping[str, Any], reading: CoordinatorReading | None, *, awaits_plan: bool
) -> Mapping[str, Any] | None:
    """Return the stored record, or if the job awaits a plan, the reported one.

    None without a record, or if the reported one is refused. `awaits_plan`: the job's sizes are unknown.
    """
    if not awaits_plan:
        plan: Mapping[str, Any] | None = ((stored.get("status") or {}).get("plan") or {}).get(FIELD)
        return plan
    try:
        return reported_plan(stored, reading)
    except PlanRefusedError:
        return None


def waiting_message(stored: Mapping[str, Any], reading: CoordinatorReading | None) -> str:
    """Return what a job without a plan waits for."""
    text = "waits for the plan: the coordinator chooses the sizes for spec.devices, and then workers are created"
    try:
        reported_plan(stored, reading)
    except PlanRefusedError as error:
        return f"{text}; the plan that it reports is refused: {error}"
    return text


def reported_plan(stored: Mapping[str, Any], reading: CoordinatorReading | None) -> Json | None:
    """Return the plan that the coordinator reports, without fixed sizes; None while it reports none.

    Raises PlanRefusedError.
    """
    job = parse_job(stored).job
    if reading is None or not reading.device_plan or job is None or job.spec.devices is None:
        return None
    try:
        plan = DevicePlanRecord.model_validate_json(reading.device_plan)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise PlanRefusedError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if plan.request != plan_request(job.spec):
        raise PlanRefusedError("it answers another request: suspend and resume the job for a new one")
    plan = plan.model_copy(update={"sizes": plan.sizes.without(frozenset(job.spec.devices.fixed))})
    if problem := parse_job(_sized(stored, plan)).problem:
        raise PlanRefusedError(problem)
    written: Json = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written


def _sized(stored: Mapping[str, Any], plan: DevicePlanRecord) -> Mapping[str, Any]:
    return {**stored, **planned_document({"spec": stored["spec"]}, plan.sizes)}
