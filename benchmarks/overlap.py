"""Scoring beside generation against scoring after it: the same deterministic job, both ways, in turns, in one run.

`python benchmarks/overlap.py [--rounds 2] [--iterations 6] [--json]`. A reference model with more layers than the
policy makes scoring cost about as much as decoding. Reported: median seconds of generation plus inference an
iteration (the first left out), their ratio, and whether rewards and final weights were equal.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import models
from tests.support.chaos import run_job
from tests.support.local_job import write_job

REFERENCE_LAYERS = 24
"""Layers of the reference model; the policy has two."""


def stages(run_dir: Path) -> tuple[list[float], list[float]]:
    """(seconds of generation + inference, rewards) of each iteration but the first, which loads and warms up."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds/generation"] + line["seconds/inference"] for line in lines]
    return seconds[1:], [line["reward"] for line in lines]


def main() -> int:
    """Exit code 1 when a run failed or the two ways disagreed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"Enabled": [], "Disabled": []}
    outcomes = set()
    with tempfile.TemporaryDirectory(prefix="rlhf-overlap-") as folder:
        root = Path(folder)
        manifest = write_job(root, algorithm="grpo", iterations=arguments.iterations, responses=64)
        reference = models.write_policy(root / "reference", "llama", num_hidden_layers=REFERENCE_LAYERS)
        chosen = [f"spec.models.reference.path={reference}", "spec.generation.replicas=1"]
        for number in range(arguments.rounds):
            for overlap in ("Enabled", "Disabled"):
                settings = [*chosen, f"spec.inference.overlap={overlap}"]
                run_dir = root / f"{overlap}-{number}"
                ended = run_job(manifest, run_dir, options=[part for s in settings for part in ("--set", s)])
                if ended.code != 0:
                    print(ended.output)
                    return 1
                measured, rewards = stages(run_dir)
                seconds[overlap] += measured
                outcomes.add((ended.weights, tuple(rewards)))
                print(
                    f"round {number}, overlap {overlap}: {statistics.median(measured):.2f} s an iteration", flush=True
                )
    medians = {overlap: statistics.median(values) for overlap, values in seconds.items()}
    result = {
        "overlapped_seconds": round(medians["Enabled"], 3),
        "serial_seconds": round(medians["Disabled"], 3),
        "serial_over_overlapped": round(medians["Disabled"] / medians["Enabled"], 3),
        "same_rewards_and_weights": len(outcomes) == 1,
        "iterations": arguments.iterations,
        "rounds": arguments.rounds,
    }
    print(json.dumps(result) if arguments.json else result)
    return 0 if len(outcomes) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
