"""The times of the iteration in progress: seconds by phase, the coordinator's overhead, device turns.

Rule: moments are arguments, in seconds of one monotonic clock; nothing here reads a clock.
"""

from dataclasses import dataclass, field

from rlhf_common import control_pb2 as pb


@dataclass
class IterationTimes:
    """Times of the iteration in progress."""

    start: float
    phase: str = "Starting"
    phase_start: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    control_seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> seconds between the message that ended it and the commands that began the next one.

    This is the coordinator's own share of an iteration's critical path.
    """
    turn_seconds: dict[str, float] = field(default_factory=dict)
    """Worker -> seconds in which its device changed between training and the other roles."""

    def enter(self, phase: str, now: float) -> float:
        """Begin another phase; return the seconds of the one before since it was entered."""
        spent = now - self.phase_start
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
        self.phase, self.phase_start = phase, now
        return spent

    def begin_iteration(self, now: float) -> None:
        """Begin the next iteration in the current phase."""
        self.enter(self.phase, now)
        self.start, self.seconds, self.control_seconds, self.turn_seconds = now, {}, {}, {}

    def add_control(self, phase: str, seconds: float) -> None:
        """Add the coordinator's own time at the end of a phase."""
        self.control_seconds[phase] = self.control_seconds.get(phase, 0.0) + seconds

    def observe(self, worker: str, observation: pb.Observation) -> None:
        """Record that a worker's device changed between roles: a role was offloaded or onloaded."""
        if observation.WhichOneof("work") in ("offload", "onload"):
            seconds = (observation.end_ns - observation.start_ns) / 1e9
            self.turn_seconds[worker] = self.turn_seconds.get(worker, 0.0) + seconds
