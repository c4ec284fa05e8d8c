"""Sorted windows in `rlhf plan`: samples per second with batches in order, and with batches of like lengths.

Rule: it reads what `long_rounds_plan` reads, and writes nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_cli.console import output
from rlhf_cli.fusion_plan import FusionPlan
from rlhf_cli.long_rounds_plan import period_inputs
from rlhf_planner.inter_stage.length_window import WindowForecast, forecast_window


@dataclass(frozen=True)
class LengthWindowPlan:
    """The forecast of a job's windows."""

    forecast: WindowForecast | None
    assumptions: tuple[str, ...] = ()
    missing: str = ""
    """Reason why there is no forecast; empty with one."""

    def document(self) -> dict[str, Any]:
        """Return the plan for --json."""
        forecast = self.forecast
        if forecast is None:
            return {"missing": self.missing}
        return {
            "window": forecast.window,
            "samplesPerSecondInOrder": forecast.in_order,
            "samplesPerSecond": forecast.samples_per_second,
            "gain": forecast.gain,
            "standardError": forecast.error,
            "reason": forecast.reason,
            "assumptions": list(self.assumptions),
        }

    def print(self) -> None:
        """Print the plan."""
        out, forecast = output(), self.forecast
        out.print("\nSorted windows", style="bold")
        if forecast is None:
            out.print(f"no forecast: {self.missing}", markup=False, soft_wrap=True)
            return
        rates = f"predicted {forecast.in_order:.3g} samples/s in order, {forecast.samples_per_second:.3g} sorted"
        out.print(f"{rates} ({1 / (1 - forecast.gain):.2f}x)", markup=False, soft_wrap=True)
        out.print(forecast.reason, markup=False, soft_wrap=True)
        for assumption in self.assumptions:
            out.print(f"assumption: {assumption}", markup=False, soft_wrap=True)


def length_window_plan(job: RLHFJob, runs: Path, fusion: FusionPlan) -> LengthWindowPlan | None:
    """Return the plan of a resolved job; None unless it sorts windows. `runs` is the parent of run folders."""
    window = job.spec.prompts.length_window
    if window < 2:
        return None
    if fusion.costs is None:
        return LengthWindowPlan(None, missing=fusion.missing)
    lengths, setup, assumptions = period_inputs(job, runs, fusion)
    return LengthWindowPlan(forecast_window(lengths, setup, fusion.costs, window, job.spec.seed), assumptions)
