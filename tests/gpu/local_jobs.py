"""Whole jobs on this machine with `rlhf run`, coordinator included.

Owns how a job is written, run and judged by what a user would see: its exit code, its metrics, its summary. It must
never read from inside a job.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tests.gpu.models import HALF_BILLION, TINY, write_model, write_prompts
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine, Figures

REWARD: Final = '''"""Reward of the additions: 1 for the right sum, and a tenth for digits alone."""


def score(prompt: str, response: str, record: dict[str, str]) -> float:
    """Return the reward of one response."""
    digits = sum(character.isdigit() for character in response)
    return float(response == record["answer"]) + 0.1 * digits / max(len(response), 1)
'''
MISMATCH: Final = {"Float32": 2e-3, "BFloat16": 0.5}
"""Largest allowed difference between the trainer's and the engine's log-probability of a sampled token. In float32 they
sum in another order; bfloat16 has three digits, and a random model's logits are of the order of one.
"""
POLL_SECONDS: Final = 0.5
"""Seconds between two readings of the GPU's memory."""


@dataclass(frozen=True)
class PolicyJobSizes:
    """Sizes of a job with a generated policy."""

    config: LlamaConfig
    iterations: int
    batch: int
    response: int
    micro_batch: int


SMALL_JOB: Final = PolicyJobSizes(TINY, iterations=2, batch=16, response=16, micro_batch=4)
HALF_BILLION_JOB: Final = PolicyJobSizes(HALF_BILLION, iterations=3, batch=64, response=128, micro_batch=16)


@dataclass(frozen=True)
class LocalJobOutcome:
    """The result of one job."""

    exit_code: int
    rows: list[dict[str, float]] = field(default_factory=list)
    """Metrics per iteration."""
    summary: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    """Peak of the GPU's used memory over all processes in bytes; 0 on CPU."""


def median(rows: Iterable[Mapping[str, float]], metric: str) -> float | None:
    """Return the median of a metric; None if no iteration has it."""
    values = [row[metric] for row in rows if metric in row]
    return statistics.median(values) if values else None


def write_files(machine: CheckedMachine, sizes: PolicyJobSizes, figures: Figures) -> dict[str, Any]:
    """Write policy, prompts and reward into the step's folder; return the spec, with every group on the same device."""
    dtype = torch.bfloat16 if machine.cuda else torch.float32
    figures.say("making the policy")
    figures.add("parameters", write_model(machine.scratch / "policy", sizes.config, dtype, machine.device))
    write_prompts(machine.scratch / "prompts.jsonl", 4 * sizes.batch)
    (machine.scratch / "reward.py").write_text(REWARD)
    spec = spec_of(machine, sizes.iterations, sizes.batch, sizes.response, sizes.micro_batch)
    spec["algorithm"]["ppo"]["klCoefficient"] = 0.02
    return spec


def spec_of(machine: CheckedMachine, iterations: int, batch: int, response: int, micro_batch: int) -> dict[str, Any]:
    """Return a PPO job of two mini-batches whose groups share the device."""
    gpus = {"gpusPerReplica": 1} if machine.cuda else {}
    return {
        "algorithm": {"ppo": {"epochs": 1, "miniBatchSize": batch // 2}},
        "iterations": iterations,
        "seed": 7,
        "models": {"actor": {"path": "policy"}, "reward": {"function": {"file": "reward.py", "name": "score"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": batch, "maxPromptTokens": 8, "maxResponseTokens": response},
        "generation": {"replicas": 1, "maxBatchSize": batch, **gpus},
        "inference": {"replicas": 1, **gpus},
        "training": {"microBatchSize": micro_batch, **gpus},
    }


def run_job(machine: CheckedMachine, figures: Figures, name: str, spec: Mapping[str, Any]) -> LocalJobOutcome:
    """Run a job in the step's folder, where its relative paths lead; show its output."""
    file, run = machine.scratch / f"{name}.yaml", machine.scratch / f"run-{name}"
    job = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": dict(spec)}
    file.write_text(json.dumps(job))  # JSON is YAML
    command = [sys.executable, "-m", "rlhf_cli.main", "run", str(file), "--run-dir", str(run), "--plain"]
    # `rlhf run` asks nvidia-smi, which a bare machine may lack; torch has found the devices.
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(machine.gpus)))}
    environment = {**devices, **os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    with peak_memory(machine) as peak:
        for line in process.stdout:
            figures.say(line.rstrip())
        code = process.wait()
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return LocalJobOutcome(code, rows, json.loads(summary.read_text()) if summary.exists() else {}, max(peak))


@contextmanager
def peak_memory(machine: CheckedMachine) -> Iterator[list[int]]:
    """Read the GPU's memory meanwhile in a thread; yield the used bytes of each reading."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        while machine.cuda and not ended.wait(POLL_SECONDS):
            free, total = torch.cuda.mem_get_info(machine.device)
            seen.append(total - free)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def judge(figures: Figures, outcome: LocalJobOutcome, spec: Mapping[str, Any], mismatch: float, name: str) -> None:
    """Check the conditions of every job, and record its times: the medians omit the first iteration."""
    iterations, samples = spec["iterations"], spec["iterations"] * spec["rollout"]["batchSize"]
    rows, summary = outcome.rows, outcome.summary
    complete = outcome.exit_code == 0 and len(rows) == iterations
    figures.check(
        f"{name}: complete", complete, f"exit code {outcome.exit_code}, {len(rows)} of {iterations} iterations"
    )
    if not rows:
        return
    drawn, restarts = summary.get("samples"), summary.get("restarts")
    figures.check(f"{name}: no sample is lost", drawn == samples, f"{drawn} of {samples}")
    figures.check(f"{name}: no process was restarted", restarts == {}, f"restarts: {restarts or 'none'}")
    skipped = sum(row.get("nonfinite_steps", 0) for row in rows)
    figures.check(f"{name}: every step is finite", skipped == 0, f"{skipped:.0f} steps were skipped")
    worst = max(row.get("training/actor/mismatch_max", float("inf")) for row in rows)
    figures.check(
        f"{name}: engine and trainer agree on log-probabilities",
        worst <= mismatch,
        f"they differ by {worst:.3g} at most, {mismatch:.3g} are allowed",
    )
    later = rows[1:] or rows
    for part in ("iteration", "generation", "inference", "training", "publish", "checkpoint"):
        seconds = {"first": rows[0].get(f"seconds/{part}", 0.0), "median": median(later, f"seconds/{part}") or 0.0}
        figures.row(f"{name}: seconds", part=part, **seconds)
    rate = median(later, "tokens_per_second") or 0.0
    figures.add(f"{name}: tokens_per_second", rate, "tokens/s, of a whole iteration")
    figures.add(f"{name}: control_share", median(later, "control_share") or 0.0, "share of an iteration")
    figures.add(f"{name}: seconds", summary.get("seconds", 0.0), "s, start and end included")
    if outcome.peak_bytes:
        figures.add(f"{name}: peak_memory_gb", outcome.peak_bytes / 1e9, "GB of the GPU, all processes together")
