"""Whether a device can hold what a worker with a training rank will hold in turn: asked before it loads anything.

Rule: reads headers of model files, once; says no only where weights, caches and optimizer state alone are too much.
"""

from functools import cached_property

from rlhf_api import control_pb2 as pb
from rlhf_api.names import ExitCode, Group
from rlhf_coordinator.model_sizes import read_sizes
from rlhf_coordinator.state.job_state import JobContext
from rlhf_planner.device_memory import Budget, budget


class DeviceMemory:
    """The budget of a job's workers that take turns."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def problem(self, register: pb.Register, rank: int | None) -> pb.Failure | None:
        """Return why the job cannot run on the device of a worker; None when nothing says so."""
        spec = self._context.spec
        if rank is None or spec.rank_group is Group.TRAINING or not register.device.startswith("cuda"):
            return None
        problem = self._budget.problem(register.device_memory_bytes)
        if not problem:
            return None
        message = f"{spec.placement}: {register.worker} on {register.device_name or register.device}: {problem}"
        return pb.Failure(reason="DoesNotFit", field="spec.placement", message=message, exit_code=ExitCode.USAGE)

    @cached_property
    def _budget(self) -> Budget:
        spec = self._context.spec
        return budget(spec, read_sizes(spec))
