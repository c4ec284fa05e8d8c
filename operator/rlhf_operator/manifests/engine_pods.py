"""What a generation worker's pod has for vLLM beyond every other pod: image, caches, and silence; and the shared memory
of a pod in which several processes compute.

Rule: pure, from the manifest alone. A pod has the latter where vLLM may decode; for torch and for engines of one's own
nothing changes. Processes of one worker speak to each other inside their pod only, through /dev/shm and its loopback
(the worker sees to that), so nothing here opens a port; vLLM's own server and its routes for developers never run.
"""

from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.rank_pods import workers_a_pod
from rlhf_common.names import Group
from rlhf_operator.manifests.quantity import amount

_GIBIBYTE: Final = 1024
"""Mebibytes."""
SHARED_BASE_MEBIBYTES: Final = _GIBIBYTE
"""What NCCL asks of /dev/shm where GPUs do not reach each other's memory, and vLLM's queue to all its processes."""
SHARED_PROCESS_MEBIBYTES: Final = _GIBIBYTE // 2
"""Of each process of a worker: vLLM's queue of its answers alone is 240 MiB."""

CACHES: Final = {
    "VLLM_CACHE_ROOT": "/tmp/vllm",  # noqa: S108 an emptyDir of the pod
    "VLLM_CONFIG_ROOT": "/tmp/vllm/config",  # noqa: S108
    "TRITON_CACHE_DIR": "/tmp/triton",  # noqa: S108
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # noqa: S108
    "FLASHINFER_WORKSPACE_BASE": "/tmp",  # noqa: S108
}
"""Where what is compiled is kept: the root file system is read-only. A template may name folders of a volume, which
outlast the pod."""
SILENT: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""No statistics leave the pod, unless a template says otherwise."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Of a job whose models are all folders: no library asks the hub for anything."""
LOOPBACK: Final = {"VLLM_HOST_IP": "127.0.0.1"}
"""The address at which processes of one worker meet."""


def may_decode_by_vllm(job: RLHFJob, group: Group) -> bool:
    """Return whether vLLM may decode in the workers of a group: where it is asked for, and where `Auto`, which is
    decided in the worker, has GPUs or several processes a worker. On a CPU `Auto` is torch, in an image half as large.
    """
    chosen = job.spec.generation
    large = chosen.gpus_per_replica > 0 or chosen.parallelism.tensor > 1
    return group is Group.GENERATION and (chosen.engine == "vllm" or (chosen.engine == "Auto" and large))


def environment(job: RLHFJob, group: Group) -> dict[str, str]:
    """Return variables that the pods of a group have for vLLM; none where it does not decode."""
    if not may_decode_by_vllm(job, group):
        return {}
    return CACHES | SILENT | LOOPBACK | (OFFLINE if _all_in_folders(job) else {})


def processes(job: RLHFJob, group: Group) -> int:
    """Return the processes that compute in a pod of a group: one a GPU that its worker's layers are split over, one a
    training rank.
    """
    return job.spec.generation.parallelism.tensor if group is Group.GENERATION else workers_a_pod(job.spec, group)


def shared_memory(job: RLHFJob, group: Group) -> int:
    """Return the mebibytes of /dev/shm of a group's pods; 0 where one process has nobody to share with."""
    count = processes(job, group)
    return SHARED_BASE_MEBIBYTES + count * SHARED_PROCESS_MEBIBYTES if count > 1 else 0


def shared_bytes(volumes: list[dict[str, Any]]) -> int:
    """Return the bytes to which the operator bounds /dev/shm in a pod; 0 where it sets no bound."""
    sizes = (volume.get("emptyDir", {}).get("sizeLimit", 0) for volume in volumes if volume.get("name") == "shm")
    return int(amount(next(sizes, 0)))


def _all_in_folders(job: RLHFJob) -> bool:
    models, draft = job.spec.models, job.spec.generation.speculation.draft_model
    rewards = (given.reward.own_model for given in models.all_rewards)
    sources = (*map(models.given, ModelRole), *rewards, draft)
    adapter = job.spec.training.lora.adapter if job.spec.training.lora is not None else None
    paths = [source.path for source in sources if source is not None] + ([adapter] if adapter else [])
    return all(path.startswith("/") for path in paths)
