"""Whole jobs on this machine by `rlhf run`, coordinator and all: what it takes to write one, and what came of it.

Rule: a job is judged by what a user would see: its exit code, its metrics, the logs of its processes. Nothing is read
from inside it.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_check.step import CheckedMachine, Report

REWARD = '''"""Reward of the additions: 1 for the right sum, and a tenth for digits alone."""


def score(prompt: str, response: str, record: dict[str, str]) -> float:
    """Return the reward of one response."""
    digits = sum(character.isdigit() for character in response)
    return float(response == record["answer"]) + 0.1 * digits / max(len(response), 1)
'''
POLL_SECONDS = 0.5
"""Between two looks at the memory of the GPU."""


@dataclass(frozen=True)
class LocalJobOutcome:
    """What came of one job."""

    exit_code: int
    rows: list[dict[str, float]] = field(default_factory=list)
    """Metrics, an iteration each."""
    summary: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    """Most memory of the GPU that was in use at one time, by all processes; 0 on CPU."""

    def median(self, metric: str) -> float:
        """Return the median of a metric over the iterations after the first, which warms up; 0 where there is none."""
        values = [row[metric] for row in self.rows[1:] or self.rows if metric in row]
        return statistics.median(values) if values else 0.0


def manifest(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's manifest."""
    return {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": dict(spec)}


def run_job(machine: CheckedMachine, report: Report, job: Mapping[str, Any], folder: Path) -> LocalJobOutcome:
    """Runs a job in `folder`, where its relative paths lead; what it prints is shown."""
    file, run = folder / f"{job['metadata']['name']}.yaml", folder / f"run-{job['metadata']['name']}"
    file.write_text(json.dumps(job))  # JSON is YAML
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(file), "--run-dir", str(run), "--plain"]
    # `rlhf run` asks nvidia-smi, which a bare machine may lack; torch has found the devices.
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(machine.gpus)))}
    environment = {**devices, **os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    with _PeakMemory(machine) as peak:
        for line in process.stdout:
            report.say(line.rstrip())
        code = process.wait()
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return LocalJobOutcome(code, rows, json.loads(summary.read_text()) if summary.exists() else {}, peak.bytes)


class _PeakMemory:
    """Looks at the memory of the GPU while something runs, from a thread."""

    def __init__(self, machine: CheckedMachine) -> None:
        self.bytes = 0
        self._device = machine.device if machine.cuda else None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_PeakMemory":
        if self._device is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            free, total = torch.cuda.mem_get_info(self._device)
            self.bytes = max(self.bytes, total - free)


def judge(
    report: Report, outcome: LocalJobOutcome, spec: Mapping[str, Any], mismatch: float, name: str = "job"
) -> None:
    """Checks what holds for every job, and reports where its time went.

    `mismatch`: the most by which the trainer's log-probability of a sampled token may differ from the engine's.
    """
    iterations, batch = spec["iterations"], spec["rollout"]["batchSize"]
    summary = outcome.summary
    report.check(
        f"{name}: complete",
        outcome.exit_code == 0 and len(outcome.rows) == iterations,
        f"exit code {outcome.exit_code}, {len(outcome.rows)} of {iterations} iterations",
    )
    if not outcome.rows:
        return
    samples, restarts = summary.get("samples"), summary.get("restarts")
    report.check(f"{name}: no sample is lost", samples == iterations * batch, f"{samples} of {iterations * batch}")
    report.check(f"{name}: no process was restarted", restarts == {}, f"restarts: {restarts or 'none'}")
    skipped = sum(row.get("nonfinite_steps", 0) for row in outcome.rows)
    report.check(f"{name}: every step is finite", skipped == 0, f"{skipped:.0f} steps were skipped")
    worst = max(row.get("training/actor/mismatch_max", float("inf")) for row in outcome.rows)
    report.check(
        f"{name}: engine and trainer agree on log-probabilities",
        worst <= mismatch,
        f"they differ by {worst:.3g} at most, {mismatch:.3g} are allowed",
    )
    for metric in ("iteration", "generation", "inference", "training", "publish", "checkpoint"):
        report.row(
            f"{name}: seconds",
            part=metric,
            first=outcome.rows[0].get(f"seconds/{metric}", 0.0),
            median=outcome.median(f"seconds/{metric}"),
        )
    report.figure(f"{name}: tokens_per_second", outcome.median("tokens_per_second"), "tokens/s, of a whole iteration")
    report.figure(f"{name}: control_share", outcome.median("control_share"), "share of an iteration")
    report.figure(f"{name}: seconds", summary.get("seconds", 0.0), "s, start and end included")
    if outcome.peak_bytes:
        report.figure(f"{name}: peak_memory_gb", outcome.peak_bytes / 1e9, "GB of the GPU, all processes together")
