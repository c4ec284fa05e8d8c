"""The independent checker: verifies that start times are a valid schedule of an instance, or names the broken rule.

Rule: states the rules a second time. Must never share code with the simulator or the search.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_planner.schedule.instance import Instance, InstancePipeline

StepKind = Literal["F", "B", "I", "W"]
TOLERANCE = 1e-6  # in time or activation units: JSON may have rounded start times


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a device. Pipelines, stages and micro-batches are numbered from 0; times are in units of the
    instance."""

    pipeline: int
    kind: StepKind
    microbatch: int
    stage: int
    start: float
    end: float


class ScheduleError(ValueError):
    """The schedule is invalid for its instance. The message names the place and the broken rule."""


@dataclass(frozen=True, slots=True)
class CheckedSchedule:
    """Measurements of a valid schedule."""

    makespan: float
    peaks: tuple[float, ...]


def check_schedule(instance: Instance, devices: Sequence[Sequence[Step]]) -> CheckedSchedule:
    """Return the makespan and the peak of each device. Raises ScheduleError for the first broken rule."""
    if len(devices) != instance.devices:
        raise ScheduleError(f"devices: {len(devices)} rows given, the instance has {instance.devices} devices")
    steps: dict[tuple[int, int, int, str], Step] = {}
    for device, row in enumerate(devices):
        free = 0.0
        for place, step in enumerate(row):
            at = f"devices[{device}][{place}]"
            _check_step(instance, device, step, at)
            key = (step.pipeline, step.stage, step.microbatch, step.kind)
            if key in steps:
                raise ScheduleError(f"{at}: {_name(step)} appears twice")
            steps[key] = step
            if step.start < free - TOLERANCE:
                raise ScheduleError(
                    f"{at}: {_name(step)} starts at {step.start:g}, but the device is busy until {free:g}"
                )
            free = step.end
    for index, pipe in enumerate(instance.pipelines):
        _check_pipeline(index, pipe, steps)
    peaks = tuple(_peak(instance, device, row) for device, row in enumerate(devices))
    cap = instance.memory_cap
    if cap is not None and max(peaks) > cap + TOLERANCE:
        worst = peaks.index(max(peaks))
        raise ScheduleError(f"devices[{worst}]: holds {peaks[worst]:g} at its peak, above memoryCap {cap:g}")
    return CheckedSchedule(max((row[-1].end for row in devices if row), default=0.0), peaks)


def _name(step: Step) -> str:
    return f"{step.kind} of micro-batch {step.microbatch} on stage {step.stage} of pipeline {step.pipeline}"


def _check_step(instance: Instance, device: int, step: Step, at: str) -> None:
    if not 0 <= step.pipeline < len(instance.pipelines):
        raise ScheduleError(f"{at}.pipeline: {step.pipeline} is not one of the {len(instance.pipelines)} pipelines")
    pipe = instance.pipelines[step.pipeline]
    if not 0 <= step.stage < len(pipe.stage_devices):
        raise ScheduleError(f"{at}.stage: {step.stage} is not one of the {len(pipe.stage_devices)} stages")
    if not 0 <= step.microbatch < pipe.microbatches:
        raise ScheduleError(f"{at}.microbatch: {step.microbatch} is not one of the {pipe.microbatches} micro-batches")
    if pipe.stage_devices[step.stage] != device:
        raise ScheduleError(f"{at}: {_name(step)} belongs on device {pipe.stage_devices[step.stage]}")
    weight = pipe.weight_gradient[step.stage]
    lasts = {
        "F": pipe.forward[step.stage],
        "B": pipe.backward[step.stage],
        "I": pipe.backward[step.stage] - weight,
        "W": weight,
    }
    if step.kind not in lasts:
        raise ScheduleError(f"{at}.kind: {step.kind!r} is not valid; give F, B, I or W")
    if step.start < -TOLERANCE or abs(step.end - step.start - lasts[step.kind]) > TOLERANCE:
        raise ScheduleError(f"{at}: {_name(step)} runs {step.start:g} to {step.end:g}; it lasts {lasts[step.kind]:g}")


def _check_pipeline(index: int, pipe: InstancePipeline, steps: dict[tuple[int, int, int, str], Step]) -> None:
    """Check that every step is there, after its inputs, and that micro-batches stay in order on every stage."""
    last = len(pipe.stage_devices) - 1

    def need(stage: int, microbatch: int, *kinds: str) -> Step:
        for kind in kinds:
            result = steps.get((index, stage, microbatch, kind))
            if result is not None:
                return result
        raise ScheduleError(f"pipeline {index}: {kinds[0]} of micro-batch {microbatch} on stage {stage} is missing")

    for microbatch in range(pipe.microbatches):
        for stage in range(last + 1):
            forward, backward = need(stage, microbatch, "F"), need(stage, microbatch, "B", "I")
            _after(backward, forward, 0.0)
            if stage > 0:
                _after(forward, need(stage - 1, microbatch, "F"), _lag(pipe, stage - 1))
            if stage < last:
                _after(backward, need(stage + 1, microbatch, "B", "I"), _lag(pipe, stage))
            if backward.kind == "I":
                _after(need(stage, microbatch, "W"), backward, 0.0)
            elif (index, stage, microbatch, "I") in steps or (index, stage, microbatch, "W") in steps:
                raise ScheduleError(f"pipeline {index}: micro-batch {microbatch} on stage {stage} has B and I or W")
            if microbatch > 0:
                _after(forward, need(stage, microbatch - 1, "F"), 0.0)
                _after(backward, need(stage, microbatch - 1, "B", "I"), 0.0)


def _after(later: Step, earlier: Step, lag: float) -> None:
    if later.start < earlier.end + lag - TOLERANCE:
        wait = f" and its transfer of {lag:g}" if lag else ""
        raise ScheduleError(
            f"{_name(later)} starts at {later.start:g}, before the end of {_name(earlier)} at {earlier.end:g}{wait}"
        )


def _lag(pipe: InstancePipeline, edge: int) -> float:
    return 0.0 if pipe.stage_devices[edge] == pipe.stage_devices[edge + 1] else pipe.transfer[edge]


def _peak(instance: Instance, device: int, row: Sequence[Step]) -> float:
    """Return the largest activation sum: allocated at the start of a forward step, freed at the end of B or W."""
    changes: dict[float, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in row:
        amount = instance.pipelines[step.pipeline].activation[step.stage]
        if step.kind == "F":
            changes[step.start][1] += amount
        elif step.kind in ("B", "W"):
            changes[step.end][0] -= amount
    holds = peak = 0.0
    for moment in sorted(changes):
        freed, taken = changes[moment]
        holds += freed + taken
        peak = max(peak, holds)
    return peak
