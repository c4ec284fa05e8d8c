"""Critics trained beside the next decoding, and all models at once: the same PPO job, both ways, in turns, in one run.

`python benchmarks/critic_overlap.py [--rounds 2] [--iterations 8] [--training 0.25] [--json]`. Decode steps, passes of
scoring and mini-batches last what a stated device takes for them (`paced_worker`), so that processes which share cores
do not slow each other down: on devices of their own they would not either. Reported are the median seconds of an
iteration (the first two, which measure and learn, and the last, after which nothing follows, left out), what
`rlhf_planner.critic_overlap` says of the times of the job without it, and whether all models ended in the same weights.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail_policy import write_policy, write_scorer
from benchmarks.paced_worker import StepPace

from rlhf_coordinator.reports.trackers.facts_jsonl import FILE, read_facts
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_planner.critic_overlap import OverlapTimes, overlapped, unchanged
from rlhf_planner.explain.replays import scoring_latency, scoring_rate

BATCH: Final = 32
MAX_TOKENS: Final = 256
MINI_BATCHES: Final = 4
WARM_UP: Final = 2
"""Iterations of a job that no median counts."""
WAYS: Final = ("Disabled", "Enabled")
SCORER: Final = {"hidden_size": 32, "num_hidden_layers": 2}


def write_job(folder: Path, way: str, iterations: int) -> Path:
    """Write models, prompts, reward and the resolved manifest, whose path is returned."""
    write_policy(folder / "policy", 2)
    write_scorer(folder / "critic", **SCORER)
    paths = {name: {"path": str(folder / name)} for name in ("reference", "critic")}
    return pinned_job.write_job(
        folder,
        "critic-overlap",
        iterations=iterations,
        batch=BATCH,
        max_tokens=MAX_TOKENS,
        reference=SCORER,
        algorithm={"ppo": {"miniBatchSize": BATCH // MINI_BATCHES}},
        models={
            "actor": {"path": str(folder / "policy")},
            **paths,
            "reward": {"function": {"file": str(folder / "reward.py")}},
        },
        generation={"replicas": 1, "maxBatchSize": BATCH, "speculation": {"mode": "Disabled"}},
        inference={"replicas": 1, "incremental": "Disabled"},
        fusion={"interStage": {"mode": "Disabled"}},
        training={"microBatchSize": 8, "criticOverlap": way, "optimizer": {"learningRate": 2e-12}},
        checkpoints={"path": str(folder / "checkpoints"), "every": iterations, "keep": 1},
    )


def run_way(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job; return its seconds an iteration, its weights, and what the overlap is said to make of its times."""
    pace = StepPace(0.01, 0.0, 0.0, 0.005, 0.0, training=arguments.training)
    with tempfile.TemporaryDirectory(prefix="rlhf-critic-overlap-") as temporary:
        folder = Path(temporary)
        manifest = write_job(folder, way, arguments.iterations)
        run_dir = pinned_job.run_job(manifest, ["generation", "inference"], pace=pace)
        lines = read_metrics(run_dir / "metrics.jsonl")[WARM_UP:-1]
        counted = [facts for facts in read_facts(run_dir / FILE) if facts.iteration >= WARM_UP][:-1]
        weights = hashlib.sha256()
        for file in sorted(folder.glob("checkpoints/*/*/*.safetensors")):
            weights.update(file.read_bytes())
    predicted = []
    for facts in counted:
        samples, training = facts.samples, facts.phases["Training"]
        if samples is None:
            continue
        times = OverlapTimes(
            training,
            training / 2,  # both models are paced alike
            training / 2,
            facts.phases["Publishing"],
            tuple(samples.finished),
            scoring_rate(samples),
            scoring_latency(samples),
        )
        predicted.append(unchanged(times) / overlapped(times))
    return {
        "seconds": [line["seconds/iteration"] for line in lines],
        "overlap": [line.get("training/critic_overlap_seconds", 0.0) for line in lines],
        "predicted": predicted,
        "weights": weights.hexdigest(),
    }


def main() -> int:
    """Exit code 1 when the two ways ended in other weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--training", type=float, default=0.25, help="seconds of a mini-batch of one model")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS:
            runs[way].append(run_way(way, arguments))
            seconds = statistics.median(runs[way][-1]["seconds"])
            print(f"round {number}, criticOverlap {way}: {seconds:.2f} s an iteration", flush=True)
    medians = {way: statistics.median(s for run in runs[way] for s in run["seconds"]) for way in WAYS}
    predicted = [ratio for run in runs["Disabled"] for ratio in run["predicted"]]
    result = {
        "disabled_seconds": round(medians["Disabled"], 3),
        "enabled_seconds": round(medians["Enabled"], 3),
        "disabled_over_enabled": round(medians["Disabled"] / medians["Enabled"], 3),
        "predicted_ratio": round(statistics.median(predicted), 3) if predicted else None,
        "overlap_seconds": round(statistics.median(s for run in runs["Enabled"] for s in run["overlap"]), 3),
        "same_weights": len({run["weights"] for way in WAYS for run in runs[way]}) == 1,
        "mini_batch_seconds": arguments.training,
        "rounds": arguments.rounds,
        "iterations": arguments.iterations,
    }
    print(json.dumps(result) if arguments.json else result)
    return 0 if result["same_weights"] else 1


if __name__ == "__main__":
    sys.exit(main())
