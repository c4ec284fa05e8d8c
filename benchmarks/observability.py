"""Measures the cost of metrics against metrics Disabled: an iteration's time, a coordinator's memory, a scrape.

`job`: two real coordinators, one with spec.metrics Enabled and one Disabled, run the same job with simulated workers
at a real engine's pace. They run at the same time on the same machine, and each is scraped as by Prometheus. Reports
seconds per iteration, processor time and memory. `measuring`: processor time of all measurements in one iteration of
such a job, and of one scrape, in this process. Their share of the iteration's time is the overhead without the
machine's noise. `operator`: one scrape over HTTP of an operator with a thousand jobs, compared with one without jobs.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.coordinator import cpu_seconds
from prometheus_client.exposition import generate_latest
from tests.support.coordinator.coordinated import make_job, write_files
from tests.support.coordinator.coordinator_process import CoordinatorProcess
from tests.support.coordinator.in_process_coordinator import begin_in_process
from tests.support.coordinator.simulated_rank import Pace
from tests.support.coordinator.simulated_worker import crew
from tests.support.loopback import free_address
from tests.support.operator.simulated_cluster import SimulatedCluster

from rlhf_common import control_pb2 as pb
from rlhf_common.metrics.exposition import registry_of
from rlhf_common.names import Env, Group
from rlhf_coordinator.job import measurements
from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.service.prometheus import JobCollector
from rlhf_operator import health
from rlhf_operator.operator_metrics import OperatorMetrics
from rlhf_operator.reconcile import CoordinatorReading, ObservedJob, ObservedPod, pod_of
from rlhf_operator.workqueue import QueueSnapshot

ARMS: Final = ("Enabled", "Disabled")
PACE: Final = Pace(tick_seconds=0.5, tokens_per_tick=16, train_seconds=1.0, progress_seconds=4.0)
"""32 tokens per second and sample, as in benchmarks/coordinator.py."""
SCRAPE_SECONDS: Final = 15.0
"""Seconds between two scrapes: Prometheus' most common setting, and twice as often as the chart's."""
ROUNDS: Final = 9
MEBIBYTE: Final = 1 << 20
PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def sizes_of(workers: int) -> dict[Group, int]:
    """Return the number of workers of each group."""
    training = 8
    generation = (workers - training) * 3 // 4
    return {
        Group.GENERATION: generation,
        Group.INFERENCE: workers - training - generation,
        Group.TRAINING: training,
    }


def fields_of(counts: dict[Group, int], samples: int, mode: str) -> dict[str, Any]:
    """Return the spec of a job of that size."""
    return {
        "every": 10_000,
        "rollout": {"batchSize": samples, "maxResponseTokens": 512},
        "generation": {"replicas": counts[Group.GENERATION], "maxBatchSize": 64},
        "inference": {"replicas": counts[Group.INFERENCE]},
        "training": {"parallelism": {"pipeline": counts[Group.TRAINING]}, "microBatchSize": 4},
        "metrics": mode,
    }


# ---------------------------------------------------------------- a whole job, in both arms at once


async def scrape_for_ever(address: str) -> None:
    """Read a metrics page at Prometheus' interval."""
    while True:
        with suppress(urllib.error.HTTPError, urllib.error.URLError):
            await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read())
        await asyncio.sleep(SCRAPE_SECONDS)


def resident_mib(pid: int) -> float:
    """Return the memory that a process occupies."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MEBIBYTE


async def one_job(arguments: argparse.Namespace, mode: str, folder: Path) -> dict[str, float]:
    """Run one arm; times start at the end of the first iteration."""
    counts, iterations = sizes_of(arguments.workers), arguments.iterations + 2
    write_files(folder, iterations=iterations, **fields_of(counts, arguments.samples, mode))
    process, metrics = CoordinatorProcess(folder), free_address()
    process.start({Env.METRICS: metrics})
    assert process.process is not None
    await process.until_serving()
    workers = crew(counts, process.address, pace=PACE)
    scraping = asyncio.create_task(scrape_for_ever(metrics))
    await process.until_iteration(1, rate=2)
    begun, cpu = time.monotonic(), cpu_seconds(process.process.pid)
    await process.until_iteration(iterations - 1, rate=2)
    seconds, cpu = time.monotonic() - begun, cpu_seconds(process.process.pid) - cpu
    resident = resident_mib(process.process.pid)
    code = await process.code()
    scraping.cancel()
    await workers.end()
    assert code == 0, process.last_line
    return {
        "seconds_an_iteration": seconds / arguments.iterations,
        "cpu_seconds_an_iteration": cpu / arguments.iterations,
        "resident_mib": resident,
    }


async def both_jobs(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run both arms at the same time."""
    with tempfile.TemporaryDirectory() as name:
        results = await asyncio.gather(*(one_job(arguments, mode, Path(name) / mode) for mode in ARMS))
    return dict(zip(ARMS, results, strict=True))


# ---------------------------------------------------------------- what is measured in one iteration


def measure_iteration(run: JobRun, beats: int) -> None:
    """Call all measurements as often as one iteration of the job does."""
    state, everybody = run.state, list(run.state.fleet.workers.values())
    names = [worker.name for worker in run.state.fleet.in_group(Group.GENERATION)]
    now = time.monotonic()
    for index in range(len(state.ledger.samples)):
        name, key = names[index % len(names)], pb.SampleKey(sample=index)
        state.incremental.begun[index] = state.incremental.finished[index] = now
        finished = pb.FinishedSample(key=key, finish_reason="stop", queue_seconds=0.2)
        measurements.response_finished(run, name, finished, 100 + index % 400)
        for task in run.context.tasks:
            measurements.score_taken(run, name, pb.ScoredSample(key=key, task=task.name))
        if index % 8 == 0:
            moved = pb.MigratedSample(key=key, moved=True, bytes=1 << 20, seconds=0.1, paused_seconds=0.02)
            measurements.sample_moved(run, name, moved)
    for number in range(beats):
        for worker in everybody:
            beat = pb.Heartbeat(tokens=number + 1, busy_seconds=0.5 * number)
            measurements.heartbeat(run, worker, beat, now + number)
            worker.heartbeat, worker.last_heard = beat, now + number
    for worker in everybody:
        worker.heartbeat = pb.Heartbeat()
        measurements.weights_loaded(run, worker, pb.LoadResult(version=1, bytes=1 << 30, seconds=1.0))
    for phase in ("Generating", "Scoring", "Training", "Publishing"):
        measurements.phase_entered(run, phase, now, time.time_ns())
    measurements.iteration_finished(run, 60.0)


def cpu_of(work: Callable[[], object]) -> float:
    """Return the processor time of one call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measuring(arguments: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Return processor time by arm, medians of interleaved rounds.

    `seconds` is the time of an iteration of the whole job.
    """
    runs: dict[str, JobRun] = {}
    with tempfile.TemporaryDirectory() as name:
        for mode in ARMS:
            folder = Path(name) / mode
            folder.mkdir()
            fields = fields_of(sizes_of(arguments.workers), arguments.samples, mode)
            run, _ = begin_in_process(folder, make_job(folder, **fields))
            for worker in run.state.fleet.workers.values():
                worker.session, worker.seen = 1, True
            runs[mode] = run
        registry = registry_of([JobCollector(runs["Enabled"])])
        beats = max(2, round(seconds / runs["Enabled"].state.fleet.heartbeat))
        taken: dict[str, list[float]] = {mode: [] for mode in (*ARMS, "scrape")}
        tracemalloc.start()
        measure_iteration(runs["Enabled"], 2)
        page = generate_latest(registry)
        in_use, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for _ in range(ROUNDS):
            for mode in ARMS:
                taken[mode].append(cpu_of(lambda mode=mode: measure_iteration(runs[mode], beats)))  # type: ignore[misc]
            taken["scrape"].append(cpu_of(lambda: generate_latest(registry)))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    cost = medians["Enabled"] + medians["scrape"] * seconds / SCRAPE_SECONDS
    return {
        "enabled_cpu_seconds": medians["Enabled"],
        "disabled_cpu_seconds": medians["Disabled"],
        "scrape_cpu_seconds": medians["scrape"],
        "series": float(sum(not line.startswith(b"#") for line in page.splitlines())),
        "overhead_share": cost / seconds,
        "held_mib": in_use / MEBIBYTE,
        "peak_mib": peak / MEBIBYTE,
    }


# ---------------------------------------------------------------- an operator with a thousand jobs


def seen_by(metrics: OperatorMetrics, jobs: int) -> None:
    """Show an operator that many running jobs, each with its own times and progress."""
    cluster = SimulatedCluster()
    cluster.begin()
    plan = cluster.plan()
    status = dict(plan.status or cluster.job["status"]) | {"algorithm": "ppo"}
    pods = {pod.name: pod for body in cluster.pods.values() if isinstance(pod := pod_of(body), ObservedPod)}
    reading = CoordinatorReading(cluster.now, "Generating", 3, 10, threshold=12, streams=5)
    for number in range(jobs):
        meta = cluster.job["metadata"] | {"name": f"job-{number}", "namespace": f"team-{number % 40}"}
        meta["creationTimestamp"] = f"2026-08-22T10:{number % 60:02}:{number % 59:02}Z"
        own = status | {"progress": {"iteration": number, "iterations": 1000}}
        job = cluster.job | {"metadata": meta}
        metrics.see(job, ObservedJob(pods=pods, reading=reading), replace(plan, status=own))


async def scraped_operator(jobs: int) -> dict[str, float]:
    """Return the median time of a scrape over HTTP."""
    metrics, address = OperatorMetrics(), free_address()
    seen_by(metrics, jobs)
    runner = await health.serve([address], lambda: QueueSnapshot(0, 0, 0.0, 0.0), lambda: 0, metrics)
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )

    def read() -> bytes:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    seconds, processor, page = [], [], b""
    for _ in range(ROUNDS):
        begun, cpu = time.perf_counter(), time.process_time()
        page = await asyncio.to_thread(read)
        seconds.append(time.perf_counter() - begun)
        processor.append(time.process_time() - cpu)
    await runner.cleanup()
    series = sum(not line.startswith(b"#") for line in page.splitlines())
    return {
        "scrape_seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
        "scrape_cpu_seconds": statistics.median(processor),
        "series": float(series),
        "page_mib": len(page) / MEBIBYTE,
    }


def main() -> None:
    """Print all three results; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2048, help="of an iteration")
    parser.add_argument("--iterations", type=int, default=3, help="that are measured")
    parser.add_argument("--jobs", type=int, default=1000, help="of the operator")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"workers": arguments.workers, "samples": arguments.samples, "jobs": arguments.jobs}
    results["operator"] = {str(jobs): asyncio.run(scraped_operator(jobs)) for jobs in (arguments.jobs, 0)}
    results["job"] = asyncio.run(both_jobs(arguments))
    results["measuring"] = measuring(arguments, results["job"]["Enabled"]["seconds_an_iteration"])
    for name in ("operator", "job"):
        for arm, values in results[name].items():
            print(name, arm, {key: round(value, 4) for key, value in values.items()})
    print("measuring", {key: round(value, 5) for key, value in results["measuring"].items()})
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
