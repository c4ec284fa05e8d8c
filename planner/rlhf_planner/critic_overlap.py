"""Compares the seconds of an iteration with and without the critics' overlap, on measured or simulated times.

Assumes that generation and training use distinct devices. Rule: pure. Source: EuroMLSys'25, opportunity 8.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from rlhf_planner.explain.replays import scoring_end
from rlhf_planner.schedule.baselines import serial
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.simulate import instance_arrays


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Inputs of the comparison: times of the parts of an iteration, in one unit, and a share."""

    together: float
    """Time of training all models together."""
    policy: float
    """Time of training only the policy."""
    critics: float
    """Time of training all other models."""
    publishing: float
    """Time from trained weights to workers that have loaded them. A replay uses it for the policy and for the critics.
    """
    finished: tuple[float, ...]
    """Times, from the first lease, at which responses reach the scoring queue of the replay."""
    apart: float
    """Time between two scores while samples are waiting to be scored."""
    latency: float = 0.0
    """Time from the end of a response that does not wait until its score."""
    late_share: float = 1.0
    """Share of `apart` that critics' tasks take, 0..1."""


def unchanged(times: OverlapTimes) -> float:
    """Return the time of an iteration in which all models are trained before any is published."""
    return times.together + times.publishing + scoring_end(times.finished, times.apart, times.latency)


def overlapped(times: OverlapTimes) -> float:
    """Return the steady-state time of an iteration that starts decoding as soon as the policy is published."""
    ready, late = times.critics + times.publishing, times.apart * times.late_share
    work = [(moment, times.apart) for moment in times.finished if moment >= ready]
    for moment in times.finished:
        if moment < ready:
            work += [(moment, times.apart - late)] * (times.late_share < 1) + [(ready, late)]
    end = 0.0
    for arrival, seconds in sorted(work):
        end = max(end + seconds, arrival + times.latency)
    return times.policy + times.publishing + end


def alone(instance: Instance, pipelines: Collection[int]) -> float:
    """Return the 1F1B makespan of the given pipelines (by number), without the others."""
    chosen = tuple(pipe for number, pipe in enumerate(instance.pipelines) if number in pipelines)
    return serial(instance_arrays(replace(instance, pipelines=chosen))).makespan
