"""Decoding beside training in `rlhf plan`: an iteration's time with and without it, from a past run of the job.

Rule: it reads the newest run in `runs/` that has measured an iteration.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_cli.console import output
from rlhf_cli.local.run_folder import newest_first
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_planner.rollout_overlap import RolloutTimes, overlapped, rollout_times, unchanged


@dataclass(frozen=True)
class RolloutOverlapPlan:
    """The expected effect of rollout.overlapTraining."""

    mode: str
    """Mode in the job's spec."""
    times: RolloutTimes | None
    """Times of the last run that measured an iteration; None without one."""
    missing: str = "no run of this job in runs/ has measured an iteration"

    def document(self) -> dict[str, Any]:
        """Return the plan for --json."""
        if self.times is None:
            return {"mode": self.mode, "missing": self.missing}
        return {
            "mode": self.mode,
            "disabledSeconds": unchanged(self.times),
            "enabledSeconds": overlapped(self.times),
        }

    def print(self) -> None:
        """Print the plan."""
        out = output()
        out.print("\nDecoding beside training", style="bold")
        if self.times is None:
            out.print(f"no forecast: {self.missing}", markup=False, soft_wrap=True)
            return
        off, on = unchanged(self.times), overlapped(self.times)
        out.print(
            f"iterations of the last run: predicted {off:.3g} s with overlapTraining Disabled, {on:.3g} s with Enabled "
            f"({off / on if on > 0 else 1.0:.2f}x), by weights one version older; the job has {self.mode}",
            markup=False,
            soft_wrap=True,
        )


def rollout_overlap_plan(job: RLHFJob, runs: Path) -> RolloutOverlapPlan | None:
    """Return the plan of a resolved job; None where nothing is generated, or its placement is not Dedicated.

    `runs` is the parent of run folders.
    """
    if not graph_of(job.spec).generates or job.spec.placement != "Dedicated":
        return None
    for folder in newest_first(runs, job.name):
        try:
            times = rollout_times(read_metrics(folder / "metrics.jsonl"))
        except OSError:
            continue
        if times is not None:
            return RolloutOverlapPlan(job.spec.rollout.overlap_training, times)
    return RolloutOverlapPlan(job.spec.rollout.overlap_training, None)
