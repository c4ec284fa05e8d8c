"""Parts of the status besides conditions, such as groups, progress, plan and checkpoint; and when to write them.

Rule: pure. Frequent changes alone are written at most every PROGRESS_SECONDS.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from rlhf_api.device_sizes import DevicePlanRecord
from rlhf_api.job import RLHFJob
from rlhf_common import names
from rlhf_common.names import Group
from rlhf_operator.manifests import identity
from rlhf_operator.reconcile.failures.failure_counter import FailureCounts
from rlhf_operator.reconcile.observed.observed_job import CoordinatorReading
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod
from rlhf_operator.reconcile.reconcile_plan import JobEvent
from rlhf_operator.reconcile.rollout import DesiredVersions
from rlhf_operator.reconcile.timestamps import rfc3339

Json = dict[str, Any]

PROGRESS_SECONDS: Final = 10.0
"""Least seconds from a write of the status to one of frequent changes alone."""
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
"""Fields whose change is written at once; of conditions all but the message."""
_TOLD_ONCE: Final = ("engine", "speculationSwitched")
"""Fields of the plan that stay until a new value is reported."""
_OF_COORDINATOR: Final = ("progress", "plan", "migrationPool", "lastCheckpoint")
"""Fields that stay until a coordinator reports a new value."""
NUMBERS: Final = {
    "reward": "reward",
    "kl": "kl",
    "klPerToken": "kl_per_token",
    "loss": "loss",
    "samplesPerSecond": "samples_per_second",
    "evaluationReward": "evaluation/reward",
    "bestEvaluationReward": "evaluation/best_reward",
}
"""Field of the progress -> the coordinator's metric."""
EVALUATED: Final = {"evaluationVersion": "evaluation/version", "bestEvaluationVersion": "evaluation/best_version"}
"""Field of the progress with the weight version of an evaluation -> its metric."""
NON_FINITE_STEPS: Final = "nonfinite_steps"
"""The coordinator's metric of the steps skipped so far."""
MAX_STEPS: Final = 2**53
"""Bound below which a metric counts as a number of steps or a version."""
TEXT_MAX: Final = 1024
"""Most characters of a text in the progress and the plan."""
_CHECKPOINT: Final = re.compile(r"iteration-([0-9]{1,9})/?$")


def groups_status(
    sizes: Mapping[Group, int],
    pods: Collection[ObservedPod],
    reading: CoordinatorReading | None,
    status: Mapping[str, Any],
    failures: FailureCounts,
    versions: DesiredVersions,
) -> list[Json]:
    """Return `status.groups`. `status` is the stored one, `failures` has new ends of pods.

    With a reading, `ready` of a worker group counts the workers that the coordinator reports as working.
    """
    stored_groups = {str(group["name"]): group for group in status.get("groups") or []}
    groups = []
    for group, size in sizes.items():
        ours = [pod for pod in pods if pod.group == group]
        ready = sum(pod.ready and pod.active for pod in ours)
        if reading is not None and group is not Group.COORDINATOR:
            ready = min(reading.working.get(group, 0), size)
        up_to_date = (
            pod for pod in ours if pod.active and not versions.of_earlier_epoch(pod) and not versions.outdated(pod)
        )
        groups.append(
            {
                "name": group.value,
                "desired": size,
                "ready": ready,
                "failed": sum(pod.phase == "Failed" for pod in ours),
                "restarts": int(stored_groups.get(group, {}).get("restarts") or 0) + failures.ends.get(group, 0),
                "outOfMemory": int(stored_groups.get(group, {}).get("outOfMemory") or 0)
                + failures.out_of_memory.get(group, 0),
                "epoch": versions.epochs.get(group, 0),
                "updated": sum(1 for _ in up_to_date),
            }
        )
    return groups


def scale_status(job: RLHFJob, pods: Collection[ObservedPod]) -> Json:
    """Return `status.scale`, which the scale subresource reports."""
    labels = ",".join(f"{name}={value}" for name, value in identity.selector(job, Group.GENERATION).items())
    return {
        "replicas": sum(pod.group == Group.GENERATION and pod.active for pod in pods),
        "selector": f"{labels},{names.LABEL_JOB_UID}={job.metadata.get('uid', '')}",
    }


def coordinator_status(
    last: CoordinatorReading | None,
    reading: CoordinatorReading | None,
    status: Mapping[str, Any],
    devices: Mapping[str, Any] | None = None,
) -> Json:
    """Return the fields that the coordinator determines; unreported ones stay as in `status`, the stored one.

    `last`: the coordinator's final report, or else the reading.
    """
    fields = {name: status[name] for name in _OF_COORDINATOR if status.get(name)}
    if last is not None:
        fields["progress"] = _progress(last)
        if (checkpoint := _checkpoint(last, status)) is not None:
            fields["lastCheckpoint"] = checkpoint
    if reading is not None and (plan := _plan(reading)) is not None:
        stored_plan = {name: text for name, text in (status.get("plan") or {}).items() if name in _TOLD_ONCE}
        fields["plan"] = stored_plan | plan  # a restarted coordinator has not reported these yet
    plan = {name: value for name, value in (fields.pop("plan", None) or {}).items() if name != "devices"}
    if devices is not None:
        plan["devices"] = dict(devices)
    return fields | ({"plan": plan} if plan else {})


def last_reading(
    reading: CoordinatorReading | None,
    pods: Collection[ObservedPod],
    iterations: int,
    *,
    over: bool,
    earlier: CoordinatorReading | None = None,
) -> CoordinatorReading | None:
    """Return the reading, updated by the coordinator's latest final report; without a report, the reading unchanged.

    `over`: the coordinator does not restart in its pod. `earlier`: what a report updates if there is no `reading`.
    """
    ends = [pod.end for pod in pods if pod.group == Group.COORDINATOR and (over or pod.over or pod.deletion)]
    reports = [(end.at, end.report) for end in ends if end and end.at and end.report]
    if not reports:
        return reading
    at, report = max(reports, key=lambda item: item[0])
    latest = reading or earlier or CoordinatorReading(at, "", 0, iterations)
    return replace(
        latest,
        at=max(at, latest.at),
        phase="Stopped",
        iteration=report.iteration,
        metrics={**latest.metrics, **report.metrics},
        seconds_left=0.0,
        last_checkpoint=report.checkpoint or latest.last_checkpoint,
    )


def completed_progress(progress: Json | None, iterations: int, now: datetime) -> Json:
    """Return `status.progress` of a completed job."""
    final = {key: value for key, value in (progress or {}).items() if key not in ("remainingSeconds", "stage")}
    summary = f"{iterations}/{iterations}"
    done = {"iteration": iterations, "iterations": iterations, "summary": summary, "lastUpdateTime": rfc3339(now)}
    return final | done


def skipped_steps_events(progress: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the event that more steps were skipped than the stored status has; `before` is its progress."""
    now, earlier = int(progress.get("nonFiniteSteps") or 0), int(before.get("nonFiniteSteps") or 0)
    if now <= earlier:
        return ()
    steps = "1 optimizer step was" if now - earlier == 1 else f"{now - earlier} optimizer steps were"
    text = (
        f"{steps} skipped, because a loss or gradient was infinite or NaN; {now} so far, "
        f"{progress.get('summary')} iterations are trained"
    )
    return (JobEvent("StepsSkipped", text, warning=True),)


def sample_failure_events(progress: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the event that workers failed on a sample, unless the stored progress `before` has it."""
    text = str(progress.get("sampleFailure") or "")
    return (JobEvent("SampleFailed", text, warning=True),) if text and text != before.get("sampleFailure") else ()


def lost_tracker_events(progress: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the event that a tracker was given up, unless the stored progress `before` has it."""
    text = str(progress.get("trackerLost") or "")
    return (JobEvent("TrackerLost", text, warning=True),) if text and text != before.get("trackerLost") else ()


def warning_events(progress: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the event of a warning at the start, unless the stored progress `before` has it."""
    text = str(progress.get("warning") or "")
    return (JobEvent("StartWarning", text, warning=True),) if text and text != before.get("warning") else ()


def speculation_events(plan: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the event that drafting was switched off or on, unless the stored plan `before` has it."""
    text = str(plan.get("speculationSwitched") or "")
    return (JobEvent("SpeculationSwitched", text),) if text and text != before.get("speculationSwitched") else ()


def device_plan_events(plan: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[JobEvent, ...]:
    """Return the events of a plan for spec.devices, and of its drift, that the stored plan `before` has not."""
    events = []
    if plan.get("devices") and plan["devices"] != before.get("devices"):
        words = DevicePlanRecord.model_validate(plan["devices"]).words
        events.append(JobEvent("DevicesPlanned", words[:TEXT_MAX]))
    text = str(plan.get("drift") or "")
    if text and text != before.get("drift"):
        events.append(JobEvent("PlanDrift", text))
    return tuple(events)


def seconds_to_hold(status: Mapping[str, Any], before: Mapping[str, Any], age: float) -> float | None:
    """Return the seconds for which a frequent change alone waits; None if the status is to be written now.

    `age`: seconds since this process last wrote the status.
    """
    if _slow_part(status) != _slow_part(before):
        return None
    return PROGRESS_SECONDS - age if age < PROGRESS_SECONDS else None


def differs(status: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether a status differs in more than the time of the reading and the estimate that depends on it."""
    return _without_times(status) != _without_times(before)


def _progress(reading: CoordinatorReading) -> Json:
    progress: Json = {
        "iteration": reading.iteration,
        "iterations": reading.iterations,
        "summary": f"{reading.iteration}/{reading.iterations}",
        "stage": reading.phase or "Starting",
        "lastUpdateTime": rfc3339(reading.at),
    }
    for field, metric in NUMBERS.items():
        value = reading.metrics.get(metric)
        if value is not None and math.isfinite(value) and (value >= 0 or field != "samplesPerSecond"):
            progress[field] = float(f"{value:.6g}")
    for field, metric in EVALUATED.items():
        version = reading.metrics.get(metric, -1.0)
        if 0 <= version < MAX_STEPS:
            progress[field] = round(version)
    skipped = reading.metrics.get(NON_FINITE_STEPS, 0.0)
    if 0 < skipped < MAX_STEPS:
        progress["nonFiniteSteps"] = round(skipped)
    if reading.sample_failures:
        progress["sampleFailure"] = reading.sample_failures[0][:TEXT_MAX]
    if reading.lost_trackers:
        progress["trackerLost"] = reading.lost_trackers[0][:TEXT_MAX]
    if reading.warnings:
        progress["warning"] = ". ".join(reading.warnings)[:TEXT_MAX]
    if reading.seconds_left > 0:
        progress["remainingSeconds"] = round(reading.seconds_left)
    return progress


def _plan(reading: CoordinatorReading) -> Json | None:
    """Return the choices that the coordinator reports, for `status.plan`; None while it reports none."""
    plan: dict[str, Any] = {}
    if reading.engines:
        plan["engine"] = engines_in_words(reading.engines)[:TEXT_MAX]
    if reading.fusion:
        plan["interStage"] = reading.fusion[:TEXT_MAX]
    if reading.long_rounds:
        plan["longRounds"] = reading.long_rounds[:TEXT_MAX]
    if reading.speculation:
        plan["speculation"] = reading.speculation[:TEXT_MAX]
    if reading.speculation_switched:
        plan["speculationSwitched"] = reading.speculation_switched[:TEXT_MAX]
    if reading.plan_drift:
        plan["drift"] = reading.plan_drift[:TEXT_MAX]
    if reading.predicted_seconds > 0 and math.isfinite(reading.predicted_seconds):
        plan["predictedSeconds"] = float(f"{reading.predicted_seconds:.3g}")
    return plan or None


def engines_in_words(engines: Mapping[str, int]) -> str:
    """Return the workers' engines as text, with counts if they differ; the most frequent first."""
    ordered = sorted(engines.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) == 1:
        return ordered[0][0]
    return "; ".join(f"{count} by {engine}" for engine, count in ordered)


def _checkpoint(reading: CoordinatorReading, status: Mapping[str, Any]) -> Json | None:
    """Return `status.lastCheckpoint`; None without one. Its time is that of the first reading that named it."""
    stored = status.get("lastCheckpoint")
    if not reading.last_checkpoint or (stored and stored.get("path") == reading.last_checkpoint):
        return dict(stored) if stored else None
    match = _CHECKPOINT.search(reading.last_checkpoint)
    return {
        "path": reading.last_checkpoint,
        "iteration": int(match.group(1)) if match else reading.iteration,
        "time": rfc3339(reading.at),
    }


def _slow_part(status: Mapping[str, Any]) -> Json:
    """Return the part of the status whose change is written at once, with the sizes and restarts of groups."""
    slow = {name: status.get(name) for name in _SLOW_FIELDS}
    slow["conditions"] = [
        {key: condition.get(key) for key in ("type", "status", "reason", "lastTransitionTime", "observedGeneration")}
        for condition in status.get("conditions") or []
    ]
    slow["devices"] = (status.get("plan") or {}).get("devices")
    slow["desired"] = {group["name"]: (group["desired"], group.get("epoch")) for group in status.get("groups") or []}
    return slow


def _without_times(status: Mapping[str, Any]) -> Json:
    timeless = dict(status)
    if "progress" in timeless:
        hidden = ("lastUpdateTime", "remainingSeconds")
        timeless["progress"] = {key: value for key, value in timeless["progress"].items() if key not in hidden}
    return timeless
