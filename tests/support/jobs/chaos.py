"""Runs a job with `rlhf run`, kills its processes at random moments, and reports the result.

Owns the checks of every run: its exit code, and that all planned kills happened. Rule: kills by pid, and only processes
that the run itself started: a process of a job is a child of the run's process with the group and index variables in
its environment. Moments and victims come from a seed. A job whose reward is `held` does not end before all kills: its
last responses are scored afterwards.
"""

import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tests.support.jobs.forked_runs import ForkedRun, start_run
from tests.support.jobs.local_job import HOLD, PROCESSES

from rlhf_common.names import Env

FORK_SERVER = b"rlhf_workers.fork_server"
"""Argument of the process that workers are forked from; each has its worker's name."""
SHORTEST_CALM_SECONDS = 0.2
"""Shortest time in seconds between two kills; the caller sets the longest. Kills hit work, recovery and start."""
RUN_TIMEOUT_SECONDS = 600.0
"""Seconds after which a run counts as hung."""


@dataclass(frozen=True)
class Kills:
    """The planned kills of a run."""

    seed: int
    count: int
    among: Sequence[str]
    """Names of the processes that may be killed."""
    first: Sequence[str] = ()
    """Victims of the first kills, in order; the others are random."""
    longest_calm_seconds: float = 6.0
    iterations_between: int = 0
    """Iterations trained between two kills, so that each hits a working job; 0: kills may also hit a recovery."""
    at_event: str = ""
    """Kind of event in events.jsonl at which to kill at once: the next one after the previous kill."""
    in_phases: Sequence[str] = ()
    """Phases of the job at whose beginning to kill at once, one phase per kill, each in a later iteration."""
    required: bool = True
    """Whether a run that ends before all kills fails its test."""


@dataclass
class Ended:
    """The end of a run, with its kills. Its text is the kills and the end of the output."""

    run_dir: Path
    code: int = -1
    seconds: float = 0.0
    output: str = ""
    kills: list[str] = field(default_factory=list)
    """`<seconds since start> <worker>` for each kill."""
    summary: dict[str, Any] = field(default_factory=dict)
    weights: str = ""
    """SHA-256 over the files of the last checkpoint's actor."""

    def __str__(self) -> str:
        return f"{self.run_dir.name}: exit code {self.code}, kills {self.kills}\n{self.output[-4000:]}"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The reported iterations."""
        return lines(self.run_dir)

    def read(self, name: str) -> str:
        """Return the text of a file of the run folder."""
        return (self.run_dir / name).read_text()

    def reported(self, *names: str) -> list[dict[str, Any]]:
        """Return these metrics of every iteration; None for those that it lacks."""
        return [{name: line.get(name) for name in names} for line in self.lines]

    def total(self, name: str) -> float:
        """Return the sum of a metric over the iterations that have it."""
        return math.fsum(line.get(name, 0.0) for line in self.lines)


def processes(runner: int) -> dict[str, int]:
    """Return name -> pid of the processes of a job whose `rlhf run` has pid `runner`, including ranks of a launcher."""
    result: dict[str, int] = {}
    for child in _children(runner):
        try:
            environment = dict(
                entry.split("=", 1) for entry in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in entry
            )
            if FORK_SERVER in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                result |= {Path(f"/proc/{worker}/comm").read_text().strip(): worker for worker in _children(child)}
                continue
        except OSError:  # the process has just ended
            continue
        if Env.GROUP in environment:
            group, index = environment[Env.GROUP], environment.get(Env.INDEX, "0")
            if Env.RANKS in environment:
                result |= {f"{group}-pod-{index}": child} | processes(child)
                continue
            result["coordinator" if group == "coordinator" else f"{group}-{index}"] = child
    return result


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def digest(checkpoints: Path) -> str:
    """Return the SHA-256 of the newest checkpoint's actor weights; empty if there is none."""
    folders = sorted(folder for folder in checkpoints.glob("iteration-*") if folder.is_dir())
    if not folders:
        return ""
    sha = hashlib.sha256()
    for file in sorted((folders[-1] / "actor").glob("*.safetensors")):
        sha.update(file.name.encode())
        sha.update(file.read_bytes())
    return sha.hexdigest()


def trained(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of weights and moments in the newest checkpoint."""
    newest = max(run_dir.glob("checkpoints/iteration-*"))
    files = sorted(newest.rglob("*.safetensors"))
    return {str(file.relative_to(newest)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the reported iterations of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(*runs: Ended) -> None:
    """Assert that runs saved the same weights."""
    assert {run.weights for run in runs} == {runs[0].weights} - {""}, "\n".join(map(str, runs))


def killed_beside_undisturbed(
    manifest: Path, folder: Path, settings: Sequence[str], seed: int, *, otherwise: Sequence[str] = ()
) -> tuple[Ended, Ended]:
    """Run a job of two ranks undisturbed, and with `otherwise` and one kill of each rank; return both runs.

    Asserts that their weights are the same.
    """
    undisturbed = run_job(manifest, folder / "undisturbed", settings=settings)
    ranks = ("training-1", "training-0")
    kills = Kills(seed, len(ranks), PROCESSES, first=ranks, longest_calm_seconds=0.5, iterations_between=1)
    killed = run_job(manifest, folder / "killed", settings=[*settings, *otherwise], kills=kills)
    assert_same_weights(killed, undisturbed)
    return killed, undisturbed


def run_job(
    manifest: Path,
    run_dir: Path,
    *,
    settings: Sequence[str] = (),
    options: Sequence[str] = (),
    kills: Kills | None = None,
    interrupt_after: int | None = None,
    executed: bool = False,
    code: int | None = 0,
) -> Ended:
    """Run `rlhf run` of a manifest, with `kills`, or with an interrupt like Ctrl-C after a number of iterations.

    `settings` are fields below `spec` with their values. `executed`: never forked (`forked_runs`). Asserts that the run
    ends with `code`, unless it is None, and after all required kills. A run beyond its time-out has the code -1.
    """
    log, hold = run_dir.with_suffix(".out"), manifest.with_name(HOLD)
    log.parent.mkdir(parents=True, exist_ok=True)
    last = int(yaml.safe_load(manifest.read_text())["spec"]["iterations"]) - 1
    if kills is not None or interrupt_after is not None:
        hold.write_text(f"{run_dir.absolute() / 'metrics.jsonl'}\n{last}\n")
    ended = Ended(run_dir)
    started = time.monotonic()
    changes = (word for setting in settings for word in ("--set", f"spec.{setting}"))
    command = ["run", str(manifest), "--run-dir", str(run_dir), "--plain", *changes, *options]
    runner = start_run(command, log, executed=executed)
    try:
        if kills is not None:
            _disturb(runner, run_dir, kills, last, started, ended)
            hold.unlink()
        if interrupt_after is not None:
            while runner.poll() is None and _trained(run_dir) < interrupt_after:
                time.sleep(0.05)
            runner.send_signal(signal.SIGINT)
        ended.code = runner.wait(timeout=RUN_TIMEOUT_SECONDS - (time.monotonic() - started))
    except subprocess.TimeoutExpired:
        pass
    finally:
        hold.unlink(missing_ok=True)
        if runner.poll() is None:
            runner.send_signal(signal.SIGINT)
            time.sleep(1)
            runner.kill()
            runner.wait()
    ended.seconds = time.monotonic() - started
    ended.output = log.read_text()
    summary = run_dir / "summary.json"
    ended.summary = json.loads(summary.read_text()) if summary.is_file() else {}
    ended.weights = digest(run_dir / "checkpoints")
    assert code in (None, ended.code), str(ended)
    assert kills is None or not kills.required or len(ended.kills) == kills.count, str(ended)
    return ended


def _trained(run_dir: Path) -> int:
    recorded = run_dir / "metrics.jsonl"
    return recorded.read_text().count("\n") if recorded.is_file() else 0


def _recorded(run_dir: Path, kind: str) -> int:
    events = run_dir / "events.jsonl"
    return events.read_text().count(f'"kind": "{kind}"') if kind and events.is_file() else 0


def _begun(run_dir: Path, phase: str) -> int:
    """Return the last iteration that reached this phase; -1: none."""
    log = run_dir / "logs" / "coordinator.log"
    result = re.findall(rf" {phase} \(iteration (\d+)\)", log.read_text()) if log.is_file() else []
    return int(result[-1]) if result else -1


def _disturb(
    runner: subprocess.Popen[bytes] | ForkedRun, run_dir: Path, kills: Kills, last: int, started: float, ended: Ended
) -> None:
    """Kill until all kills are done or the run is over; wait for a victim that is down.

    A job that has reached the scores of its `last` iteration is held there, so the kills then follow without delay.
    """
    rng = random.Random(kills.seed)
    reported, iteration = 0, -1

    def goes_on() -> bool:
        return runner.poll() is None and _begun(run_dir, "Scoring") < last

    for number in range(kills.count):
        calm = rng.uniform(SHORTEST_CALM_SECONDS, kills.longest_calm_seconds)
        everyone = sorted(kills.among)
        victim = kills.first[number] if number < len(kills.first) else rng.choice(everyone)
        trained = _trained(run_dir) + kills.iterations_between
        while goes_on() and _trained(run_dir) < trained:
            time.sleep(0.05)
        while goes_on() and kills.at_event and _recorded(run_dir, kills.at_event) == reported:
            time.sleep(0.002)
        reported = _recorded(run_dir, kills.at_event)
        phase = kills.in_phases[number] if number < len(kills.in_phases) else ""
        iteration = max(trained, iteration + 1)
        while goes_on() and phase and _begun(run_dir, phase) < iteration:
            time.sleep(0.002)
        time.sleep(0.0 if kills.at_event or phase else calm)
        while runner.poll() is None and time.monotonic() - started < RUN_TIMEOUT_SECONDS:
            pid = processes(runner.pid).get(victim)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                ended.kills.append(f"{time.monotonic() - started:.1f}s {victim}")
                break
            time.sleep(0.05)
        if runner.poll() is not None:
            return
