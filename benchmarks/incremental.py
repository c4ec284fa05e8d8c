"""Incremental scoring: the time from the last token to the last score, with and without, in turns in one job.

`python benchmarks/incremental.py [--rounds 8] [--deterministic] [--json]`. One generation and one inference worker,
real processes pinned to one core each. The policy is that of benchmarks/long_tail.py: its own end-of-sequence decisions
make lengths of which P99 is many times the median. A reference model scores; the reward is free. Within a round both
settings decode the same responses. Reported: median seconds from the last token to the last score, generation and both
together, the share of tokens scored early, and what the replay of an iteration, by which Auto goes, says of the gain.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.long_tail_policy import write_policy
from benchmarks.pinned_job import run_job, write_job

from rlhf_coordinator.loop import actions
from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.scheduling import incremental_dispatch
from rlhf_coordinator.state.job_state import JobContext, JobState
from rlhf_coordinator.storage import prompts

BATCH, MAX_TOKENS = 32, 512
SETTINGS = ("Disabled", "Enabled")
WARM_UP = 2
"""Iterations that are not counted: models and caches warm up."""
REFERENCE = {"hidden_size": 384, "num_hidden_layers": 6}


def setting(iteration: int) -> tuple[int, str]:
    """(round, setting) of an iteration; every round begins with another setting."""
    number, place = divmod(max(0, iteration - WARM_UP), len(SETTINGS))
    return number, SETTINGS[(place + number) % len(SETTINGS)]


@contextmanager
def in_turns() -> Iterator[None]:
    """Every iteration of the coordinator in this process goes by the setting whose turn it is."""
    on, random_key = incremental_dispatch.is_enabled, prompts.random_key

    def forced(context: JobContext, state: JobState) -> bool:
        return setting(state.iteration)[1] == "Enabled"

    incremental_dispatch.is_enabled = forced
    actions.random_key = lambda seed, iteration, sample: random_key(seed, setting(iteration)[0], sample)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        incremental_dispatch.is_enabled, actions.random_key = on, random_key  # type: ignore[attr-defined]


def run(folder: Path, iterations: int, *, deterministic: bool) -> list[dict[str, Any]]:
    """Metrics of every counted iteration."""
    write_policy(folder / "policy")
    manifest = write_job(
        folder,
        "incremental",
        iterations=iterations,
        batch=BATCH,
        max_tokens=MAX_TOKENS,
        reference=REFERENCE,
        deterministic=deterministic,
        generation={"replicas": 1, "maxBatchSize": BATCH},
        inference={"replicas": 1, "incremental": "Auto"},
        fusion={"interStage": {"mode": "Disabled"}},
    )
    with in_turns():
        run_dir = run_job(manifest, ["generation", "inference"])
    return read_metrics(run_dir / "metrics.jsonl")[WARM_UP:]


def report(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each setting, and of the differences within rounds."""
    table = {name: [line for line in lines if setting(int(line["iteration"]))[1] == name] for name in SETTINGS}
    rows = {name: _row(mine) for name, mine in table.items()}
    pairs = list(zip(table["Disabled"], table["Enabled"], strict=True))
    both = "seconds/generation_and_inference"
    name = "incremental/predicted_gain_seconds"
    predicted = [line[name] for line in lines if name in line]
    return {
        "settings": rows,
        "last_token_to_last_score_saved_seconds": round(
            statistics.median(off["seconds/inference"] - on["seconds/inference"] for off, on in pairs), 4
        ),
        "last_token_to_last_score_ratio": round(
            statistics.median(off["seconds/inference"] / on["seconds/inference"] for off, on in pairs), 2
        ),
        "generation_and_inference_ratio": round(statistics.median(off[both] / on[both] for off, on in pairs), 4),
        "predicted_saved_seconds": round(statistics.median(predicted), 4) if predicted else None,
    }


def _row(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = {
        "last_token_to_last_score_seconds": "seconds/inference",
        "generation_seconds": "seconds/generation",
        "generation_and_inference_seconds": "seconds/generation_and_inference",
        "early_share": "incremental/early_share",
        "cache_bytes": "incremental/cache_bytes",
        "longest_response": "response_tokens_max",
    }
    return {name: round(statistics.median(line[key] for line in lines), 4) for name, key in names.items()}


def main() -> int:
    """Prints a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--deterministic", action="store_true", help="score in blocks, sample by sample")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    iterations = WARM_UP + arguments.rounds * len(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="rlhf-incremental-") as folder:
        results = report(run(Path(folder), iterations, deterministic=arguments.deterministic))
    results |= {"rounds": arguments.rounds, "batch": BATCH, "load": os.getloadavg()[2]}
    for name, row in results["settings"].items():
        print(
            f"{name:>4}: last token to last score {1000 * row['last_token_to_last_score_seconds']:.1f} ms, generation "
            f"{row['generation_seconds']:.3f} s, {row['early_share']:.0%} of all tokens scored early",
            flush=True,
        )
    print(json.dumps(results) if arguments.json else results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
