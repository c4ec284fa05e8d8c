"""Compares predicted with measured training on real, unpaced processes: `python -m benchmarks.plan_accuracy`.

For each workload it starts the training ranks of every layout of up to two devices, in every micro-batch that is
compared, as processes of this machine with one thread and a core each. All groups exist at once and one at a time
works. Every round goes through all plans, forwards and backwards alternately. Before every other round one group
measures its costs, as a job with `spec.training.profile: Auto` does once; the shortest times count. The seconds outside
of mini-batches come from the profiled layout, as from a job's newest run. All other layouts are predicted from these
figures alone.

`measured` is the shortest step of all rounds, because other load on a machine only adds time; `median` is the median.
`error` is predicted over measured, minus 1. `regret` is the measured time of the plan with the least prediction over
the least measured time, minus 1. `tau` is Kendall's rank correlation of predicted and measured seconds.
Rule: only training runs here. Plans with the same training differ in generation, whose costs a run measures itself.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

from benchmarks.plan_regret import kendall_tau
from benchmarks.training_backends import LayoutRanks, free_addresses, write_models
from benchmarks.training_ranks import WAIT_SECONDS, Layout, job_of, models_of

from rlhf_coordinator.learned_figures import read_workload
from rlhf_planner.inter_stage.lengths import LengthModel
from rlhf_planner.plan_search.cost_document import CostDocument
from rlhf_planner.plan_search.cost_figures import CostFigure, FigureSource, PlanCosts, device_figures
from rlhf_planner.plan_search.training_choices import own_settings
from rlhf_planner.plan_search.training_seconds import TrainingTimes, training_times
from rlhf_planner.schedule.methods import opposite
from rlhf_planner.schedule.serial import METHOD as SERIAL
from rlhf_planner.schedule.serial import serial_table

PAUSE_SECONDS: Final = 0.3
"""Seconds for other processes between two stretches of urgent work."""
LAYOUTS: Final = (
    Layout("torch"),
    Layout("torch", data=2),
    Layout("torch", data=2, shard_optimizer=True),
    Layout("torch", pipeline=2),
)


@dataclass(frozen=True)
class AccuracyCase:
    """One workload: models, and samples of one length."""

    name: str
    algorithm: str
    micro_batch: int
    mini_batch: int
    prompt: int
    response: int
    hidden: int
    layers: int

    def options(self, micro_batch: int) -> argparse.Namespace:
        """Return the options of its ranks with another micro-batch."""
        return argparse.Namespace(
            algorithm=self.algorithm, micro_batch=micro_batch, microbatches=self.mini_batch // micro_batch,
            prompt=self.prompt, response=self.response, hidden=self.hidden, layers=self.layers,
            critic_hidden=self.hidden, critic_layers=self.layers, seed=0,
        )  # fmt: skip


CASES: Final = (
    AccuracyCase("ppo, quickstart's models", "ppo", 16, 64, 5, 6, 96, 2),
    AccuracyCase("grpo, quickstart's model", "grpo", 16, 64, 5, 6, 96, 2),
    AccuracyCase("grpo, 10.2M parameters", "grpo", 4, 16, 16, 48, 320, 6),
)


@dataclass
class MeasuredLayout:
    """A layout with a micro-batch: its ranks, and the seconds of their steps."""

    ranks: LayoutRanks
    options: argparse.Namespace
    urgent: bool
    """Whether its processes have real-time priority while they work."""
    seconds: list[float] = field(default_factory=list)
    mini_batches: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Layout and micro-batch in words."""
        words = self.ranks.layout.name.removeprefix("torch").strip() or "one rank"
        return f"{words}, micro-batch {self.options.micro_batch}"

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let the ranks work without other load, if this benchmark was asked to."""
        if not self.urgent:
            yield
            return
        time.sleep(PAUSE_SECONDS)
        with idle_cores(self.ranks.layout.world):
            self.ranks.all("hurry", True)
            yield
            self.ranks.all("hurry", False)

    def step(self) -> None:
        """Train one iteration, and record its seconds on the slowest rank."""
        with self.working():
            taken = self.ranks.step(SERIAL)
        self.seconds.append(taken["seconds"])
        self.mini_batches.append(taken["mini_batch"])

    def predicted(self, costs: PlanCosts) -> TrainingTimes:
        """Return the predicted training of one iteration."""
        job = job_of(self.ranks.folder, self.options, self.ranks.layout)
        workload, _ = read_workload(job, None)
        lengths = LengthModel.prior(job.spec.rollout.max_response_tokens)
        lengths = lengths.with_batch([(self.options.prompt, self.options.response)] * 64)
        prompts = (self.options.prompt,) * len(workload.prompts)
        return training_times(replace(workload, lengths=lengths, prompts=prompts), costs, own_settings(job.spec))


@contextmanager
def idle_cores(used: int) -> Iterator[None]:
    """Keep other load away from all cores after the first `used` ones, by processes that compute nothing."""
    pids = []
    try:
        for core in sorted(os.sched_getaffinity(0))[used:]:
            pid = os.fork()
            if pid == 0:
                end = time.monotonic() + WAIT_SECONDS
                while time.monotonic() < end:
                    pass
                os._exit(0)
            pids.append(pid)
            os.sched_setaffinity(pid, {core})
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def layouts_of(case: AccuracyCase, folder: Path, profiled: str, urgent: bool) -> list[MeasuredLayout]:
    """Return every layout and micro-batch, the profiled one first."""
    found = []
    for layout in LAYOUTS:
        for micro_batch in (case.micro_batch // 2, case.micro_batch, 2 * case.micro_batch):
            if case.mini_batch % (micro_batch * layout.data):
                continue
            options = case.options(micro_batch)
            ranks = LayoutRanks(layout, folder, models=models_of(options))
            tables = serial_table(opposite(ranks.models, layout.pipeline, options.microbatches // layout.data))
            ranks.tables = {SERIAL: tables}
            found.append(MeasuredLayout(ranks, options, urgent))
    return sorted(found, key=lambda each: each.name != f"{profiled}, micro-batch {case.micro_batch}")


def profile_of(profiled: MeasuredLayout) -> CostDocument:
    """Return the figures that the ranks of a layout measure now."""
    with profiled.working():
        documents = [CostDocument.read(text) for text in profiled.ranks.all("profile")]
    return reduce(CostDocument.merged, documents)


def with_rest(costs: PlanCosts, profiled: MeasuredLayout) -> PlanCosts:
    """Return the costs with the seconds outside of mini-batches, learned from the steps of the profiled layout."""
    pairs = zip(profiled.seconds, profiled.mini_batches, strict=True)
    outside = min(whole - inside for whole, inside in pairs)
    rest = max(0.0, outside - profiled.predicted(costs).after_schedules)
    return replace(costs, iteration_seconds=CostFigure(rest, FigureSource.LEARNED))


def result_of(case: AccuracyCase, profiled: str, rounds: int, *, urgent: bool) -> dict[str, Any]:
    """Measure one workload and return its figures."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ending:
        folder = Path(name)
        write_models(folder, case.options(case.micro_batch))
        plans = layouts_of(case, folder, profiled, urgent)
        for plan, address in zip(plans, free_addresses(len(plans)), strict=True):
            ending.callback(plan.ranks.kill)
            plan.ranks.start(plan.options, address)
        for plan in plans:
            plan.ranks.step(SERIAL)  # a warm-up
        profiles = []
        for number in range(rounds):
            if number % 2 == 0:
                profiles.append(profile_of(plans[0]))
            for plan in plans if number % 2 else plans[::-1]:
                plan.step()
        job = job_of(folder, plans[0].options, plans[0].ranks.layout)
        costs = with_rest(reduce(CostDocument.merged, profiles).applied(device_figures(job.spec)), plans[0])
        rows = [_row(plan, plan.predicted(costs)) for plan in plans]
    chosen = min(rows, key=lambda row: row["predicted"])
    best = min(rows, key=lambda row: row["measured"])
    return {
        "case": case.name, "profiled": plans[0].name, "costs": _figures(costs), "plans": rows,
        "chosen": chosen["plan"], "best": best["plan"],
        "regret": chosen["measured"] / best["measured"] - 1,
        "tau": kendall_tau([row["predicted"] for row in rows], [row["measured"] for row in rows]),
        "worstError": max(abs(row["error"]) for row in rows[1:]),
        "medianError": statistics.median(abs(row["error"]) for row in rows[1:]),
    }  # fmt: skip


def _figures(costs: PlanCosts) -> dict[str, Any]:
    """Return the figures of training as data."""
    layers = {f"{profile.role} {profile.part}": profile.points for profile in costs.layers}
    single = (costs.stage_seconds, costs.start_seconds, costs.optimizer_seconds, costs.iteration_seconds)
    stage, start, optimizer, rest = (None if figure is None else figure.value for figure in single)
    link = {"bandwidth": costs.inside.bandwidth.value, "latency": costs.inside.latency.value}
    return {"layers": layers, "stage": stage, "start": start, "optimizer": optimizer, "rest": rest, "inside": link}


def _row(plan: MeasuredLayout, predicted: TrainingTimes) -> dict[str, Any]:
    measured = min(plan.seconds)
    return {
        "plan": plan.name, "predicted": predicted.total, "measured": measured, "miniBatch": min(plan.mini_batches),
        "median": statistics.median(plan.seconds), "error": predicted.total / measured - 1, "rest": predicted.rest,
        "parts": {role: dict(parts) for role, parts in predicted.models.items()},
    }  # fmt: skip


def main() -> None:
    """Print a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers of workloads")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profiled", default="pipeline 2", help="the layout that measures its costs")
    parser.add_argument(
        "--urgent", action="store_true",
        help="give the ranks all cores with real-time priority while they work; needs root",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    options = parser.parse_args()
    results = []
    for number in options.cases:
        result = result_of(CASES[number], options.profiled, options.rounds, urgent=options.urgent)
        results.append(result)
        print(f"{result['case']}; profiled: {result['profiled']}\n{'plan':<44} predicted measured  median   error")
        for row in result["plans"]:
            print(
                f"{row['plan']:<44} {row['predicted']:>9.4f} {row['measured']:>8.4f} {row['median']:>7.4f} "
                f"{row['error']:>7.1%}"
            )
        print(
            f"chosen {result['chosen']}: regret {result['regret']:.1%}, tau {result['tau']:.2f}, error of other "
            f"layouts at most {result['worstError']:.1%}, median {result['medianError']:.1%}", flush=True,
        )  # fmt: skip
    if options.json:
        machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
        print(
            json.dumps(
                {
                    "benchmark": "plan_accuracy",
                    **machine,
                    "rounds": options.rounds,
                    "urgent": options.urgent,
                    "results": results,
                }
            )
        )


if __name__ == "__main__":
    main()
