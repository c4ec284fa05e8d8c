"""Long rounds in `rlhf plan`: samples per second without them, and with each number of surplus prompts.

Rule: it reads the newest run in `runs/` that has measured costs. Without one, costs and lengths are those of the fusion
plan.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from rlhf_api.algorithms import prompt_schedule, samples_per_prompt
from rlhf_api.algorithms.iteration_prompts import MAX_PERIOD
from rlhf_api.job import RLHFJob
from rlhf_cli.console import output
from rlhf_cli.fusion_plan import FusionPlan, newest_run
from rlhf_coordinator.learned_figures import file_records
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.storage.batch import responses_with_origins
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.inter_stage.long_rounds import RoundsChoice, choose_rounds
from rlhf_planner.inter_stage.simulated_rounds import PeriodSetup
from rlhf_planner.rollout_overlap import RolloutTimes, rollout_times


@dataclass(frozen=True)
class LongRoundsPlan:
    """The forecast for each number of surplus prompts."""

    choice: RoundsChoice | None
    """The choice; None without a forecast."""
    assumptions: tuple[str, ...] = ()
    missing: str = ""
    """Reason why there is no forecast; empty with one."""

    def document(self) -> dict[str, Any]:
        """Return the plan for --json."""
        if self.choice is None:
            return {"missing": self.missing}
        ways = [
            {
                "surplusPrompts": way.extra,
                "period": way.period,
                "samplesPerSecond": way.samples_per_second,
                "gain": way.gain,
                "standardError": way.error,
            }
            for way in self.choice.ways
        ]
        chosen = {"surplusPrompts": self.choice.extra, "reason": self.choice.reason, "ways": ways}
        return chosen | {"assumptions": list(self.assumptions)}

    def print(self) -> None:
        """Print the plan."""
        out = output()
        out.print("\nLong rounds", style="bold")
        if self.choice is None:
            out.print(f"no forecast: {self.missing}", markup=False, soft_wrap=True)
            return
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
        for heading in ("surplus prompts", "iterations of a period", "samples/s", "seconds saved", "standard error"):
            table.add_column(heading, justify="right")
        for way in self.choice.ways:
            saved = (f"{way.gain:.1%}", f"{way.error:.1%}") if way.extra else ("", "")
            table.add_row(str(way.extra or "none"), str(way.period), f"{way.samples_per_second:.3g}", *saved)
        out.print(table)
        out.print(self.choice.reason, markup=False, soft_wrap=True)
        for assumption in self.assumptions:
            out.print(f"assumption: {assumption}", markup=False, soft_wrap=True)


def long_rounds_plan(job: RLHFJob, runs: Path, fusion: FusionPlan) -> LongRoundsPlan | None:
    """Return the plan of a resolved job; None unless it chooses long rounds. `runs` is the parent of run folders."""
    spec = job.spec
    if spec.rollout.long_rounds != "Auto":
        return None
    if fusion.costs is None:
        return LongRoundsPlan(None, missing=fusion.missing)
    lengths, setup, assumptions = period_inputs(job, runs, fusion)
    return LongRoundsPlan(choose_rounds(lengths, setup, fusion.costs, spec.iterations, spec.seed), assumptions)


def period_inputs(job: RLHFJob, runs: Path, fusion: FusionPlan) -> tuple[LengthModel, PeriodSetup, tuple[str, ...]]:
    """Return lengths, setup and assumptions for simulated rounds of a resolved job whose fusion plan has costs."""
    spec = job.spec
    run = newest_run(job, runs)
    times = _times(run)
    assumptions: tuple[str, ...] = (
        () if times else ("no run has measured an iteration: training is taken to cost nothing",)
    )
    unread: list[str] = []
    lengths = fusion.lengths if run is None else _lengths(run, fusion.lengths, samples_per_prompt(spec), unread)
    assumptions += tuple(unread)
    if not lengths.by_prompt.share:
        assumptions += ("responses to one prompt are taken to differ as much as those to others",)
    each, batch = samples_per_prompt(spec), prompt_schedule(spec).batch
    setup = PeriodSetup(
        replace(fusion.layout, mode=spec.fusion.inter_stage.mode),
        batch,
        each,
        fusion.layout.prompts[::each],
        range(-batch, 0),
        spec.rollout.cut_by,
        times.training if times else 0.0,
        times.publishing if times else 0.0,
        spec.rollout.overlap_training != "Disabled",
    )
    return lengths, setup, assumptions


def _times(run: Path | None) -> RolloutTimes | None:
    try:
        return None if run is None else rollout_times(read_metrics(run / "metrics.jsonl"))
    except OSError:
        return None


def _lengths(run: Path, prior: LengthModel, each: int, unread: list[str]) -> LengthModel:
    """Return the lengths of the last iterations of a run as one batch, with the share that prompts explain.

    `each`: samples per prompt.
    """
    lengths: list[int] = []
    prompts: list[int] = []
    for segment in sorted((run / "journal").glob("iteration-*.log"))[-MAX_PERIOD:]:
        for message, origin, cut in responses_with_origins(file_records(segment, unread), each):
            if not cut:
                prompts.append((origin.iteration << 32) + origin.sample // each)
                lengths.append(len(message.tokens.data) // ITEM_BYTES)
    tokens = int(prior.window[0].prompts[0]) if prior.window else 1
    model = LengthModel.prior(prior.max_tokens)
    return model.with_batch([(tokens, length) for length in lengths], lines=prompts) if lengths else prior
