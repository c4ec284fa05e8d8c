"""Counts decode steps without drafts, with drafts of siblings, and with drafts ahead besides.

    python -m benchmarks.drafts_ahead [--quickstart FOLDER] [--iterations 8] [--learning-rate 3e-5] [--json]

Short responses: a deterministic GRPO job with 64 samples of at most 12 tokens on two generation workers. Its policy is
a tiny random Llama, or that of a copy of examples/quickstart after its `prepare.py`. Every way trains the same bits,
which the script checks, so steps are compared at equal tokens. `sample_steps` are the samples of all decode steps,
added up: without drafts there is one for each token. `engine_steps` are decode steps of both workers. Both leave the
steps out that decoded ahead. Means are over all iterations but the first, which has no drafts ahead. `saved` is
relative to the way `siblings`. `right_share_age_N`: share of the compared tokens before the first difference, for
drafts by weights N versions older. The learning rate is constant.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.support.jobs.chaos import Ended, assert_same_weights, run_job
from tests.support.jobs.local_job import write_job

DRAFTS: Final = "generation.speculation"
WAYS: Final[dict[str, tuple[str, ...]]] = {
    "no drafts": (f"{DRAFTS}.mode=Disabled",),
    "siblings": (f"{DRAFTS}.mode=Fixed", f"{DRAFTS}.drafters=[Siblings]"),
    "siblings and ahead": (f"{DRAFTS}.mode=Fixed", f"{DRAFTS}.drafters=[Siblings]", f"{DRAFTS}.ahead=Auto"),
}
BATCH: Final = 64


def manifest_of(folder: Path, quickstart: Path | None) -> Path:
    """Write a job with a tiny random policy below a folder, or copy a quickstart there; return its manifest."""
    if quickstart is None:
        return write_job(folder, algorithm="grpo", batch=BATCH, responses=12)
    shutil.copytree(quickstart, folder)
    return folder / "grpo.yaml"


def settings(iterations: int, learning_rate: float, run: Path, every: int) -> tuple[str, ...]:
    """Return the settings of all ways; a checkpoint is saved in the run folder after each `every` iterations."""
    return (
        "deterministic=true",
        f"iterations={iterations}",
        f"rollout.batchSize={BATCH}",
        f"training.optimizer={{schedule: Constant, learningRate: {learning_rate:.9f}}}",
        f"checkpoints={{path: {run / 'checkpoints'}, every: {every}, keep: {iterations}}}",
    )


def engine_steps(run: Ended) -> dict[int, int]:
    """Return the decode steps of all workers by iteration, without those that decoded ahead."""
    steps: dict[int, int] = {}
    for event in json.loads(run.read("timeline.json")):
        if event.get("name") in ("decode", "prefill"):
            iteration = int(event["args"]["iteration"])
            steps[iteration] = steps.get(iteration, 0) + int(event["args"]["steps"])
    return steps


def figures(run: Ended) -> dict[str, Any]:
    """Return the steps and the drafts of a run as means over its iterations but the first."""
    lines, steps = run.lines[1:], engine_steps(run)
    found: dict[str, Any] = {
        "tokens": statistics.fmean(line["tokens"] for line in lines),
        "sample_steps": statistics.fmean(line["tokens"] / line.get("speculation/tokens_per_step", 1) for line in lines),
        "engine_steps": statistics.fmean(steps[int(line["iteration"])] for line in lines),
    }
    names = sorted({name for line in lines for name in line if name.startswith("ahead/")})
    for name in names:
        found[name.removeprefix("ahead/")] = statistics.fmean(line[name] for line in lines if name in line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--max-tokens", type=int, default=12, help="most drafted tokens per sample and pass")
    parser.add_argument("--quickstart", type=Path, help="folder of a quickstart after its prepare.py")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = manifest_of(Path(folder) / "job", options.quickstart)
        runs = {}
        for name, changes in WAYS.items():
            run = Path(folder) / name.replace(" ", "-")
            common = settings(options.iterations, options.learning_rate, run, options.iterations)
            longest = f"{DRAFTS}.maxTokens={options.max_tokens}"
            runs[name] = run_job(manifest, run, settings=(*common, longest, *changes))
            print(f"{name}: {runs[name].seconds:.0f} s", file=sys.stderr, flush=True)
        assert_same_weights(*runs.values())
        results = {name: figures(run) for name, run in runs.items()}
    most = results["siblings"]
    for name, found in results.items():
        found["sample_steps_saved"] = 1 - found["sample_steps"] / most["sample_steps"]
        found["engine_steps_saved"] = 1 - found["engine_steps"] / most["engine_steps"]
        print(name + ":", ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    if options.json:
        print(json.dumps({"learning_rate": options.learning_rate, "ways": results}))


if __name__ == "__main__":
    main()
