"""Every algorithm trains the quickstart's task in a real local run: its figure at first and at last, and the seconds.

    python benchmarks/algorithms.py [--only grpo,rloo] [--iterations 60] [--json]

The task: read three digits, answer their running sums (examples/quickstart). The policy is the quickstart's, which was
taught by examples. Each row (compared_algorithms.py) is one `rlhf run` of the same manifest with another
`spec.algorithm`. Where responses are sampled, the figure is the share of right answers in an iteration, whatever it is
that rewards them; otherwise the table names it. That at first is the mean over the first three iterations, that at last
over the last five. Rows by a judge come after a job that teaches the judge, by supervised fine-tuning. Exit code 1 when
a run failed or ended without its row's gain. `--json` prints one object as the last line.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
import yaml

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compared_algorithms import COST, JUDGE, JUDGE_JOB, ROWS, ComparedAlgorithm, judgments

ROOT: Final = Path(__file__).resolve().parents[1]
QUICKSTART: Final = ROOT / "examples" / "quickstart"
PIPELINE: Final = ROOT / "examples" / "pipeline"
ITERATIONS: Final = 60
"""Long enough for every row to come to its reward, short enough to be run by hand."""
FIRST: Final = 3
"""Iterations that the reward at first is averaged over."""
LAST: Final = 5
"""Iterations that the reward at last is averaged over."""
TIME_OUT_SECONDS: Final = 1800.0
"""For one run, several times what the slowest takes beside other work."""


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    name: str
    of: str
    code: int
    first: float
    last: float
    gain: float
    seconds: float
    iterations: int

    @property
    def reached(self) -> bool:
        """Whether the run ended well, with its gain."""
        return self.code == 0 and self.last >= self.first + self.gain


def prepared(folder: Path) -> Path:
    """Return a folder with the quickstart's policy, critic, prompts and reward, and the data of the other rows."""
    folder.mkdir()
    for source in QUICKSTART.glob("*.py"):
        (folder / source.name).write_bytes(source.read_bytes())
    subprocess.run([sys.executable, folder / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    made = folder / "pipeline"
    command = [sys.executable, str(PIPELINE / "make_data.py"), "--folder", str(made)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pairs = [json.loads(line) for line in (made / "pairs.jsonl").read_text().splitlines()]
    (folder / "judgments.jsonl").write_text("".join(json.dumps(asked) + "\n" for asked in judgments(pairs)))
    (folder / "cost.py").write_text(COST)
    return folder


def manifest(folder: Path, name: str, settings: Mapping[str, Any]) -> Path:
    """Write the quickstart's manifest with other settings (path -> value, None: without it), and return its path."""
    job = yaml.safe_load((QUICKSTART / "grpo.yaml").read_text())
    for path, value in settings.items():
        *parents, last = path.split(".")
        node = job["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = value
    written = folder / f"{name.replace('+', 'p')}.yaml"
    written.write_text(yaml.safe_dump(job, sort_keys=False))
    return written


def run(manifest: Path) -> tuple[int, list[dict[str, Any]]]:
    """Run a job; return its exit code and the metrics of its iterations, and print its last words where it failed."""
    run_dir = manifest.parent / "runs" / manifest.stem
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(manifest), "--run-dir", str(run_dir), "--plain"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_OUT_SECONDS, check=False)
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-2000:], sep="\n", file=sys.stderr)
    recorded = run_dir / "metrics.jsonl"
    return ended.returncode, read_metrics(recorded) if recorded.is_file() else []


def measure(folder: Path, name: str, row: ComparedAlgorithm, iterations: int) -> Result:
    """Run a row and return what it came to; a figure that no iteration reported is NaN."""
    saved = folder / "checkpoints" / name
    settings = {"algorithm": dict(row.algorithm), "iterations": iterations, **row.spec}
    if not row.figure:
        settings["checkpoints"] = {"path": str(saved), "every": iterations, "keep": 1}
    written = manifest(folder, name, settings)
    start = time.monotonic()
    code, lines = run(written)
    seconds = time.monotonic() - start
    if row.figure:
        figures = [line[row.figure] for line in lines if row.figure in line]
        first, last = mean(figures[:FIRST]), mean(figures[-LAST:])
    else:
        first, last = answers(folder / "assets" / "policy"), answers(newest(saved))
    return Result(name, row.of, code, first, last, row.gain, seconds, len(lines))


def answers(policy: Path) -> float:
    """Return the share of held-out prompts that a policy's sampled answers are right on; NaN without a policy."""
    if not policy.is_dir():
        return float("nan")
    sys.path.insert(0, str(PIPELINE))
    torch.manual_seed(0)
    right, _ = import_module("held_out").right_answers(policy)
    return float(right)


def newest(saved: Path) -> Path:
    """Return the actor's folder of the newest checkpoint; one that does not exist where there is none."""
    return max(saved.glob("iteration-*"), default=saved) / "actor"


def teach_judge(folder: Path) -> float:
    """Train the judge that some rows need; return the seconds. RuntimeError when its job failed."""
    saved, start = folder / "checkpoints" / JUDGE, time.monotonic()
    every = JUDGE_JOB["iterations"]
    code, _ = run(
        manifest(folder, JUDGE, {**JUDGE_JOB, "checkpoints": {"path": str(saved), "every": every, "keep": 1}})
    )
    if code:
        raise RuntimeError(f"the job that teaches the judge ended with exit code {code}")
    newest(saved).parent.rename(folder / JUDGE)
    return time.monotonic() - start


def mean(values: list[float]) -> float:
    """Return the mean, NaN of none."""
    return sum(values) / len(values) if values else float("nan")


def main() -> int:
    """Exit code 1 when a run failed or did not gain enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows to run, separated by commas; all when left out")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(ROWS)
    if unknown := [name for name in chosen if name not in ROWS]:
        parser.error(f"--only: no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    results = []
    torch.set_num_threads(1)  # held-out prompts are answered by a model this small
    with tempfile.TemporaryDirectory(prefix="rlhf-algorithms-") as scratch:
        folder = prepared(Path(scratch) / "quickstart")
        if any(ROWS[name].judged for name in chosen):
            print(f"a judge was taught in {teach_judge(folder):.1f} s", flush=True)
        print(f"{'algorithm':<22} {'first':>6} {'last':>6} {'needed':>8} {'seconds':>8}", flush=True)
        for name in chosen:
            result = measure(folder, name, ROWS[name], arguments.iterations)
            results.append(result)
            failed = "" if result.reached else f"  FAILED (exit code {result.code})"
            numbers = f"{result.first:6.3f} {result.last:6.3f} {result.first + result.gain:8.3f} {result.seconds:8.1f}"
            print(f"{name:<22} {numbers}  {result.of}{failed}", flush=True)
    if arguments.json:
        machine = {"cores": os.cpu_count(), "processor": platform.processor(), "load": os.getloadavg()[0]}
        rows = [{**asdict(result), "reached": result.reached} for result in results]
        print(json.dumps({"iterations": arguments.iterations, "machine": machine, "rows": rows}))
    return 0 if all(result.reached for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
