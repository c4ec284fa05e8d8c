"""Measures the cost of an evaluation: without one, with one, and with one that no released worker helps with.

`python benchmarks/evaluation.py --json` runs jobs of a manifest (the quickstart's by default) in turns on this
machine. It prints a table, and with `--json` one object as the last line: median seconds of an iteration, of
evaluations, and of waiting for them. Creates the quickstart's policy first if it is missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
QUICKSTART: Final = ROOT / "examples" / "quickstart" / "grpo.yaml"
WARM_UP: Final = 2
"""Number of first iterations, left out because they measure costs and compile."""
WAYS: Final[dict[str, tuple[str, ...]]] = {
    "none": (),
    "released": ("spec.evaluation={every: 1, promptCount: %d}",),
    "without_fusion": ("spec.evaluation={every: 1, promptCount: %d}", "spec.fusion.interStage.mode=Disabled"),
    "none_without_fusion": ("spec.fusion.interStage.mode=Disabled",),
}


def run_way(manifest: Path, way: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one job; return its metric lines."""
    sets = [text % arguments.prompts if "%d" in text else text for text in WAYS[way]]
    sets.append(f"spec.iterations={WARM_UP + arguments.iterations}")
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(manifest), "--plain", "--run-dir", str(folder)]
    for text in [*sets, *arguments.set]:
        command += ["--set", text]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if ended.returncode:
        raise SystemExit(f"{way}: exit code {ended.returncode}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the iterations after the warm-up. The last iteration only waits for the last version."""
    measured = lines[WARM_UP:-1]
    names = {
        "iteration": "seconds/iteration",
        "evaluation": "evaluation/seconds",
        "waited": "evaluation/waited_seconds",
    }
    return {
        name: statistics.median(line[metric] for line in measured)
        for name, metric in names.items()
        if all(metric in line for line in measured)
    }


def main() -> None:
    """Run the jobs in turns and print their times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=QUICKSTART)
    parser.add_argument("--iterations", type=int, default=8, help="measured ones")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="as of rlhf run")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.manifest == QUICKSTART:
        subprocess.run([sys.executable, QUICKSTART.parent / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            for way in WAYS:
                folder = Path(temporary) / f"{way}-{number}"
                found[way].append(figures(run_way(arguments.manifest, way, folder, arguments)))
    table = {
        way: {name: statistics.median(entry[name] for entry in rounds) for name in rounds[0]}
        for way, rounds in found.items()
    }
    for way, numbers in table.items():
        print(f"{way:<22}" + "".join(f"{name} {value:8.3f} s   " for name, value in numbers.items()))
    if arguments.json:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
        print(json.dumps({"prompts": arguments.prompts, "iterations": arguments.iterations, **machine, "ways": table}))


if __name__ == "__main__":
    main()
