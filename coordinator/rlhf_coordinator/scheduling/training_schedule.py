"""The serial schedule table that every training group starts from, and whether there is anything to fuse.

Rule: the table is for one data-parallel block and one mini-batch (one optimizer step); solvers are in the planner.
Where fusion may be chosen, the critic's stages are on the opposite ranks from the start, so that the choice changes
the order of work and never the place of weights.
"""

import hashlib

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode
from rlhf_api.schedule import Pipeline
from rlhf_coordinator.failures import JobError
from rlhf_planner.schedule.methods import CANDIDATES, opposite
from rlhf_planner.schedule.serial import serial_table


def candidates(spec: RLHFJobSpec) -> tuple[str, ...]:
    """Return the methods whose tables may be chosen instead of the serial one; none when there is nothing to fuse."""
    several = spec.training.parallelism.pipeline > 1 and len(graph_of(spec).trained) > 1
    unlike = spec.training.micro_batch_tokens is not None  # a fused table is searched for one number of micro-batches
    apart = spec.training.critic_overlap == "Enabled"  # ranks never train both at once
    if not several or unlike or apart or spec.training.schedule.mode == "OneFOneB":
        return ()
    return CANDIDATES.get(spec.fusion.intra_stage.mode, ())


def schedule_json(spec: RLHFJobSpec) -> str:
    """Return the table that runs 1F1B of one trained model after the other, as JSON. Raise JobError when the mini-batch
    cannot be split. Without fusion stage s of each model is on rank s."""
    parallelism = spec.training.parallelism
    mini, step = spec.algorithm.fields.mini_batch_size, spec.training.micro_batch_size * parallelism.data
    if mini % step:
        message = f"miniBatchSize {mini} must be a multiple of training.microBatchSize x parallelism.data = {step}"
        field = f"spec.algorithm.{spec.algorithm.name}.miniBatchSize"
        raise JobError("Usage", message, field=field, exit_code=ExitCode.USAGE)
    models = graph_of(spec).trained
    pipelines = opposite(models, parallelism.pipeline, mini // step)
    if not candidates(spec):
        ranks = tuple(range(parallelism.pipeline))
        pipelines = tuple(Pipeline(name=m, model=m, stage_ranks=ranks, microbatches=mini // step) for m in models)
    return serial_table(pipelines).model_dump_json(exclude_none=True)


def question(spec: RLHFJobSpec, serial: str) -> str:
    """Return a hash of what is chosen between: a choice that was written down holds as long as this is the same."""
    return hashlib.sha256(f"{candidates(spec)}:{serial}".encode()).hexdigest()
