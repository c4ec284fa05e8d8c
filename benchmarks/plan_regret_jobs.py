"""Compares the chosen plan with all plans, as real jobs on this machine: `python -m benchmarks.plan_regret_jobs`.

A device is a process with one thread. A first job with the setting's own plan teaches the costs, as a user's first
`rlhf run` does. Then every plan of up to N devices runs as a job of its own, one at a time, once in each round; every
second round goes through them backwards. `measured` is the median time of an iteration after the first ones, and the
shortest of all rounds, because other load on a machine only adds time. The predictions come from the first job alone.

`regret` is the measured time of the chosen plan over the least measured time, minus 1. `tau` is Kendall's rank
correlation of predicted with measured times. `error` is predicted over measured, minus 1.
Rule: plans differ in groups, placement and layout. With `--micro-batches own` all have the setting's micro-batch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml
from benchmarks.peers_settings import SETTINGS, PeerSetting, manifest
from benchmarks.plan_regret import kendall_tau

from rlhf_api.protocol import read_job
from rlhf_cli.plan_search import job_search
from rlhf_coordinator.learned_figures import read_workload, run_costs
from rlhf_planner.plan_search.device_plan import DevicePlan, manifest_with, refused_manifest
from rlhf_planner.plan_search.search import PlanSearch, counts_up_to, device_plan
from rlhf_planner.plan_search.seeded_search import find_plans

TIME_OUT_SECONDS: Final = 1800.0
"""Time-out of one job."""
ITERATIONS: Final = {"quickstart": 16, "llama-10m": 6}
"""Iterations of each job of a setting."""


@dataclass
class JobPlan:
    """One plan with its predicted seconds per iteration and those of each run."""

    plan: DevicePlan
    predicted: float
    runs: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """Shortest of the runs' median seconds per iteration."""
        return min(self.runs)

    def words(self) -> str:
        """Return the plan in words."""
        return f"{self.plan.groups}; {self.plan.training}"


def valid_plans(search: PlanSearch, data: dict[str, Any], job: Any, devices: int, micro: int | None) -> list[JobPlan]:
    """Return every plan of up to so many devices that validation accepts; `micro` allows one micro-batch alone."""
    found = [
        JobPlan(plan, predicted)
        for plan, predicted in _plans(search, devices)
        if micro in (None, plan.micro_batch_size) and not refused_manifest(manifest_with(data, job, plan))
    ]
    return list({plan.words(): plan for plan in found}.values())


def _plans(search: PlanSearch, devices: int) -> Iterator[tuple[DevicePlan, float]]:
    for placement in search.placements:
        for workers in search.workers(placement, devices):
            left = devices - search.rollouts.devices(workers)
            ranks = counts_up_to(left if placement == "Dedicated" else workers.generation_workers) if left >= 0 else []
            for count in ranks:
                for training in search.trainings.fitting(placement, count):
                    for overlap in search.overlaps(placement):
                        half = search.rollouts.half(workers)
                        predicted = search.combination.seconds(placement, half, training, overlap)[0]
                        yield device_plan(placement, workers, training, overlap), predicted


def run_job(data: dict[str, Any], folder: Path, run_dir: Path, warm: int) -> float:
    """Run a manifest and return the median seconds of its later iterations. Raises SystemExit if it fails."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(file), "--run-dir", str(run_dir), "--plain"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIME_OUT_SECONDS, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    ends: list[float] = [
        json.loads(line)["time_ns"] / 1e9 for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    return statistics.median([end - start for start, end in pairwise(ends)][warm - 1 :])


def result_of(name: str, setting: PeerSetting, options: argparse.Namespace) -> dict[str, Any]:
    """Run all plans of a setting and return what was measured."""
    with tempfile.TemporaryDirectory(prefix="rlhf-regret-") as scratch:
        folder = Path(scratch)
        setting.prepare(folder)
        data = manifest(setting, 1)
        data["spec"]["checkpoints"]["path"] = str(folder / "checkpoints")
        taught = folder / "taught"
        run_job(data, folder, taught, setting.warm)
        job = read_job(json.loads((taught / "job.json").read_text()))
        workload, _ = read_workload(job, taught)
        search = job_search(job, data, run_costs(job, taught)[0], workload, None)
        plans = valid_plans(search, data, job, options.devices, setting.micro_batch if options.own else None)
        chosen = chosen_plan(search, plans, options.devices)
        for number in range(options.rounds):
            for index, plan in list(enumerate(plans))[:: 1 if number % 2 == 0 else -1]:
                written = manifest_with(data, job, plan.plan)
                written["spec"]["checkpoints"]["path"] = str(folder / f"checkpoints-{number}-{index}")
                plan.runs.append(run_job(written, folder, folder / f"run-{number}-{index}", setting.warm))
                print(f"{name} {number} {plan.words()}: {plan.predicted:.3f} {plan.runs[-1]:.3f} s", flush=True)
    best = min(plans, key=lambda plan: plan.measured)
    return {
        "setting": name, "devices": options.devices, "plans": len(plans),
        "regret": chosen.measured / best.measured - 1,
        "tau": kendall_tau([plan.predicted for plan in plans], [plan.measured for plan in plans]),
        "error": chosen.predicted / chosen.measured - 1,
        "chosen": chosen.words(), "best": best.words(),
        "seconds": {plan.words(): [plan.predicted, *plan.runs] for plan in plans},
    }  # fmt: skip


def chosen_plan(search: PlanSearch, plans: list[JobPlan], devices: int) -> JobPlan:
    """Return the plan that the search finds; among plans of one micro-batch, the one with the least prediction."""
    found = find_plans(search, devices)[0].plan
    return next((plan for plan in plans if plan.plan == found), min(plans, key=lambda plan: plan.predicted))


def main() -> None:
    """Print one line per run, and a summary per setting."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=sorted(SETTINGS), default=sorted(SETTINGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", choices=["all", "own"], default="all")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    options = parser.parse_args()
    options.own = options.micro_batches == "own"
    results = []
    for name in options.only:
        setting = replace(SETTINGS[name], iterations=ITERATIONS[name], threads=1)
        results.append(result := result_of(name, setting, options))
        print(f"{name}: regret {result['regret']:.1%}, tau {result['tau']:.2f} of {result['plans']} plans, "
              f"error {result['error']:.1%}; chosen {result['chosen']}; best {result['best']}", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps({"results": results, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
