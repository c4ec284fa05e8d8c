"""Chooses the sizes of a job with `spec.devices`: the fastest plan that validation accepts, as a record.

Pure; the same job, models and costs give the same record. Sizes in `spec.devices.fixed` are no part of it.
"""

from __future__ import annotations

from rlhf_api.device_sizes import DevicePlanRecord, plan_request, planned_job
from rlhf_api.job import RLHFJob
from rlhf_api.manifest import broken_rules
from rlhf_planner.device_memory import GIBIBYTE
from rlhf_planner.plan_search.cost_figures import PlanCosts
from rlhf_planner.plan_search.device_plan import DevicePlan
from rlhf_planner.plan_search.search import PlanSearch
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.workload import UnplannableError, Workload


def choose_sizes(job: RLHFJob, workload: Workload, costs: PlanCosts) -> DevicePlanRecord:
    """Return the sizes of a resolved job with `spec.devices`. Raises UnplannableError if no plan fits."""
    devices = job.spec.devices
    assert devices is not None, "the job asks for a plan"
    device_bytes = None if devices.memory is None else int(devices.memory * GIBIBYTE)
    plans = find_plans(
        PlanSearch(workload, costs, device_bytes, lambda plan: _accepts(job, plan)), devices.count, job.spec.seed
    )
    if not plans:
        limit = "" if devices.memory is None else f" with {devices.memory:g} GiB each"
        keeping = f" with spec.devices.fixed {', '.join(devices.fixed)}" if devices.fixed else ""
        raise UnplannableError(
            f"spec.devices.count = {devices.count}: no plan of up to so many devices{limit} fits this job{keeping}: "
            "give more devices or memory, or use smaller models or spec.training.lora"
        )
    best = plans[0]
    return DevicePlanRecord(
        request=plan_request(job.spec),
        summary=f"{best.plan.groups}; training {best.plan.training}",
        predicted_seconds=best.seconds,
        sizes=best.plan.sizes(job.spec).without(workload.fixed),
    )


def _accepts(job: RLHFJob, plan: DevicePlan) -> bool:
    """Return whether a job may have a plan: its mounts stay, and it breaks no rule."""
    spec = job.spec
    same_mounts = plan.placement == spec.placement or spec.training.template == spec.generation.template
    return same_mounts and not broken_rules(planned_job(job, plan.sizes(spec)))
