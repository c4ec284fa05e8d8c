"""The times of the iteration in progress: seconds by phase, the coordinator's overhead, device turns.

Rule: moments are arguments, in seconds of one monotonic clock.
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
    """Phase -> seconds from the first undecided change to the entry into the next phase in the same tick."""
    turn_seconds: dict[str, float] = field(default_factory=dict)
    """Worker -> seconds of its offloads and onloads."""

    def enter(self, phase: str, now: float) -> float:
        """Begin another phase, or the same one again; return the seconds that are added to the phase before."""
        spent = now - self.phase_start
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + spent
        self.phase, self.phase_start = phase, now
        return spent

    def spent(self, phase: str, now: float) -> float:
        """Return the seconds of a phase in this iteration so far, also if it is in progress."""
        return self.seconds.get(phase, 0.0) + (now - self.phase_start if phase == self.phase else 0.0)

    def begin_iteration(self, now: float) -> None:
        """Begin the next iteration in the current phase."""
        self.enter(self.phase, now)
        self.start, self.seconds, self.control_seconds, self.turn_seconds = now, {}, {}, {}

    def add_control(self, phase: str, seconds: float) -> None:
        """Add the coordinator's own time at the end of a phase."""
        self.control_seconds[phase] = self.control_seconds.get(phase, 0.0) + seconds

    def observe(self, worker: str, observation: pb.Observation) -> None:
        """Add the seconds of an offload or onload; ignore other observations."""
        if observation.WhichOneof("work") in ("offload", "onload"):
            seconds = (observation.end_ns - observation.start_ns) / 1e9
            self.turn_seconds[worker] = self.turn_seconds.get(worker, 0.0) + seconds
