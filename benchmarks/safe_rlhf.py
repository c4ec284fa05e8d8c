"""Safe RLHF where reward and cost conflict: does the cost end under its limit while the reward rises, by its own law?

`python benchmarks/safe_rlhf.py [--iterations 40] [--limit 0.05] [--picture FILE] [--json]`. An untrained policy is
rewarded for the share of digits in a response, and digits below 5 are its cost: at first what is rewarded is harmful
half of the time. One whole job of real processes. Reported: mean reward and cost of the first and the last five
iterations, lambda at both ends and its largest, and how far nu was from the formula computed again of the costs.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any, Final

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import run_job
from tests.support.local_job import write_job

BATCH: Final = 64
EDGE: Final = 5
"""Iterations at either end whose mean is reported."""
RATE: Final = 0.5
"""multiplierLearningRate: five times the default, as the job is as short."""
WINDOW: Final = 128
"""Responses, the default of costWindow."""
COST: Final = '''\
def score(prompt, response, record):
    """Share of characters that are digits below 5: what the reward asks for, and is not to be said."""
    return sum(character in "01234" for character in response) / max(1, len(response))
'''
FIELDS: Final[dict[str, Any]] = {
    "miniBatchSize": BATCH, "klCoefficient": 0.0, "valueClipRange": 0, "whitenAdvantages": True,
    "multiplierLearningRate": RATE,
}  # fmt: skip


def write(folder: Path, iterations: int, limit: float) -> Path:
    """Write the job; return its manifest."""
    manifest = write_job(
        folder, algorithm="safeRlhf", iterations=iterations, batch=BATCH, responses=12, every=20, learning_rate=3e-3
    )
    job = yaml.safe_load(manifest.read_text())
    spec = job["spec"]
    spec["algorithm"] = {"safeRlhf": {**FIELDS, "costLimit": limit}}
    spec["models"]["cost"] = {"function": {"file": "cost.py"}}
    spec["training"] |= {"microBatchSize": BATCH // 2, "parallelism": {"pipeline": 1}}
    spec["training"]["optimizer"]["criticLearningRate"] = 1e-3
    spec["generation"] |= {"replicas": 1, "maxBatchSize": BATCH}
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    (folder / "cost.py").write_text(COST)
    return manifest


def off_formula(lines: list[dict[str, float]], limit: float) -> float:
    """Return the largest difference of nu from the formula. Every response of a batch counts as its mean: as the window
    is a whole number of batches, the mean over it is the same."""
    nu, worst = 0.0, 0.0
    window: deque[float] = deque(maxlen=WINDOW // BATCH)
    for line in lines:
        window.append(line["training/cost/mean"])
        nu = min(nu + RATE * (statistics.fmean(window) - limit) * math.exp(nu), math.log(5.0))
        worst = max(worst, abs(nu - line["training/cost/nu"]))
    return worst


def draw(lines: list[dict[str, float]], limit: float, file: Path) -> None:
    """Draw reward, cost and lambda over iterations."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    right = left.twinx()
    left.plot([line["reward"] for line in lines], color="tab:blue", label="reward")
    left.plot([line["cost"] for line in lines], color="tab:red", label="cost")
    left.axhline(limit, color="tab:red", linestyle="--", linewidth=1, label="costLimit")
    right.plot([line["training/cost/lambda"] for line in lines], color="tab:gray", label="lambda (right)")
    left.set(xlabel="iteration", ylabel="mean of a batch", ylim=(0, 1.02))
    right.set(ylabel="lambda", ylim=(0, None))
    left.legend(handles=[*left.get_lines(), *right.get_lines()], loc="lower right", bbox_to_anchor=(0.98, 0.12))
    figure.savefig(file, dpi=110)


def main() -> None:
    """Run the job and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--limit", type=float, default=0.05)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = run_job(write(folder / "job", options.iterations, options.limit), folder / "run")
        file = next(iter(folder.rglob("metrics.jsonl")))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line.get("metrics", line) for line in lines]
    if options.picture:
        draw(lines, options.limit, options.picture)
    multipliers = [line["training/cost/lambda"] for line in lines]
    answer = {"iterations": len(lines), "limit": options.limit, "seconds": round(ended.seconds, 1)}
    for measure in ("reward", "cost"):
        answer[f"{measure}First"] = round(statistics.fmean(line[measure] for line in lines[:EDGE]), 4)
        answer[f"{measure}Last"] = round(statistics.fmean(line[measure] for line in lines[-EDGE:]), 4)
    answer |= {"lambdaFirst": multipliers[0], "lambdaLast": multipliers[-1], "lambdaMax": max(multipliers)}
    answer["offFormula"] = off_formula(lines, options.limit)
    if options.json:
        print(json.dumps(answer))
        return
    for measure, value in answer.items():
        print(f"{measure:>14}  {value:.4g}")


if __name__ == "__main__":
    main()
