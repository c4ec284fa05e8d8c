"""Measures the cost of the coordinator without models: simulated workers over real gRPC, a real coordinator process.

Two runs with the same job shape. In `flood`, workers answer immediately, so all time is control plane. It reports the
samples per second that pass through the ledger (leased, finished, scored three times, journaled, fetched, trained), and
the rate that the coordinator's CPU seconds would allow. In `paced`, workers decode at a real engine's pace and report
progress. It reports the share of one core that the coordinator uses, and the share of an iteration in which all workers
wait for it.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.process_tree import cpu_seconds
from tests.support.coordinator.coordinated import write_files
from tests.support.coordinator.coordinator_process import CoordinatorProcess
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import crew

from rlhf_common.names import Group

FLOOD = Pace(tick_seconds=0.05, tokens_per_tick=10_000, train_seconds=0.0, progress_seconds=1e9)
PACED = Pace(tick_seconds=0.5, tokens_per_tick=16, train_seconds=1.0, progress_seconds=4.0)
"""32 tokens per second and sample; progress every four seconds."""


async def measure(arguments: argparse.Namespace, pace: Pace, tokens: int, iterations: int) -> dict[str, Any]:
    """Run one job; return CPU and wall time from the end of the first iteration to the start of the last."""
    training = arguments.training
    generation = (arguments.workers - training) * 3 // 4
    counts = {
        Group.GENERATION: generation,
        Group.INFERENCE: arguments.workers - training - generation,
        Group.TRAINING: training,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(
            folder,
            iterations=iterations,
            every=10_000,
            rollout={"batchSize": arguments.samples, "maxResponseTokens": tokens},
            generation={"replicas": counts[Group.GENERATION], "maxBatchSize": 64},
            inference={"replicas": counts[Group.INFERENCE]},
            training={"parallelism": {"pipeline": training}, "microBatchSize": 4},
        )
        process = CoordinatorProcess(folder)
        process.start()
        assert process.process is not None
        await process.until_serving()
        workers = crew(counts, process.address, pace=pace)
        await process.until_iteration(1, rate=2)
        begun, cpu = time.monotonic(), cpu_seconds(process.process.pid)
        await process.until_iteration(iterations - 1, rate=2)
        seconds, cpu = time.monotonic() - begun, cpu_seconds(process.process.pid) - cpu
        code = await process.code()
        await workers.end()
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = lines[1 : iterations - 1]
    samples = arguments.samples * len(measured)
    return {
        "exit_code": code,
        "iterations": len(measured),
        "seconds_an_iteration": seconds / len(measured),
        "samples_per_second": samples / seconds,
        "coordinator_cpu_seconds": cpu,
        "coordinator_cpu_share": cpu / seconds,
        "samples_per_cpu_second": samples / cpu,
        "control_share": sum(line["control_share"] for line in measured) / len(measured),
        "tokens_per_second": sum(line["tokens"] for line in measured) / seconds,
    }


def main() -> None:
    """Print both runs; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--training", type=int, default=8, help="of the workers")
    parser.add_argument("--samples", type=int, default=2048, help="of an iteration")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"workers": arguments.workers, "samples": arguments.samples}
    results["flood"] = asyncio.run(measure(arguments, FLOOD, tokens=64, iterations=5))
    results["paced"] = asyncio.run(measure(arguments, PACED, tokens=512, iterations=4))
    for name in ("flood", "paced"):
        print(name, {key: round(value, 4) for key, value in results[name].items()})
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
