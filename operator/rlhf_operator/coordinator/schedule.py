"""The schedule table that training ranks execute: which pipelines there are, and how many micro-batches each has.

Rule: the table is for one data-parallel block and one mini-batch (one optimizer step); solvers are in the planner.
"""

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode
from rlhf_api.schedule import Pipeline
from rlhf_operator.coordinator.failures import JobError
from rlhf_planner.schedule.serial import serial_table


def schedule_json(spec: RLHFJobSpec) -> str:
    """The serial 1F1B table of every trained model in turn, as JSON; stage s of each model is on rank s."""
    parallelism = spec.training.parallelism
    mini, step = spec.algorithm.fields.mini_batch_size, spec.training.micro_batch_size * parallelism.data
    if mini % step:
        message = f"miniBatchSize {mini} must be a multiple of training.microBatchSize x parallelism.data = {step}"
        field = f"spec.algorithm.{spec.algorithm.name}.miniBatchSize"
        raise JobError("Usage", message, field=field, exit_code=ExitCode.USAGE)
    ranks = tuple(range(parallelism.pipeline))
    pipelines = [
        Pipeline(name=model, model=model, stage_ranks=ranks, microbatches=mini // step)
        for model in graph_of(spec).trained
    ]
    return serial_table(pipelines).model_dump_json(exclude_none=True)
