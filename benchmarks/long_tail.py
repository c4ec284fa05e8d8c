"""Generation and inference with a long tail: no fusion, Auto, and fixed thresholds, in turns in one job.

`python benchmarks/long_tail.py [--rounds 5] [--scenario A B] [--pictures FOLDER] [--json]`. Two generation workers,
real processes pinned to one core each, do all scoring too (inference.replicas: 0). The policy is a Llama whose
attention and MLP are computed but whose next token depends on the last one alone, so that its own end-of-sequence
decisions make the lengths: one response in fifteen takes a path on which it goes on ten times as long. Within a round
every setting decodes the same responses. A: scoring costs as much as the tail; B: next to nothing. Reported for each
setting: median seconds of generation + inference, how many times faster than Off (median over rounds), what the
simulator makes of the same lengths, and the share of control and transfer. The learning rate changes no weight.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_tail_policy import PROMPT, write_policy, write_scorer
from tests.coordinated import free_address

from rlhf_api.names import Env
from rlhf_operator.coordinator import __main__ as coordinator
from rlhf_operator.coordinator import effects, fusing, prompts
from rlhf_operator.coordinator.run import Run
from rlhf_operator.reports.metrics import read_metrics
from rlhf_operator.reports.picture import draw_timeline
from rlhf_operator.reports.timeline import read_spans
from rlhf_planner.inter_stage.choose import FusionChoice

BATCH, MAX_TOKENS, ROWS = 48, 512, 24
THRESHOLDS = (2, 4, 8, 12, 18)
"""Of the sweep; the pool is one of the two workers."""
WARM_UP = 2
"""Iterations that are not counted: costs are measured in the first, caches fill in both."""
SCORERS = {"A": {"hidden_size": 384, "num_hidden_layers": 6}, "B": {"hidden_size": 32, "num_hidden_layers": 1}}
"""Reference model of each scenario: what scoring costs is set by its size."""


@dataclass(frozen=True)
class Setting:
    """What an iteration does about its tail."""

    name: str
    threshold: int = 0
    auto: bool = False


@dataclass(frozen=True)
class Turns:
    """Which iteration goes by which setting."""

    settings: tuple[Setting, ...]
    rounds: int

    @classmethod
    def of(cls, thresholds: Sequence[int], rounds: int) -> "Turns":
        """No fusion, Auto, and the sweep."""
        sweep = (Setting(f"R_t={threshold}, m=1", threshold) for threshold in thresholds)
        return cls((Setting("Off"), Setting("Auto", auto=True), *sweep), rounds)

    @property
    def iterations(self) -> int:
        """Of the job."""
        return WARM_UP + self.rounds * len(self.settings)

    def turn(self, iteration: int) -> tuple[int, Setting]:
        """(round, setting) of an iteration; every round begins with another setting."""
        number, place = divmod(max(0, iteration - WARM_UP), len(self.settings))
        return number, self.settings[(place + number) % len(self.settings) if iteration >= WARM_UP else 0]


def write_job(folder: Path, scenario: str, iterations: int) -> Path:
    """Models, prompts, reward and the resolved manifest."""
    write_policy(folder / "policy")
    write_scorer(folder / "reference", **SCORERS[scenario])
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": PROMPT}) + "\n" for _ in range(BATCH)))
    (folder / "reward.py").write_text("def score(prompt, response, record):\n    return float(len(response) % 7)\n")
    spec = {
        "algorithm": {"grpo": {"miniBatchSize": BATCH, "groupSize": 2}},
        "iterations": iterations,
        "seed": 11,
        "models": {
            "actor": {"path": str(folder / "policy")},
            "reference": {"path": str(folder / "reference")},
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        "prompts": {"path": str(folder / "prompts.jsonl"), "shuffle": False},
        "rollout": {"batchSize": BATCH, "maxPromptTokens": 8, "maxResponseTokens": MAX_TOKENS},
        "generation": {"replicas": 2, "maxBatchSize": ROWS},
        "inference": {"replicas": 0},
        "training": {"microBatchSize": 8, "optimizer": {"learningRate": 1e-30}},
        "fusion": {"interStage": {"mode": "Auto", "balance": "Off"}},
    }
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "long-tail"}, "spec": spec}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job))
    return manifest


@contextmanager
def workers(folder: Path, address: str) -> Iterator[None]:
    """Two generation workers on a core each, and a training rank on whichever is free."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this benchmark pins two workers to a core each, and there is one")
    started = []
    for group, index, place in (
        ("generation", 0, cores[:1]),
        ("generation", 1, cores[1:2]),
        ("training", 0, cores[:2]),
    ):
        variables = {
            Env.COORDINATOR: address, Env.GROUP: group, Env.INDEX: str(index), Env.DEVICE: "cpu", Env.THREADS: "1",
            Env.LISTEN: free_address(), Env.RENDEZVOUS: "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        environment = {**os.environ, **{str(name): value for name, value in variables.items()}}
        with (folder / f"{group}-{index}.log").open("w") as log:
            command = ["taskset", "-c", ",".join(map(str, place)), sys.executable, "-m", "rlhf_workers"]
            started.append(subprocess.Popen(command, env=environment, stderr=log, stdout=log, cwd=folder))
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)


@contextmanager
def in_turns(turns: Turns) -> Iterator[None]:
    """Every iteration of the coordinator in this process goes by the setting whose turn it is."""
    planned, random_key = fusing.begin, prompts.random_key

    def begin(run: Run) -> None:
        _, setting = turns.turn(run.world.iteration)
        if setting.auto:
            planned(run)
            return
        run.world.fusion.begin_iteration()
        if setting.threshold:
            run.world.fusion.choice = FusionChoice(setting.threshold, 1, "Auto", 0.0, 0.0, (), setting.name)

    fusing.begin = begin
    effects.random_key = lambda seed, iteration, index: random_key(seed, turns.turn(iteration)[0], index)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        fusing.begin, effects.random_key = planned, random_key  # type: ignore[attr-defined]


def run_scenario(folder: Path, scenario: str, turns: Turns) -> Path:
    """Runs the job; its run folder."""
    manifest, run_dir, address = write_job(folder, scenario, turns.iterations), folder / "run", free_address()
    os.environ |= {Env.JOB_FILE: str(manifest), Env.RUN_DIR: str(run_dir), Env.LISTEN: address}
    with in_turns(turns), workers(folder, address):
        outcome = asyncio.run(coordinator.run_job(*coordinator.prepare()))
    if outcome.phase != "Complete":
        raise SystemExit(f"scenario {scenario}: {outcome.phase}: {outcome.failure}; logs in {folder}")
    return run_dir


def report(run_dir: Path, turns: Turns) -> dict[str, Any]:
    """Numbers of a scenario."""
    by_round: dict[tuple[str, int], dict[str, float]] = {}
    for line in read_metrics(run_dir / "metrics.jsonl")[WARM_UP:]:
        number, setting = turns.turn(int(line["iteration"]))
        by_round[setting.name, number] = line
    rounds = sorted({number for _, number in by_round})
    table = {setting.name: _row(setting.name, rounds, by_round) for setting in turns.settings}
    best = min(row["seconds"] for name, row in table.items() if name.startswith("R_t"))
    lengths = _lengths(run_dir)
    errors = [error for row in table.values() for error in row["simulator_errors"]]
    return {
        "settings": table,
        "auto_over_off": table["Auto"]["off_over_this"],
        "auto_over_best_of_sweep": round(table["Auto"]["seconds"] / best, 4),
        "simulator_error_median": round(statistics.median(map(abs, errors)), 4) if errors else None,
        "length_median": statistics.median(lengths),
        "length_p99": sorted(lengths)[int(0.99 * len(lengths))],
        "chosen": [int(by_round["Auto", number]["fusion/threshold"]) for number in rounds],
    }


def _row(name: str, rounds: Sequence[int], by_round: dict[tuple[str, int], dict[str, float]]) -> dict[str, Any]:
    key = "seconds/generation_and_inference"
    lines = [by_round[name, number] for number in rounds]
    seconds = [line[key] for line in lines]
    simulated = [line.get("fusion/simulated_seconds", float("nan")) for line in lines]
    ratios = [by_round["Off", number][key] / by_round[name, number][key] for number in rounds]
    return {
        "seconds": round(statistics.median(seconds), 4),
        "off_over_this": round(statistics.median(ratios), 4),
        "generation_seconds": round(statistics.median(line["seconds/generation"] for line in lines), 4),
        "simulated_seconds": round(statistics.median(simulated), 4),
        "simulator_errors": [round(s / m - 1, 4) for s, m in zip(simulated, seconds, strict=True)],
        "overhead_share": round(statistics.median(line["fusion/overhead_share"] for line in lines), 5),
        "idle_share": round(statistics.median(line["idle/generation"] for line in lines), 3),
        "moved": sum(line["samples/migrated"] for line in lines),
    }


def _lengths(run_dir: Path) -> list[int]:
    from rlhf_operator.coordinator.journal import Journal

    journal = Journal(run_dir / "journal")
    records = [record for number in journal.iterations() for record in journal.read(number)]
    return [len(r.finished.tokens.data) // 4 for r in records if r.WhichOneof("record") == "finished"]


def draw(run_dir: Path, folder: Path, scenario: str, turns: Turns) -> None:
    """The timeline of one iteration without fusion and of the one with Auto in the same round."""
    spans = [span for span in read_spans(run_dir / "timeline.json") if not span.name.startswith("predicted/")]
    shown = ("decode", "prefill", "score", "migrate")
    for iteration in range(turns.iterations - len(turns.settings), turns.iterations):
        name = turns.turn(iteration)[1].name
        if name in ("Off", "Auto"):
            mine = [span for span in spans if span.iteration == iteration and span.name.startswith(shown)]
            draw_timeline(mine, folder / f"long-tail-{scenario}-{name.lower()}.png")


def main() -> int:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--thresholds", nargs="+", type=int, default=THRESHOLDS, help="of the sweep")
    parser.add_argument("--scenario", nargs="+", choices=sorted(SCORERS), default=sorted(SCORERS))
    parser.add_argument("--pictures", type=Path, help="folder for the timelines of the last round")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    turns = Turns.of(arguments.thresholds, arguments.rounds)
    results: dict[str, Any] = {"rounds": arguments.rounds, "batch": BATCH, "load": os.getloadavg()[2]}
    for scenario in arguments.scenario:
        with tempfile.TemporaryDirectory(prefix="rlhf-long-tail-") as folder:
            run_dir = run_scenario(Path(folder), scenario, turns)
            results[scenario] = report(run_dir, turns)
            if arguments.pictures:
                draw(run_dir, arguments.pictures, scenario, turns)
        for name, row in results[scenario]["settings"].items():
            print(
                f"{scenario} {name:>12}: {row['seconds']:7.3f} s, {row['off_over_this']:.3f}x as fast as Off, "
                f"simulated {row['simulated_seconds']:7.3f} s, overhead {row['overhead_share']:.2%}, "
                f"idle {row['idle_share']:.0%}",
                flush=True,
            )
    print(json.dumps(results) if arguments.json else results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
