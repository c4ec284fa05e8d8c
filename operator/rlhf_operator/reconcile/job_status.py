"""The parts of the status that are not conditions: groups, scale, progress, pool, checkpoint; and when to write it.

Rule: pure. What changes all the time (progress, counts of ready pods, messages) is written at most every
PROGRESS_SECONDS; a condition, a restart or the time of an end is written at once. Fast numbers are in Prometheus.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rlhf_api import names
from rlhf_api.job import RLHFJob
from rlhf_api.names import Group
from rlhf_operator.manifests import identity
from rlhf_operator.reconcile.conditions import rfc3339
from rlhf_operator.reconcile.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed_pod import ObservedPod
from rlhf_operator.reconcile.pod_replacement import DesiredVersions
from rlhf_operator.reconcile.reconcile_plan import JobEvent

Json = dict[str, Any]

PROGRESS_SECONDS: Final = 10.0
"""Between two writes of what changes all the time."""
_SLOW_FIELDS: Final = (
    "conditions",
    "observedGeneration",
    "restarts",
    "release",
    "startTime",
    "revision",
    "completionTime",
    "algorithm",
    "scale",
    "lastCheckpoint",
)
"""Fields whose change is written at once; of conditions, all but the message. The last checkpoint is named by a pod
that is gone a moment later."""
NUMBERS: Final = {
    "reward": "reward",
    "kl": "kl",
    "klPerToken": "kl_per_token",
    "samplesPerSecond": "samples_per_second",
}
"""Fields of the progress, and the coordinator's metrics that they are."""
NON_FINITE_STEPS: Final = "nonfinite_steps"
"""The coordinator's metric of the steps that were skipped so far."""
MAX_STEPS: Final = 2**53
"""What a reader of JSON keeps exact; more is no count."""
TEXT_MAX: Final = 1024
"""Characters of a text in the status."""
_CHECKPOINT: Final = re.compile(r"iteration-([0-9]{1,9})/?$")


def groups(
    job: RLHFJob,
    sizes: Mapping[Group, int],
    pods: Iterable[ObservedPod],
    reading: CoordinatorReading | None,
    before: Mapping[str, Any],
    restarts: Mapping[str, int],
    wanted: DesiredVersions,
) -> list[Json]:
    """`status.groups`."""
    known = {str(each["name"]): each for each in before.get("groups") or []}
    listed = list(pods)
    found = []
    for group, size in sizes.items():
        ours = [pod for pod in listed if pod.group == group]
        running = sum(pod.ready and pod.active for pod in ours)
        if reading is not None and group is not Group.COORDINATOR:
            running = min(reading.working.get(group, 0), size)
        found.append(
            {
                "name": group.value,
                "desired": size,
                "ready": running,
                "failed": sum(pod.phase == "Failed" for pod in ours),
                "restarts": int(known.get(group, {}).get("restarts") or 0) + restarts.get(group, 0),
                "epoch": wanted.epochs.get(group, 0),
                "updated": sum(pod.active and not wanted.old(pod) and not wanted.outdated(pod) for pod in ours),
            }
        )
    return found


def scale(job: RLHFJob, pods: Iterable[ObservedPod]) -> Json:
    """`status.scale`: what the scale subresource reports."""
    labels = ",".join(f"{name}={value}" for name, value in identity.selector(job, Group.GENERATION).items())
    return {
        "replicas": sum(pod.group == Group.GENERATION and pod.active for pod in pods),
        "selector": f"{labels},{names.LABEL_JOB_UID}={job.metadata.get('uid', '')}",
    }


def progress(reading: CoordinatorReading) -> Json:
    """`status.progress`."""
    found: Json = {
        "iteration": reading.iteration,
        "iterations": reading.iterations,
        "summary": f"{reading.iteration}/{reading.iterations}",
        "stage": reading.phase or "Starting",
        "lastUpdateTime": rfc3339(reading.at),
    }
    for field, metric in NUMBERS.items():
        value = reading.metrics.get(metric)
        if value is not None and math.isfinite(value) and (value >= 0 or field != "samplesPerSecond"):
            found[field] = float(f"{value:.6g}")
    skipped = reading.metrics.get(NON_FINITE_STEPS, 0.0)
    if 0 < skipped < MAX_STEPS:
        found["nonFiniteSteps"] = round(skipped)
    if reading.seconds_left > 0:
        found["remainingSeconds"] = round(reading.seconds_left)
    return found


def steps_skipped(progress: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """What is to be said when more steps were skipped than the last written status knew; `before` is its progress."""
    now, known = int(progress.get("nonFiniteSteps") or 0), int(before.get("nonFiniteSteps") or 0)
    if now <= known:
        return ()
    steps = "1 optimizer step was" if now - known == 1 else f"{now - known} optimizer steps were"
    text = (
        f"{steps} skipped, because a loss or gradient was infinite or NaN; {now} so far, "
        f"{progress.get('summary')} iterations are trained"
    )
    return (JobEvent("StepsSkipped", text, warning=True),)


def last_said(
    reading: CoordinatorReading | None, pods: Iterable[ObservedPod], iterations: int, *, over: bool
) -> CoordinatorReading | None:
    """The reading, or what the coordinator said when it ended; `over`: it is not started again in its pod."""
    ends = [pod.end for pod in pods if pod.group == Group.COORDINATOR and (over or pod.over or pod.deletion)]
    told = [(end.at, end.report) for end in ends if end and end.at and end.report]
    if not told:
        return reading
    at, report = max(told, key=lambda each: each[0])
    known = reading or CoordinatorReading(at, "", 0, iterations)
    return replace(
        known,
        at=max(at, known.at),
        phase="Stopped",
        iteration=report.iteration,
        metrics={**known.metrics, **report.metrics},
        seconds_left=0.0,
        last_checkpoint=report.checkpoint or known.last_checkpoint,
    )


def all_done(progress: Json | None, iterations: int, now: datetime) -> Json:
    """`status.progress` of a job that is complete."""
    found = {key: value for key, value in (progress or {}).items() if key not in ("remainingSeconds", "stage")}
    summary = f"{iterations}/{iterations}"
    done = {"iteration": iterations, "iterations": iterations, "summary": summary, "lastUpdateTime": rfc3339(now)}
    return found | done


def of_coordinator(
    last: CoordinatorReading | None, reading: CoordinatorReading | None, before: Mapping[str, Any]
) -> Json:
    """What a coordinator says; `last`: what it said when it ended, or the reading. What none says stays as before."""
    found = {name: before[name] for name in ("progress", "plan", "migrationPool", "lastCheckpoint") if before.get(name)}
    if last is not None:
        found["progress"] = progress(last)
        if (newest := checkpoint(last, before)) is not None:
            found["lastCheckpoint"] = newest
    if reading is not None and (chosen := plan(reading)) is not None:
        found["plan"] = chosen
    return found


def plan(reading: CoordinatorReading) -> Json | None:
    """`status.plan`: what the coordinator says that it chose; None while it says nothing."""
    if not reading.fusion:
        return None
    found: Json = {"interStage": reading.fusion[:TEXT_MAX]}
    if reading.predicted_seconds > 0 and math.isfinite(reading.predicted_seconds):
        found["predictedSeconds"] = float(f"{reading.predicted_seconds:.3g}")
    return found


def checkpoint(reading: CoordinatorReading, before: Mapping[str, Any]) -> Json | None:
    """`status.lastCheckpoint`; the time is that of the first reading that named it."""
    known = before.get("lastCheckpoint")
    if not reading.last_checkpoint or (known and known.get("path") == reading.last_checkpoint):
        return dict(known) if known else None
    match = _CHECKPOINT.search(reading.last_checkpoint)
    return {
        "path": reading.last_checkpoint,
        "iteration": int(match.group(1)) if match else reading.iteration,
        "time": rfc3339(reading.at),
    }


def slow_part(status: Mapping[str, Any]) -> Json:
    """What is written at once when it changes."""
    found = {name: status.get(name) for name in _SLOW_FIELDS}
    found["conditions"] = [
        {key: each.get(key) for key in ("type", "status", "reason", "lastTransitionTime", "observedGeneration")}
        for each in status.get("conditions") or []
    ]
    found["desired"] = {each["name"]: (each["desired"], each.get("epoch")) for each in status.get("groups") or []}
    return found


def news(status: Mapping[str, Any]) -> Json:
    """What makes a write worth its while: all but the moment of the reading and the estimate that follows it."""
    found = dict(status)
    if "progress" in found:
        hidden = ("lastUpdateTime", "remainingSeconds")
        found["progress"] = {key: value for key, value in found["progress"].items() if key not in hidden}
    return found
