"""Compares jobs whose ranks train after decoding with jobs whose ranks compute gradients during it.

`python benchmarks/gradient_streaming.py [--ways whole streamed] [--iterations 6] [--json]` runs one whole job for each
way, one after the other, on real workers of a fixed speed (`paced_worker`), decoding, scoring and training alike.
`whole` has `training.stream: Disabled`, `streamed` has Enabled, and `in-order` has it in the order of prompt numbers
that a deterministic job uses. The policy is that of `long_tail_policy`: one response in fifteen is twenty times as
long. The learning rate changes no token, so a random key always gives the same response.

Reported for each way, without the first iteration: the median seconds of an iteration, of training after the last
score, and of gradients that ended before the last token (`hidden_seconds`), with the micro-batches of these. `gain` is
how many times as fast an iteration is as that of the first way.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pinned_job
from benchmarks.long_tail_job import MAX_TOKENS, ROWS, SCENARIOS
from benchmarks.long_tail_policy import write_policy

from rlhf_coordinator.reports.trackers.metrics_jsonl import read_metrics
from rlhf_coordinator.scheduling import gradient_streaming

GROUP: Final = 4
"""Responses to a prompt; about one group in four has a long one."""
SCENARIO: Final = SCENARIOS["paced-B"]
WAYS: Final = {"whole": "Disabled", "streamed": "Enabled", "in-order": "Enabled"}
"""Name -> `training.stream`."""


def write_job(folder: Path, way: str, arguments: argparse.Namespace) -> Path:
    """Write models, prompts, reward and the resolved manifest; return the manifest's path."""
    write_policy(folder / "policy", SCENARIO.layers)
    batch = arguments.prompts * GROUP
    return pinned_job.write_job(
        folder,
        "streaming",
        iterations=arguments.iterations,
        batch=batch,
        max_tokens=arguments.max_tokens,
        reference=SCENARIO.scorer,
        algorithm={"grpo": {"miniBatchSize": batch, "groupSize": GROUP, "lossAggregation": "SequenceMean"}},
        generation={"replicas": SCENARIO.workers, "maxBatchSize": ROWS, "speculation": {"mode": "Disabled"}},
        inference={"replicas": 1, "incremental": "Disabled"},
        training={"microBatchSize": GROUP, "stream": WAYS[way], "optimizer": {"learningRate": 2e-12}},
        fusion={"interStage": {"mode": "Auto", "balance": "Disabled"}},
    )


def figures(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of the counted iterations of a job."""
    names = {
        "seconds": "seconds/iteration",
        "training_seconds": "seconds/training",
        "hidden_seconds": "training/stream_hidden_seconds",
        "hidden_microbatches": "training/stream_microbatches",
    }
    return {short: statistics.median(line.get(name, 0.0) for line in lines) for short, name in names.items()}


def run_way(way: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Run the job of a way; return its figures."""
    assert SCENARIO.pace is not None
    decode = {name: getattr(SCENARIO.pace, name) * arguments.slow for name in ("step", "row", "key")}
    pace = replace(SCENARIO.pace, gradient=arguments.gradient, **decode)
    ready = gradient_streaming.ready_groups
    if way == "in-order":
        gradient_streaming.ready_groups = lambda ledger, *, in_order: ready(ledger, in_order=True)
    try:
        with tempfile.TemporaryDirectory(prefix="rlhf-streaming-") as temporary:
            manifest = write_job(Path(temporary), way, arguments)
            run_dir = pinned_job.run_job(manifest, [*["generation"] * SCENARIO.workers, "inference"], pace=pace)
            return figures(read_metrics(run_dir / "metrics.jsonl")[1:])
    finally:
        gradient_streaming.ready_groups = ready


def main() -> int:
    """Print a table, and with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--prompts", type=int, default=24, help="prompts of a batch")
    parser.add_argument("--gradient", type=float, default=0.1, help="seconds per micro-batch of a rank")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="longest response")
    parser.add_argument("--slow", type=float, default=1.0, help="factor of a decode step, for a busy machine")
    parser.add_argument("--iterations", type=int, default=6, help="iterations; the first does not count")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for way in arguments.ways:
        found[way] = run_way(way, arguments)
        found[way]["gain"] = found[arguments.ways[0]]["seconds"] / found[way]["seconds"]
        print(f"{way:>10}: " + ", ".join(f"{key} {value:.3f}" for key, value in found[way].items()), flush=True)
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    if arguments.json:
        print(json.dumps({**settings, "load": os.getloadavg()[2], "ways": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
