"""Compares TRL's GRPO with this project: samples per second, and reward against time, on the same training and cores.

    python benchmarks/peers.py [--only quickstart,llama-10m] [--rounds 3] [--overlap] [--picture FILE] [--json]

Model, prompts, reward function, batch, group, mini-batch, learning rate, loss and precision are the same, and so are
the versions of torch and transformers. The two sides take turns, one whole training each, never at the same time; the
order alternates between rounds. TRL runs in a separate environment, which uv creates the first time
(~/.cache/rlhf-operator/peers).

An iteration lasts from the end of the previous one to its own end. The first ones are left out (`warm`), and the start
is reported separately. `processor` is the processor time of all processes of a side per iteration, which other load
disturbs less. With `--overlap` this project takes a third turn, with `rollout.overlapTraining`: it decodes an iteration
while it trains on the previous one, with weights one version older. Reported: median, smallest and largest over rounds;
ratios are within a round. `--json` prints one object, last line, with the curves.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers_settings import SETTINGS, PeerSetting, manifest
from benchmarks.process_tree import ProcessorTime

ROOT: Final = Path(__file__).resolve().parents[1]
PEER: Final = {"trl": "1.16.0", "datasets": "5.2.0", "accelerate": "1.15.0"}
SHARED: Final = ("torch", "transformers", "numpy", "tokenizers")
"""Packages that both sides have in the same version."""
TIME_OUT_SECONDS: Final = 3600.0
"""Time-out of one training."""
NOTHING: Final[Mapping[str, Any]] = {}
COLOURS: Final = {"ours": "tab:blue", "trl": "tab:orange", "overlapped": "tab:green"}
LABELS: Final = {"ours": "rlhf-operator", "trl": f"TRL {PEER['trl']}", "overlapped": "rlhf-operator, overlapped"}
END_SECONDS: Final = 60.0
"""Seconds to wait for a side that was asked to end."""
SMOOTHED: Final = 5
"""Number of iterations whose mean reward must reach a setting's goal."""
Side = Callable[[PeerSetting, Path, argparse.Namespace], "PeerTraining"]


@dataclass(frozen=True)
class PeerTraining:
    """Results of one training of one side."""

    first_seconds: float
    """Seconds from the command to the end of the first iteration, including start and loading."""
    seconds: list[float]
    """Seconds of each iteration except the first."""
    rewards: list[float]
    """Mean reward of each iteration, including the first."""
    tokens: list[float]
    """Response tokens of each iteration, including the first."""
    processor: float
    """Processor seconds per iteration, mean of the warm ones."""
    load: float
    """Load average over the last minute, after the training."""

    def curve(self) -> list[tuple[float, float]]:
        """(Seconds since the first iteration's end, mean reward) at the end of each."""
        return [(round(sum(self.seconds[:n]), 3), round(reward, 4)) for n, reward in enumerate(self.rewards)]

    def seconds_to(self, goal: float) -> float | None:
        """Return the seconds from the first iteration's end until SMOOTHED iterations reached the mean reward, or
        None."""
        for end in range(SMOOTHED, len(self.rewards) + 1):
            if statistics.fmean(self.rewards[end - SMOOTHED : end]) >= goal:
                return sum(self.seconds[: end - 1])
        return None


def ours(
    setting: PeerSetting, folder: Path, options: argparse.Namespace, rollout: Mapping[str, Any] = NOTHING
) -> PeerTraining:
    """Run `rlhf run` once; `rollout` are fields of spec.rollout in addition to the setting's."""
    file, run_dir = folder / "job.yaml", folder / "run"
    for left in (run_dir, folder / "checkpoints"):
        shutil.rmtree(left, ignore_errors=True)
    job = manifest(setting, options.threads)
    job["spec"]["rollout"] |= rollout
    file.write_text(yaml.safe_dump(job, sort_keys=False))
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(file), "--run-dir", str(run_dir), "--plain"]
    start, spent, _ = watched(command, folder, options)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = [line["time_ns"] for line in lines]
    rewards, tokens = ([line[name] for line in lines] for name in ("reward", "tokens"))
    return run_of(setting, start, ends, rewards, tokens, spent)


def trl(setting: PeerSetting, folder: Path, options: argparse.Namespace) -> PeerTraining:
    """Run one training with GRPOTrainer."""
    wanted = {
        **{name: value for name, value in vars(setting).items() if isinstance(value, int | float)},
        "policy": str(folder / "assets" / "policy"),
        "prompts": str(folder / "assets" / "prompts.jsonl"),
        "reward": str(folder / "reward.py"),
        "folder": str(folder / "trl"),
        "threads": options.threads,
        "continuous": options.continuous_batching,
    }
    script = str(Path(__file__).with_name("peers_trl.py"))
    start, spent, said = watched([str(options.peer_python), script, json.dumps(wanted)], folder, options)
    recorded = json.loads(said.splitlines()[-1])
    return run_of(setting, start, recorded["ends_ns"], recorded["rewards"], recorded["tokens"], spent)


SIDES: Final[dict[str, Side]] = {"ours": ours, "trl": trl}
OVERLAPPED: Final = "overlapped"


def watched(command: Sequence[str], folder: Path, options: argparse.Namespace) -> tuple[int, ProcessorTime, str]:
    """Run a side; return its start (ns), its processor time, and its output. Raises SystemExit if it failed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    output, errors, start = folder / "output", folder / "errors", time.time_ns()
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=folder)
        try:
            with ProcessorTime(process.pid) as spent:
                code = process.wait(TIME_OUT_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(END_SECONDS)
    said = output.read_text()
    if code:
        shown = f"{said[-2000:]}\n{errors.read_text()[-4000:]}"
        raise SystemExit(f"{' '.join(command)[:300]} ended with code {code}\n{shown}")
    return start, spent, said


def run_of(
    setting: PeerSetting, start: int, ends: list[int], rewards: list[float], tokens: list[float], spent: ProcessorTime
) -> PeerTraining:
    """Return the results; `ends` is when each iteration ended, ns since 1970. Raises SystemExit if some are missing."""
    if {len(ends), len(rewards), len(tokens)} != {setting.iterations}:
        raise SystemExit(f"{len(ends)} iterations and {len(rewards)} rewards, not {setting.iterations}")
    seconds = [(after - before) / 1e9 for before, after in pairwise(ends)]
    processor = spent.between(ends[setting.warm - 1], ends[-1]) / (setting.iterations - setting.warm)
    return PeerTraining((ends[0] - start) / 1e9, seconds, rewards, tokens, processor, os.getloadavg()[0])


def spread(values: Sequence[float], digits: int = 3) -> list[float]:
    """Return median, smallest and largest value."""
    return [round(of(values), digits) for of in (statistics.median, min, max)]


def summary(setting: PeerSetting, runs: dict[str, list[PeerTraining]]) -> dict[str, Any]:
    """Return the results of a setting over all rounds."""
    warm = setting.warm
    medians = {side: [statistics.median(run.seconds[warm - 1 :]) for run in of_side] for side, of_side in runs.items()}
    result: dict[str, Any] = {}
    for own in (side for side in runs if side != "trl"):
        ratios = [theirs / seconds for seconds, theirs in zip(medians[own], medians["trl"], strict=True)]
        processor = [b.processor / a.processor for a, b in zip(runs[own], runs["trl"], strict=True)]
        compared = {"times_as_fast": spread(ratios, 2), "times_less_processor": spread(processor, 2)}
        result |= compared if own == "ours" else {f"{own}_{name}": value for name, value in compared.items()}
    for side, of_side in runs.items():
        reached = [run.seconds_to(setting.goal) for run in of_side]
        result[side] = {
            "seconds_per_iteration": spread(medians[side], 4),
            "samples_per_second": spread([setting.batch / seconds for seconds in medians[side]], 1),
            "tokens_per_second": spread([sum(r.tokens[warm:]) / sum(r.seconds[warm - 1 :]) for r in of_side], 1),
            "tokens_per_iteration": spread([statistics.fmean(run.tokens[warm:]) for run in of_side], 1),
            "processor_seconds_per_iteration": spread([run.processor for run in of_side], 4),
            "reward_first": spread([statistics.fmean(run.rewards[:SMOOTHED]) for run in of_side]),
            "reward_last": spread([statistics.fmean(run.rewards[-SMOOTHED:]) for run in of_side]),
            "seconds_to_goal": [None if seconds is None else round(seconds, 2) for seconds in reached],
            "first_iteration_seconds": spread([run.first_seconds for run in of_side], 1),
            "load": [round(run.load, 1) for run in of_side],
            "curves": [run.curve() for run in of_side],
        }
    return result


def shortened(setting: PeerSetting, iterations: int | None) -> PeerSetting:
    """Return a setting with the requested number of iterations, of which at least one counts."""
    if iterations is None:
        return setting
    return replace(setting, iterations=iterations, warm=min(setting.warm, iterations - 1))


def peer_python() -> Path:
    """Return the interpreter of the peer's environment; create it if missing, and install its packages. Needs uv."""
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-operator" / "peers"
    folder = base / f"trl-{PEER['trl']}"
    python = folder / "bin" / "python"
    wanted = [f"{name}=={pinned}" for name, pinned in PEER.items()]
    wanted += [f"{name}=={version(name).partition('+')[0]}" for name in SHARED]
    if not python.is_file():
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *wanted], check=True)
    return python


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw reward against time, one line per round."""
    figure = Figure(figsize=(5.2 * len(results), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, result) in zip(figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True):
        for side, color in COLOURS.items() if OVERLAPPED in result else list(COLOURS.items())[:2]:
            for number, curve in enumerate(result[side]["curves"]):
                label = LABELS[side] if number == 0 else None
                axes.plot(*zip(*curve, strict=True), color=color, label=label, linewidth=1.2, alpha=0.8)
        axes.set(title=name, xlabel="seconds since the first iteration's end", ylabel="mean reward of a batch")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, help="of each training; as the setting says when left out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the peer's process")
    parser.add_argument("--continuous-batching", action="store_true", help="TRL generates by transformers' own engine")
    parser.add_argument("--overlap", action="store_true", help="and this project with rollout.overlapTraining")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - SETTINGS.keys():
        parser.error(f"--only: no setting {', '.join(sorted(unknown))}; there are {', '.join(SETTINGS)}")
    if options.iterations is not None and options.iterations < 2:
        parser.error(f"--iterations: {options.iterations}, the first is never counted: at least 2")
    chosen = {name: shortened(SETTINGS[name], options.iterations) for name in options.only.split(",")}
    options.peer_python = peer_python()
    versions = {**PEER, **{name: version(name) for name in SHARED}, "rlhf-operator": version("rlhf-operator")}
    print(" ".join(f"{name} {of}" for name, of in versions.items()), flush=True)
    results = {}
    sides = SIDES | {OVERLAPPED: partial(ours, rollout={"overlapTraining": "Enabled"})} if options.overlap else SIDES
    for name, setting in chosen.items():
        runs: dict[str, list[PeerTraining]] = {side: [] for side in sides}
        with tempfile.TemporaryDirectory(prefix="rlhf-peers-") as scratch:
            setting.prepare(Path(scratch))
            for number in range(options.rounds):
                for side in list(sides) if number % 2 == 0 else reversed(sides):
                    run = sides[side](setting, Path(scratch), options)
                    runs[side].append(run)
                    rate = setting.batch / statistics.median(run.seconds[setting.warm - 1 :])
                    shown = f"{rate:7.1f} samples/s, {run.processor:.3f} processor seconds an iteration"
                    print(f"{name} {number} {side:<5} {shown}, load {run.load:.1f}", flush=True)
        results[name] = summary(setting, runs)
        ratios = {key: value for key, value in results[name].items() if key.endswith("times_as_fast")}
        print(f"{name}: TRL's seconds over ours {ratios}", flush=True)
    if options.picture:
        draw(results, options.picture)
    if options.json:
        machine = {
            "cores": sorted(os.sched_getaffinity(0)),
            "processor": platform.machine(),
            "threads": options.threads,
        }
        print(json.dumps({"versions": versions, "machine": machine, "rounds": options.rounds, "settings": results}))


if __name__ == "__main__":
    main()
