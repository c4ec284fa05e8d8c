"""The serial schedule table with which a job starts, and the alternatives to it.

The table is for one data-parallel block and one mini-batch.
"""

import hashlib

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_planner.schedule.methods import CANDIDATES, placed
from rlhf_planner.schedule.serial import serial_table


def candidates(spec: RLHFJobSpec) -> tuple[str, ...]:
    """Return the methods whose tables may replace the serial one; empty when the job cannot or must not fuse."""
    parallelism, models = spec.training.parallelism, graph_of(spec).trained
    several = len(models) > 1 and min(parallelism.stages_of(model) for model in models) > 1
    unlike = spec.training.micro_batch_tokens is not None  # a fused table is for a fixed number of micro-batches
    apart = spec.training.critic_overlap == "Enabled"  # ranks never train both at once
    if not several or unlike or apart or spec.training.schedule.mode == "OneFOneB":
        return ()
    return CANDIDATES.get(spec.fusion.intra_stage.mode, ())


def schedule_json(spec: RLHFJobSpec) -> str:
    """Return the table that runs 1F1B of one trained model after the other, as JSON.

    Raises JobError when the mini-batch cannot be split.
    """
    parallelism = spec.training.parallelism
    mini, step = spec.algorithm.fields.mini_batch_size, spec.training.micro_batch_size * parallelism.data
    if mini % step:
        message = f"miniBatchSize {mini} must be a multiple of training.microBatchSize x parallelism.data = {step}"
        field = f"spec.algorithm.{spec.algorithm.name}.miniBatchSize"
        raise JobError("Usage", message, field=field, exit_code=ExitCode.USAGE)
    tensors = {str(model): parallelism.tensor_of(model) for model in graph_of(spec).trained}
    block = parallelism.pipeline * parallelism.tensor
    pipelines = placed(tensors, block, mini // step, alternate=bool(candidates(spec)))
    return serial_table(pipelines).model_dump_json(exclude_defaults=True)


def question(spec: RLHFJobSpec, serial: str) -> str:
    """Return a hash of the methods to compare and of the serial table."""
    return hashlib.sha256(f"{candidates(spec)}:{serial}".encode()).hexdigest()
