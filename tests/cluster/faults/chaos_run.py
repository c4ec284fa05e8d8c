"""One run of chaos: a job, its consecutive faults, and the conditions at the end.

Rule: a fault comes after the recovery from the previous one: its damage is repaired, the restarts are counted right, an
operator leads, and an iteration was trained since. Seed, moments and victims are printed as they happen. The job must
end Complete with the weights of `rlhf run`, and leave nothing behind when it is deleted.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.faults.chaos import Due, Fault, Kind, due, faults
from tests.cluster.faults.chaos_faults import PATIENCE, Faults
from tests.cluster.faults.chaos_operators import InstalledOperator, Operators
from tests.cluster.jobs_in_pods.gated_job import OPEN, GatedJob
from tests.cluster.processes import wait_until
from tests.support.jobs.chaos import digest

FIRST_ITERATIONS = 2  # before the first fault; the first checkpoint comes after four
A_FAULT = 2  # iterations per fault: one during it, one after it
LASTING = frozenset({Kind.KUBELET, Kind.CUT, Kind.RESIZE})
"""Kinds during which one more iteration may be trained."""


def iterations(chosen: Sequence[Fault]) -> int:
    """Return the most iterations of a job with these faults, and one more to be Complete after them."""
    return FIRST_ITERATIONS + A_FAULT * len(chosen) + sum(item.kind in LASTING for item in chosen) + 1


@dataclass
class ChaosOutcome:
    """The result of a run."""

    seed: int
    done: list[dict[str, Any]] = field(default_factory=list)
    """Faults, with the moment in seconds since the start and the iterations trained by then."""
    kinds: dict[str, int] = field(default_factory=dict)
    failures: int = -1
    disruptions: int = -1
    due_failures: int = 0
    due_disruptions: tuple[int, int] = (0, 0)
    """Least and most expected disruptions."""
    operators_ended: int = 0
    """How often an operator ended by itself, for instance because it could not renew its Lease in time."""
    bugs: int = 0
    """Reconciles that failed with an internal error."""
    weights: str = ""
    left: list[str] = field(default_factory=list)
    """Objects of the job that remained after its deletion."""
    seconds: float = 0.0

    @property
    def counted(self) -> bool:
        """Return whether the restarts in the status are those that happened."""
        least, most = self.due_disruptions
        return self.failures == self.due_failures and least <= self.disruptions <= most

    def written(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return asdict(self) | {"counted": self.counted}


def run(
    cluster: Cluster, image: str, folder: Path, count: int, outcome: ChaosOutcome, *, within: float = math.inf
) -> None:
    """Apply the first `count` faults of the outcome's seed to one job; stop when more than `within` seconds have
    passed.

    Raises AssertionError if the job fails, and TimeoutError naming a fact that does not happen.
    """
    run_faults(cluster, image, folder, faults(outcome.seed, count), outcome, within=within)


def run_faults(
    cluster: Cluster,
    image: str,
    folder: Path,
    chosen: Sequence[Fault],
    outcome: ChaosOutcome,
    *,
    within: float = math.inf,
    installed: bool = False,
    **more: Any,
) -> None:
    """Apply these faults, in this order, to one job; raises like `run`.

    `installed`: the release's operator reconciles it instead of a process of this machine. `more`: arguments of
    `write_job`.
    """
    seed, start = outcome.seed, time.monotonic()
    wanted = due(chosen)
    job = GatedJob(cluster, f"chaos-{seed}", folder, forgiven=wanted.failures, iterations=iterations(chosen), **more)
    job.manifest["spec"]["generation"]["replicas"] = 1  # so that every fault finds the whole group
    with InstalledOperator(cluster) if installed else Operators(cluster, image) as operators:
        happening = Faults(cluster, job, operators)
        job.apply()
        job.allow(FIRST_ITERATIONS)
        try:
            _say(start, job, f"seed {seed}: {len(chosen)} faults on a job of {iterations(chosen)} iterations")
            happening.until("the job to train", lambda: job.trained() >= FIRST_ITERATIONS)
            for number, fault in enumerate(chosen):
                if time.monotonic() - start > within:
                    break
                time.sleep(fault.calm)
                _inject_fault(start, job, happening, operators, chosen[: number + 1], outcome)
            job.allow(OPEN)
            happening.until("Complete", lambda: job.condition("Complete").get("status") == "True")
        finally:
            outcome.failures, outcome.disruptions = job.restarts()
            outcome.operators_ended, outcome.bugs = operators.ended, operators.log.count("reconcile failed")
            outcome.kinds = dict(Counter(item["kind"] for item in outcome.done))
            outcome.seconds = round(time.monotonic() - start, 1)
        outcome.weights = digest(folder / "checkpoints")
        _say(start, job, f"complete: {outcome.failures} failures, {outcome.disruptions} disruptions")
        _delete(job, happening, outcome)


def _inject_fault(
    start: float,
    job: GatedJob,
    happening: Faults,
    operators: Operators | InstalledOperator,
    done: Sequence[Fault],
    outcome: ChaosOutcome,
) -> None:
    fault, wanted = done[-1], due(done)
    outcome.due_failures = wanted.failures
    outcome.due_disruptions = wanted.disruptions[0], wanted.disruptions[-1]
    lasting = f" for {fault.seconds} s" if fault.seconds else ""
    moment = round(time.monotonic() - start, 1)
    _say(start, job, f"fault {len(done)}: {fault.kind}: {fault.victim}{lasting}")
    reported = {"kind": str(fault.kind), "victim": fault.victim, "second": moment, "trained": job.trained()}
    outcome.done.append(reported)
    job.allow(job.trained() + 1)
    happening.happen(fault)
    _counted(job, happening, wanted)
    happening.iteration()
    happening.until("an operator to lead", operators.leads)
    reported["mended_after"] = round(time.monotonic() - start - moment, 1)


def _counted(job: GatedJob, happening: Faults, wanted: Due) -> None:
    """Wait for the counts; a mistake shows as a time-out with the actual counts."""
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


def _delete(job: GatedJob, happening: Faults, outcome: ChaosOutcome) -> None:
    """Delete the job, and wait until its objects are gone."""
    job.kubectl("delete", "rlhfjob", "--all", "--wait=false")

    def gone() -> bool:
        outcome.left = job.left()
        return not outcome.left

    try:
        wait_until("everything of the job to be gone", gone, PATIENCE / 3, every=1)
    except TimeoutError:
        print(f"left of the job: {outcome.left}", flush=True)


def _say(start: float, job: GatedJob, text: str) -> None:
    print(f"[{time.monotonic() - start:6.1f} s, {job.trained()} trained] {text}", flush=True)
