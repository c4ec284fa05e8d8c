"""Chooses the sizes of a job with `spec.devices`: the fastest plan that validation accepts, as a record.

Rule: pure. Sizes in `spec.devices.fixed` are no part of it.
"""

from __future__ import annotations

from rlhf_api.device_sizes import DevicePlanRecord, PlannedStage, plan_request, planned_job
from rlhf_api.job import RLHFJob
from rlhf_api.manifest import broken_rules
from rlhf_planner.device_memory import GIBIBYTE
from rlhf_planner.plan_search.cost_figures import FigureSource, PlanCosts
from rlhf_planner.plan_search.device_plan import DevicePlan
from rlhf_planner.plan_search.iteration_forecast import PlanForecast
from rlhf_planner.plan_search.search import PlanSearch
from rlhf_planner.plan_search.seeded_search import find_plans
from rlhf_planner.plan_search.workload import UnplannableError, Workload


def choose_sizes(job: RLHFJob, workload: Workload, costs: PlanCosts) -> DevicePlanRecord:
    """Return the sizes of a resolved job with `spec.devices`. Raises UnplannableError if no plan fits."""
    return record_of(job, _fastest(job, size_search(job, workload, costs)))


def choose_again(job: RLHFJob, workload: Workload, costs: PlanCosts) -> tuple[DevicePlanRecord, DevicePlanRecord]:
    """Return (the plan in force, the fastest plan) of a job, predicted by the same costs.

    The sizes of `job` are those of its plan in force. Raises UnplannableError if no plan fits.
    """
    search = size_search(job, workload, costs)
    own, best = record_of(job, search.own), record_of(job, _fastest(job, search))
    return (_shown(own) if _shows_training(costs) else own), best


def _shows_training(costs: PlanCosts) -> bool:
    """Return whether iterations of the plan in force have shown the seconds of its training."""
    rest = costs.iteration_seconds
    return costs.compute.source is not FigureSource.ASSUMED or (
        rest is not None and rest.source is not FigureSource.ASSUMED
    )


def _shown(own: DevicePlanRecord) -> DevicePlanRecord:
    """Return the plan in force with learned seconds of training: they equal those of its iterations, also where its
    links have assumed figures."""
    train = own.stages["train"]
    if train.source != "assumed":
        return own
    return own.model_copy(update={"stages": {**own.stages, "train": train.model_copy(update={"source": "learned"})}})


def size_search(job: RLHFJob, workload: Workload, costs: PlanCosts) -> PlanSearch:
    """Return the search among the plans that a resolved job with `spec.devices` may have."""
    assert job.spec.devices is not None, "the job asks for a plan"
    memory = job.spec.devices.memory
    device_bytes = None if memory is None else int(memory * GIBIBYTE)
    return PlanSearch(workload, costs, device_bytes, lambda plan: _accepts(job, plan))


def record_of(job: RLHFJob, forecast: PlanForecast) -> DevicePlanRecord:
    """Return a forecast as a record that answers the request of a job."""
    assert job.spec.devices is not None, "the job asks for a plan"
    stages = {
        name: PlannedStage(seconds=max(0.0, figure.value), source=figure.source.value)
        for name, figure in forecast.stages.items()
    }
    return DevicePlanRecord(
        request=plan_request(job.spec),
        summary=f"{forecast.plan.groups}; training {forecast.plan.training}",
        predicted_seconds=forecast.seconds,
        sizes=forecast.plan.sizes(job.spec).without(frozenset(job.spec.devices.fixed)),
        stages=stages,
    )


def _fastest(job: RLHFJob, search: PlanSearch) -> PlanForecast:
    devices = job.spec.devices
    assert devices is not None, "the job asks for a plan"
    plans = find_plans(search, devices.count, job.spec.seed)
    if not plans:
        limit = "" if devices.memory is None else f" with {devices.memory:g} GiB each"
        keeping = f" with spec.devices.fixed {', '.join(devices.fixed)}" if devices.fixed else ""
        raise UnplannableError(
            f"spec.devices.count = {devices.count}: no plan of up to so many devices{limit} fits this job{keeping}: "
            "give more devices or memory, or use smaller models or spec.training.lora"
        )
    return plans[0]


def _accepts(job: RLHFJob, plan: DevicePlan) -> bool:
    """Return whether a job may have a plan: its mounts stay, and it breaks no rule."""
    spec = job.spec
    same_mounts = plan.placement == spec.placement or spec.training.template == spec.generation.template
    return same_mounts and not broken_rules(planned_job(job, plan.sizes(spec)))
