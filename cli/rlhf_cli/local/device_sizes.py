"""The sizes of a job with `spec.devices` before its processes start: recorded in the run folder, or chosen now.

A new plan uses the figures of `rlhf plan --devices`: of the job's newest run, otherwise public hardware figures. It is
written to the journal's facts before a process starts, where the coordinator and a resumed run find it.
"""

from dataclasses import replace

from rlhf_api.device_sizes import DevicePlanRecord
from rlhf_api.job import RLHFJob
from rlhf_cli.learned_figures import newest_teaching_run, read_workload
from rlhf_cli.load_job import LoadedJob
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RUNS, RunPaths
from rlhf_cli.plan_search import plan_costs
from rlhf_common.names import ExitCode
from rlhf_coordinator.device_plan import take_plan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.journal import Journal
from rlhf_planner.plan_search.size_choice import choose_sizes


def with_sizes(loaded: LoadedJob, paths: RunPaths) -> tuple[LoadedJob, str]:
    """Return the job with all its sizes, and a line about its plan; empty without a plan. Raises RunError."""
    job = loaded.resolved
    if job.spec.devices is None:
        return loaded, ""
    chosen: list[DevicePlanRecord] = []

    def choose(asked: RLHFJob) -> DevicePlanRecord:
        run = newest_teaching_run(asked, RUNS)
        chosen.append(choose_sizes(asked, read_workload(asked, run)[0], plan_costs(asked, None, run)[0]))
        return chosen[0]

    try:
        planned, plan = take_plan(job, Journal(paths.run_dir / "journal"), choose)
    except JobError as error:
        raise RunError(error.failure.message, ExitCode(error.failure.exit_code)) from error
    if plan is None:
        return replace(loaded, job=planned), ""
    origin = "" if chosen else ", as the run folder records"
    seconds = f"{plan.predicted_seconds:.3g} s per iteration predicted"
    line = f"plan for {job.spec.devices.count} devices: {plan.summary}; {seconds}{origin}"
    return replace(loaded, job=planned), line
