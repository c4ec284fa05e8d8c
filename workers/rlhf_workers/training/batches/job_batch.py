"""The samples of an iteration as a batch with shaped rewards, by the manifest of the job."""

from collections.abc import Sequence

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_common import control_pb2 as pb
from rlhf_workers.training.batches.reward_shaping import shaped
from rlhf_workers.training.batches.training_batch import TrainingBatch, batch_from


def job_batch(
    spec: RLHFJobSpec, iteration: int, samples: Sequence[pb.TrainSample], size: int
) -> tuple[TrainingBatch, dict[str, float]]:
    """Return samples 0 to `size` - 1 as a batch with shaped rewards, and the metrics of shaping. Raises WorkError if
    one is missing or incomplete."""
    graph, longest = graph_of(spec), spec.rollout.max_response_tokens
    version = iteration if spec.rollout.may_be_stale else None
    holes = spec.rollout.environment is not None
    unshaped = batch_from(samples, size, graph.batch_fields, graph.reward_parts, holes, version)
    return shaped(unshaped, spec.reward_shaping, graph.combination, longest)
