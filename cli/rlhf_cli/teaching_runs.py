"""The job's newest run in `runs/` that teaches figures for plans; `rlhf_coordinator.learned_figures` reads them."""

from pathlib import Path

from rlhf_api.job import RLHFJob
from rlhf_cli.local.run_folder import newest_first
from rlhf_coordinator.learned_figures import teaches


def newest_teaching_run(job: RLHFJob, runs: Path) -> Path | None:
    """Return the newest run folder of this job with costs of generation or of training; None when there is none."""
    return next((folder for folder in newest_first(runs, job.name) if teaches(folder)), None)
