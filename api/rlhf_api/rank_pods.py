"""Maps workers to pods and pods to workers, also for pods with several ranks. Rule: pure.

Pod k of the training group contains ranks k*N to k*N + N - 1, where N is `spec.training.ranksPerPod`.
"""

from collections.abc import Iterable
from typing import Any

from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import Group, worker_name


def workers_a_pod(spec: RLHFJobSpec, group: str) -> int:
    """Return the workers per pod of a group; 0 for the coordinator's."""
    if group == Group.COORDINATOR:
        return 0
    return spec.training.ranks_per_pod if group == Group.TRAINING else 1


def rank_pods(spec: RLHFJobSpec) -> int:
    """Return the number of pods with training ranks."""
    return pods_of(spec.training.ranks, workers_a_pod(spec, spec.rank_group))


def pods_of(workers: int, each: int) -> int:
    """Return the number of pods for `workers` workers with `each` workers per pod."""
    return -(-workers // each)


def indices(pod: int, each: int) -> range:
    """Return the numbers of the workers in pod number `pod` of a group with `each` workers per pod."""
    return range(pod * each, (pod + 1) * each)


def pod_index(worker: int, each: int) -> int:
    """Return the number of a worker's pod."""
    return worker // each


def workers_of(spec: RLHFJobSpec, group: str, pod: int) -> list[str]:
    """Return the names of the workers in a pod of a job; none for the coordinator's."""
    return [worker_name(group, index) for index in indices(pod, workers_a_pod(spec, group))]


def pods_of_workers(spec: RLHFJobSpec, names: Iterable[str]) -> set[tuple[str, int]]:
    """Return (group, number) of the pods with the workers of these names."""
    split = (name.rpartition("-") for name in names)
    return {(group, pod_index(int(index), workers_a_pod(spec, group))) for group, _, index in split}


def gpus_a_pod(spec: Any, group: str) -> Any:
    """Return the GPUs per pod of a group from a stored spec as JSON, which is not validated. A value that is no number
    is returned unchanged."""
    fields = spec.get(group) if isinstance(spec, dict) else None
    fields = fields if isinstance(fields, dict) else {}
    gpus, ranks = fields.get("gpusPerReplica"), fields.get("ranksPerPod", 1)
    several = group == Group.TRAINING and type(gpus) is int and type(ranks) is int
    return gpus * ranks if several else gpus
