"""The plan of a job with `spec.devices`: the recorded one of its journal, or a new one, which is recorded.

A readable recorded plan is taken while the request (`plan_request`) stays the same.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from rlhf_api.device_sizes import DevicePlanRecord, plan_request, planned_job
from rlhf_api.job import RLHFJob
from rlhf_api.protocol import written_job
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError, storage_error
from rlhf_coordinator.learned_figures import PLAN_KEY, RAN_JOB, read_workload, run_costs, teaches
from rlhf_coordinator.storage.journal import Journal, write_atomically
from rlhf_planner.plan_search.size_choice import choose_sizes
from rlhf_planner.plan_search.workload import UnplannableError

REPLANNING_KEY: Final = "replanning"
"""Key of decisions about changing that plan in the journal's facts about the job; a new plan begins without."""


def take_plan(
    job: RLHFJob, journal: Journal, choose_plan: Callable[[RLHFJob], DevicePlanRecord]
) -> tuple[RLHFJob, DevicePlanRecord | None]:
    """Return a resolved job with all its sizes, and its plan or None. Raises JobError.

    `choose_plan` is called if sizes are missing and no plan for the same request is recorded.
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
        plan = plan.model_copy(update={"since": max(journal.iterations(), default=0)})
        facts = {key: value for key, value in journal.job().items() if key != REPLANNING_KEY}
        journal.write_job(facts | {PLAN_KEY: written_plan(plan)})
    return planned_job(job, plan.sizes), plan


def recorded_plan(journal: Journal) -> DevicePlanRecord | None:
    """Return the plan that a journal records; None if it has none, or one that this version cannot read."""
    try:
        return DevicePlanRecord.model_validate(journal.job().get(PLAN_KEY))
    except ValidationError:
        return None


def written_plan(plan: DevicePlanRecord) -> dict[str, Any]:
    """Return a plan as the journal and the status store it."""
    written: dict[str, Any] = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written


def choose(job: RLHFJob, run: Path | None) -> DevicePlanRecord:
    """Return the plan of a resolved job by the figures of a run, or by assumed ones if it teaches none.

    Raises UnplannableError.
    """
    teacher = run if run is not None and teaches(run) else None
    return choose_sizes(job, read_workload(job, teacher)[0], run_costs(job, teacher)[0])


def write_ran_job(job: RLHFJob, run_dir: Path, job_file: Path) -> None:
    """Write the resolved job into the run folder, where `choose` finds the sizes of its figures at the next start.

    Raises JobError.
    """
    path = run_dir / RAN_JOB
    if job.spec.devices is None or job_file.absolute() == path.absolute():
        return
    try:
        write_atomically(path, written_job(job).encode())
    except OSError as error:
        raise storage_error("the job", path, error, "RLHF_RUN_DIR") from error
