"""One run of chaos: a job, its faults one after the other, and what has to be true in the end.

Rule: a fault comes when the job is at work again after the one before: what that one did is mended, the restarts are
counted right, an operator leads, and an iteration was trained since. Seed, moments and victims are printed as they
happen. The job must end Complete with the weights of `rlhf run`, and leave nothing behind when it is deleted.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import local_job
from tests.chaos import digest

from .chaos import Due, Fault, due, faults
from .chaos_faults import PATIENCE, Faults
from .chaos_job import OPEN, ChaosJob
from .chaos_operators import Operators
from .cluster import Cluster
from .processes import STOP_GRACE, wait_until

ITERATIONS_A_FAULT = 3  # one before it, one while it lasts, one after it
FIRST_ITERATIONS = 2  # before the first fault: a checkpoint every four is still ahead


def iterations(count: int) -> int:
    """Iterations of a job that `count` faults happen to; rounded up, so that runs of like length compare."""
    return FIRST_ITERATIONS + ITERATIONS_A_FAULT * count


class Undisturbed:
    """`rlhf run` of the same job on this machine, beside everything else."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder, self._run = folder, folder / "run"
        manifest = local_job.write_job(folder, iterations=iterations(count))
        module = [sys.executable, "-m", "rlhf_operator.cli.main"]
        self._command = [*module, "run", str(manifest), f"--run-dir={self._run}", "--plain"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._folder / "out").open("wb") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()

    def weights(self) -> str:
        """Digest of the actor's, once it is trained."""
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        assert code == 0, (self._folder / "out").read_text()[-4000:]
        return digest(self._run / "checkpoints")


@dataclass
class Outcome:
    """What a run came to."""

    seed: int
    done: list[dict[str, Any]] = field(default_factory=list)
    """Faults, with the moment in seconds since the start and the iterations trained by then."""
    kinds: dict[str, int] = field(default_factory=dict)
    failures: int = -1
    disruptions: int = -1
    due_failures: int = 0
    due_disruptions: tuple[int, int] = (0, 0)
    """Least and most."""
    operators_ended: int = 0
    """Operators that ended by themselves: they could not renew their Lease in time."""
    bugs: int = 0
    """Reconciles that failed with an error of our own."""
    weights: str = ""
    left: list[str] = field(default_factory=list)
    """Of the job, after it was deleted."""
    seconds: float = 0.0

    @property
    def counted(self) -> bool:
        """The restarts in the status are those that happened."""
        least, most = self.due_disruptions
        return self.failures == self.due_failures and least <= self.disruptions <= most

    def written(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"counted": self.counted}


def run(cluster: Cluster, image: str, folder: Path, count: int, outcome: Outcome, *, within: float = math.inf) -> None:
    """The first `count` faults of the outcome's seed on one job; none begins later than `within` seconds.

    Raises AssertionError when the job fails, and TimeoutError naming a fact that does not come.
    """
    seed, start = outcome.seed, time.monotonic()
    chosen = faults(seed, count)
    wanted = due(chosen)
    job = ChaosJob(cluster, f"chaos-{seed}", folder, iterations=iterations(count), forgiven=wanted.failures)
    with Operators(cluster, image) as operators:
        happening = Faults(cluster, job, operators)
        job.apply()
        job.allow(FIRST_ITERATIONS)
        try:
            _say(start, job, f"seed {seed}: {count} faults on a job of {iterations(count)} iterations")
            happening.until("the job to train", lambda: job.trained() >= FIRST_ITERATIONS)
            for number, fault in enumerate(chosen):
                if time.monotonic() - start > within:
                    break
                time.sleep(fault.calm)
                _one(start, job, happening, operators, chosen[: number + 1], outcome)
            job.allow(OPEN)
            happening.until("Complete", lambda: job.condition("Complete").get("status") == "True")
        finally:
            outcome.failures, outcome.disruptions = job.restarts()
            outcome.operators_ended, outcome.bugs = operators.ended, operators.log.count("reconcile failed")
            outcome.kinds = dict(Counter(each["kind"] for each in outcome.done))
            outcome.seconds = round(time.monotonic() - start, 1)
        outcome.weights = digest(folder / "checkpoints")
        _say(start, job, f"complete: {outcome.failures} failures, {outcome.disruptions} disruptions")
        _delete(job, happening, outcome)


def _one(
    start: float, job: ChaosJob, happening: Faults, operators: Operators, done: Sequence[Fault], outcome: Outcome
) -> None:
    fault, wanted = done[-1], due(done)
    outcome.due_failures = wanted.failures
    outcome.due_disruptions = wanted.disruptions[0], wanted.disruptions[-1]
    lasting = f" for {fault.seconds} s" if fault.seconds else ""
    moment = round(time.monotonic() - start, 1)
    _say(start, job, f"fault {len(done)}: {fault.kind}: {fault.victim}{lasting}")
    told = {"kind": str(fault.kind), "victim": fault.victim, "second": moment, "trained": job.trained()}
    outcome.done.append(told)
    job.allow(job.trained() + 1)
    happening.happen(fault)
    _counted(job, happening, wanted)
    happening.iteration()
    happening.until("an operator to lead", operators.leads)
    told["mended_after"] = round(time.monotonic() - start - moment, 1)


def _counted(job: ChaosJob, happening: Faults, wanted: Due) -> None:
    """Waits for the counts; a mistake shows as a time-out that says what was counted instead."""
    seen = (-1, -1)

    def right() -> bool:
        nonlocal seen
        seen = job.restarts()
        return wanted.met(*seen)

    try:
        happening.until("the restarts to be counted", right)
    except TimeoutError as error:
        why = job.seen().get("status", {}).get("restarts", {}).get("lastReason", "")
        raise TimeoutError(f"{error}: wanted {wanted}, but (failures, disruptions) are {seen}: {why}") from error


def _delete(job: ChaosJob, happening: Faults, outcome: Outcome) -> None:
    """Deletes the job, and waits for its objects to go."""
    job.kubectl("delete", "rlhfjob", "--all", "--wait=false")

    def gone() -> bool:
        outcome.left = job.left()
        return not outcome.left

    try:
        wait_until("everything of the job to be gone", gone, PATIENCE / 3, every=1)
    except TimeoutError:
        print(f"left of the job: {outcome.left}", flush=True)


def _say(start: float, job: ChaosJob, text: str) -> None:
    print(f"[{time.monotonic() - start:6.1f} s, {job.trained()} trained] {text}", flush=True)
