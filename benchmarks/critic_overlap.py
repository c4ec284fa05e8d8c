"""Critics trained beside the next decoding, all models at once, and the choice of Auto: the same PPO job, in turns.

`python benchmarks/critic_overlap.py [--rounds 2] [--iterations 10] [--training 0.25] [--cases wins loses] [--json]`.
Decode steps, passes of scoring and mini-batches last what a stated device takes for them (`paced_worker`), so that
processes which share cores do not slow each other down: on devices of their own they would not either. Two cases:

  wins   models train one after the other, and decoding takes longer than the critic
  loses  a mini-batch of both models takes 1.2 times one model's, as by a fused table, and decoding is short

Reported are the median seconds of an iteration once Auto has chosen (the first ones, which measure, and the last, after
which nothing follows, left out), the mean of all but the first and the last, which has what measuring costs Auto, what
`rlhf_planner.critic_overlap` says of the times of the job without the overlap, which iterations Auto trained apart, and
whether all models ended in the same weights.
"""

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail_policy import write_policy, write_scorer
from benchmarks.paced_worker import StepPace

from rlhf_coordinator.reports.trackers.facts_jsonl import FILE, read_facts
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_planner.critic_overlap import OverlapTimes, overlapped, unchanged
from rlhf_planner.explain.iteration_profile import IterationProfile
from rlhf_planner.explain.replays import scoring_latency, scoring_rate

BATCH: Final = 32
MINI_BATCHES: Final = 4
SETTLED: Final = 4
"""The first iteration for which Auto has measured both ways."""
LATE: Final = ("values",)
"""Scoring tasks that critics do."""
WAYS: Final = ("Disabled", "Enabled", "Auto")
SCORER: Final = {"hidden_size": 32, "num_hidden_layers": 2}


@dataclass(frozen=True)
class PacedCase:
    """What a device and a job of it are like."""

    max_tokens: int
    """Longest response: a decode step is one hundredth of a second."""
    together: float
    """A mini-batch of both models, over one of one model."""


CASES: Final = {"wins": PacedCase(max_tokens=256, together=2.0), "loses": PacedCase(max_tokens=32, together=1.2)}


def write_job(folder: Path, case: PacedCase, way: str, iterations: int) -> Path:
    """Write models, prompts, reward and the resolved manifest, whose path is returned."""
    write_policy(folder / "policy", 2)
    write_scorer(folder / "critic", **SCORER)
    paths = {name: {"path": str(folder / name)} for name in ("reference", "critic")}
    return pinned_job.write_job(
        folder,
        "critic-overlap",
        iterations=iterations,
        batch=BATCH,
        max_tokens=case.max_tokens,
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


def run_way(case: PacedCase, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one job; return its seconds an iteration, its weights, and what the overlap is said to make of its times."""
    together = case.together * arguments.training
    pace = StepPace(0.01, 0.0, 0.0, 0.005, 0.0, training=arguments.training, together=together)
    with tempfile.TemporaryDirectory(prefix="rlhf-critic-overlap-") as temporary:
        folder = Path(temporary)
        manifest = write_job(folder, case, way, arguments.iterations)
        run_dir = pinned_job.run_job(manifest, ["generation", "inference"], pace=pace)
        lines, facts = read_metrics(run_dir / "metrics.jsonl"), read_facts(run_dir / FILE)
        weights = hashlib.sha256()
        for file in sorted(folder.glob("checkpoints/*/*/*.safetensors")):
            weights.update(file.read_bytes())
    settled = [one for one in facts if one.iteration >= SETTLED and one.training]
    known = [ratio for one in settled if (ratio := predicted_ratio(one, case.together)) is not None]
    seconds = [line["seconds/iteration"] for line in lines]
    return {
        "seconds": seconds[SETTLED:-1],
        "mean": statistics.fmean(seconds[1:-1]),
        "overlap": [line.get("training/critic_overlap_seconds", 0.0) for line in lines[SETTLED:-1]],
        "apart": [number for number, line in enumerate(lines) if line.get("critic_overlap/on")],
        "predicted": known,
        "weights": weights.hexdigest(),
    }


def predicted_ratio(facts: IterationProfile, together: float) -> float | None:
    """Return how many times as long an iteration that trained all at once takes as with the overlap; None where it was
    not seen whole. `together` as in PacedCase."""
    samples, seconds = facts.samples, facts.phases["Training"]
    if samples is None or not samples.scored:
        return None
    late = sum(task.busy for task in facts.tasks if task.name in LATE) / sum(task.busy for task in facts.tasks)
    times = OverlapTimes(
        seconds,
        seconds / together,
        seconds / together,  # both models are paced alike
        facts.phases["Publishing"],
        tuple(samples.finished),
        scoring_rate(samples),
        scoring_latency(samples),
        late,
    )
    return unchanged(times) / overlapped(times)


def run_case(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every way of a case in turns; return what is reported of it."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS:
            runs[way].append(run_way(CASES[name], way, arguments))
            last = runs[way][-1]
            median = statistics.median(last["seconds"])
            print(
                f"{name}, round {number}, criticOverlap {way}: {median:.2f} s an iteration, {last['mean']:.2f} s with "
                f"what measuring took; apart by choice: {last['apart']}",
                flush=True,
            )
    medians = {way: statistics.median(s for run in runs[way] for s in run["seconds"]) for way in WAYS}
    predicted = [ratio for run in runs["Disabled"] for ratio in run["predicted"]]
    return {
        "seconds": {way: round(medians[way], 3) for way in WAYS},
        "mean_seconds": {way: round(statistics.fmean(run["mean"] for run in runs[way]), 3) for way in WAYS},
        "disabled_over": {way: round(medians["Disabled"] / medians[way], 3) for way in WAYS},
        "predicted_disabled_over_enabled": round(statistics.median(predicted), 3) if predicted else None,
        "overlap_seconds": round(statistics.median(s for run in runs["Enabled"] for s in run["overlap"]), 3),
        "apart_by_auto": [run["apart"] for run in runs["Auto"]],
        "same_weights": len({run["weights"] for way in WAYS for run in runs[way]}) == 1,
    }


def main() -> int:
    """Exit code 1 when ways of a case ended in other weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=10, help="more than 6, so that some are left to compare")
    parser.add_argument("--training", type=float, default=0.25, help="seconds of a mini-batch of one model")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.iterations <= SETTLED + 2:
        parser.error(f"--iterations: {arguments.iterations} leaves none to compare, use more than {SETTLED + 2}")
    result: dict[str, Any] = {name: run_case(name, arguments) for name in arguments.cases}
    same = all(case["same_weights"] for case in result.values())
    result |= {
        "mini_batch_seconds": arguments.training,
        "rounds": arguments.rounds,
        "iterations": arguments.iterations,
    }
    print(json.dumps(result) if arguments.json else result)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
