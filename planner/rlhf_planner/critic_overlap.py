"""What training the critics beside the next decoding would gain: an iteration with and without it, by the same times.

Owns the comparison and decides nothing (`critic_overlap_choice` does, where it may). With the overlap ranks train the
policy's mini-batches first and publish it; while it decodes the next batch they train the critics' mini-batches. What
is scored by critics waits until those are trained and published, too; other scores do not.
A fused table does the critics' work in the policy's bubbles, which the overlap cannot: both alone run as 1F1B.
Rule: pure; a replay of times that were measured or simulated. Devices of generation and of training must be distinct.
Source: EuroMLSys'25, opportunity 8: generation of an iteration beside critic training of the one before.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from rlhf_planner.explain.replays import scoring_end
from rlhf_planner.schedule.baselines import serial
from rlhf_planner.schedule.instance import Instance
from rlhf_planner.schedule.simulate import instance_arrays


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """What the parts of an iteration take, all in one unit of time."""

    together: float
    """Training of all models, by the table in force."""
    policy: float
    """Training of the policy alone."""
    critics: float
    """Training of all other models alone."""
    publishing: float
    """From trained weights to workers that hold them; of the policy, and again of the critics."""
    finished: tuple[float, ...]
    """When each response is finished, counted from the first lease."""
    apart: float
    """Between two samples that are scored, while anything waits for that."""
    latency: float = 0.0
    """From a response that waits for nothing to its score."""
    late_share: float = 1.0
    """Of `apart`, what tasks take that are scored by critics, 0..1."""


def unchanged(times: OverlapTimes) -> float:
    """Return the time of an iteration in which all models are trained before any is published."""
    return times.together + times.publishing + scoring_end(times.finished, times.apart, times.latency)


def overlapped(times: OverlapTimes) -> float:
    """Return the time of an iteration that begins to decode when the policy is published, in a steady state."""
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
    """Return the 1F1B makespan of some pipelines of an instance, by number, without the others."""
    chosen = tuple(pipe for number, pipe in enumerate(instance.pipelines) if number in pipelines)
    return serial(instance_arrays(replace(instance, pipelines=chosen))).makespan
