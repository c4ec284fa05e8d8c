"""Critics beside decoding in `rlhf plan`: an iteration's time with and without it, from the profile of a past run.

Rule: it reads the newest run in `runs/` whose profiles allow a forecast.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_cli.console import output
from rlhf_cli.local.run_folder import newest_first
from rlhf_common.json_document import parse_json
from rlhf_common.names import Group
from rlhf_coordinator.reports.trackers import facts_jsonl
from rlhf_planner import critic_overlap_facts
from rlhf_planner.critic_overlap_choice import MeasuredOverlap
from rlhf_planner.critic_overlap_forecast import OverlapForecast, forecast
from rlhf_planner.device_memory import Sizes


@dataclass(frozen=True)
class CriticOverlapPlan:
    """The expected effect of training.criticOverlap."""

    mode: str
    """Mode in the job's spec."""
    forecast: OverlapForecast | None
    missing: str = ""
    """Reason why there is no forecast; empty with one."""

    def document(self) -> dict[str, Any]:
        """Return the plan for --json."""
        forecast = self.forecast
        if forecast is None:
            return {"mode": self.mode, "missing": self.missing}
        return {
            "mode": self.mode,
            "iteration": forecast.iteration,
            "disabledSeconds": forecast.disabled,
            "enabledSeconds": forecast.enabled,
            "auto": "Enabled" if forecast.auto else "Disabled",
            "assumptions": list(forecast.assumptions),
        }

    def print(self) -> None:
        """Print the plan."""
        out, forecast = output(), self.forecast
        out.print("\nCritics beside decoding", style="bold")
        if forecast is None:
            out.print(f"no forecast: {self.missing}", markup=False, soft_wrap=True)
            return
        gain = forecast.disabled / forecast.enabled if forecast.enabled > 0 else 1.0
        out.print(
            f"iteration {forecast.iteration} of the last run: predicted {forecast.disabled:.3g} s with criticOverlap "
            f"Disabled, {forecast.enabled:.3g} s with Enabled ({gain:.2f}x); Auto would choose "
            f"{'Enabled' if forecast.auto else 'Disabled'}; the job has {self.mode}",
            markup=False,
            soft_wrap=True,
        )
        for assumption in forecast.assumptions:
            out.print(f"assumption: {assumption}", markup=False, soft_wrap=True)


def critic_overlap_plan(job: RLHFJob, runs: Path, sizes: Sizes) -> CriticOverlapPlan | None:
    """Return the plan of a resolved job; None where it trains one model, or its placement is not Dedicated.

    `runs` is the parent of run folders.
    """
    graph, mode = graph_of(job.spec), job.spec.training.critic_overlap
    if len(graph.trained) < 2 or job.spec.placement != "Dedicated":
        return None
    parameters = {role: size.parameters if (size := sizes.get(role)) is not None else 0 for role in graph.trained}
    share = parameters[graph.policy] / sum(parameters.values()) if all(parameters.values()) else None
    late = [task.name for task in graph.tasks_of(Group.INFERENCE) if task.model in graph.trained]
    for folder in newest_first(runs, job.name):
        try:
            facts = facts_jsonl.read_facts(folder / facts_jsonl.FILE)
        except OSError:
            continue
        if facts and (predicted := forecast(facts, _measured(folder), share, late)) is not None:
            return CriticOverlapPlan(mode, predicted)
    return CriticOverlapPlan(
        mode, None, "no run of this job in runs/ trained all models at once and saw an iteration whole"
    )


def _measured(folder: Path) -> MeasuredOverlap | None:
    """Return the times that the run recorded with and without overlap; None when they are absent or unreadable."""
    try:
        facts = parse_json((folder / "journal" / "job.json").read_bytes())
        return critic_overlap_facts.read_facts(facts[critic_overlap_facts.JOB_KEY])[0]
    except (OSError, ValueError, KeyError, TypeError):
        return None
