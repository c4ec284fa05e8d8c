"""The plan of a job with `spec.devices`: the recorded one of its journal, or a new one, which is recorded.

Rule: while the request (`plan_request`) stays the same, a readable recorded plan is taken.
"""

from collections.abc import Callable
from typing import Final

from pydantic import ValidationError

from rlhf_api.device_sizes import DevicePlanRecord, plan_request, planned_job
from rlhf_api.job import RLHFJob
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.model_sizes import read_shapes, read_sizes
from rlhf_coordinator.storage.journal import Journal
from rlhf_planner.plan_search.cost_figures import device_figures
from rlhf_planner.plan_search.size_choice import choose_sizes
from rlhf_planner.plan_search.workload import UnplannableError, Workload, assumed_lengths

KEY: Final = "devicePlan"
"""Key in the journal's facts about the job."""


def take_plan(
    job: RLHFJob, journal: Journal, choose_plan: Callable[[RLHFJob], DevicePlanRecord]
) -> tuple[RLHFJob, DevicePlanRecord | None]:
    """Return a resolved job with all its sizes, and its plan; None where it has none. Raises JobError.

    `choose_plan` is called only if sizes are missing and no plan for the same request is recorded. It may raise
    UnplannableError.
    """
    if job.spec.devices is None:
        return job, None
    plan = recorded_plan(journal)
    if not job.spec.awaits_plan:
        return job, plan
    if plan is None or plan.request != plan_request(job.spec):
        try:
            plan = choose_plan(job)
        except UnplannableError as error:
            raise JobError("NoPlan", str(error), field="spec.devices", exit_code=ExitCode.USAGE) from error
        written = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
        journal.write_job(journal.job() | {KEY: written})
    return planned_job(job, plan.sizes), plan


def recorded_plan(journal: Journal) -> DevicePlanRecord | None:
    """Return the plan that a journal records; None if it has none, or one that this version cannot read."""
    try:
        return DevicePlanRecord.model_validate(journal.job().get(KEY))
    except ValidationError:
        return None


def choose(job: RLHFJob) -> DevicePlanRecord:
    """Return the plan of a resolved job by assumed costs and lengths. Raises UnplannableError."""
    spec = job.spec
    lengths, prompts = assumed_lengths(spec)
    workload = Workload(spec, read_sizes(spec), read_shapes(spec), lengths, tuple(prompts))
    return choose_sizes(job, workload, device_figures(spec))
