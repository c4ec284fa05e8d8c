"""Checks by the planner's estimate that a device can hold the models of a worker with a training rank.

Rule: it reads model files on this disk, once.
"""

from functools import cached_property

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode, Group
from rlhf_coordinator.model_sizes import read_sizes
from rlhf_coordinator.state.job_state import JobContext
from rlhf_planner.device_memory import Sizes, budget
from rlhf_planner.training_layouts import FIELD, layout_problem


class DeviceMemory:
    """The memory of a job's training ranks."""

    def __init__(self, context: JobContext) -> None:
        self._context = context

    def problem(self, register: pb.Register, rank: int | None) -> pb.Failure | None:
        """Return why the job cannot run on the device of a worker; None without a known reason.

        Only a CUDA device of known memory with a training rank is checked.
        """
        spec = self._context.spec
        if rank is None or not register.device.startswith("cuda") or not register.device_memory_bytes:
            return None
        if spec.rank_group is Group.TRAINING:
            field, problem = FIELD, layout_problem(spec, self._sizes, register.device_memory_bytes)
        else:
            field, problem = "spec.placement", budget(spec, self._sizes).problem(register.device_memory_bytes)
        if not problem:
            return None
        message = f"{spec.placement}: {register.worker} on {register.device_name or register.device}: {problem}"
        return pb.Failure(reason="DoesNotFit", field=field, message=message, exit_code=ExitCode.USAGE)

    @cached_property
    def _sizes(self) -> Sizes:
        return read_sizes(self._context.spec)
