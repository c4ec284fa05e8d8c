"""The sizes of a job with `spec.devices` before its processes start: recorded in the run folder, or chosen now.

A new plan is written to the journal before a process starts, where a resumed run finds it.
"""

from dataclasses import replace

from rlhf_api.device_sizes import DevicePlanRecord
from rlhf_api.job import RLHFJob
from rlhf_cli.load_job import LoadedJob
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RUNS, RunPaths
from rlhf_cli.teaching_runs import newest_teaching_run
from rlhf_common.names import ExitCode
from rlhf_coordinator.device_plan import choose, take_plan
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.learned_figures import teaches
from rlhf_coordinator.storage.journal import Journal


def with_sizes(loaded: LoadedJob, paths: RunPaths) -> tuple[LoadedJob, str]:
    """Return the job with all its sizes, and a line about its plan; empty without a plan. Raises RunError."""
    job = loaded.resolved
    if job.spec.devices is None:
        return loaded, ""
    chosen: list[DevicePlanRecord] = []

    def choose_now(asked: RLHFJob) -> DevicePlanRecord:
        own = paths.run_dir
        chosen.append(choose(asked, own if teaches(own) else newest_teaching_run(asked, RUNS)))
        return chosen[0]

    try:
        planned, plan = take_plan(job, Journal(paths.run_dir / "journal"), choose_now)
    except JobError as error:
        raise RunError(error.failure.message, ExitCode(error.failure.exit_code)) from error
    if plan is None:
        return replace(loaded, job=planned), ""
    origin = "" if chosen else ", as the run folder records"
    line = f"plan for {job.spec.devices.count} devices: {plan.words}{origin}"
    return replace(loaded, job=planned), line
