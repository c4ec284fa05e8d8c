"""Fields of a generation worker's pod for vLLM (caches, no telemetry), and shared memory for several processes.

Rule: pure, from the manifest alone.
"""

from typing import Any, Final

from rlhf_api.algorithms import ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.rank_pods import workers_a_pod
from rlhf_common.names import Group
from rlhf_operator.manifests.quantity import amount

_GIBIBYTE: Final = 1024
"""Mebibytes per gibibyte."""
SHARED_BASE_MEBIBYTES: Final = _GIBIBYTE
"""Mebibytes of /dev/shm for all processes of a pod together."""
SHARED_PROCESS_MEBIBYTES: Final = _GIBIBYTE // 2
"""Mebibytes of /dev/shm for each process of a pod."""

CACHES: Final = {
    "VLLM_CACHE_ROOT": "/tmp/vllm",  # noqa: S108 an emptyDir of the pod
    "VLLM_CONFIG_ROOT": "/tmp/vllm/config",  # noqa: S108
    "TRITON_CACHE_DIR": "/tmp/triton",  # noqa: S108
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",  # noqa: S108
    "FLASHINFER_WORKSPACE_BASE": "/tmp",  # noqa: S108
}
"""Folders of vLLM's caches and settings; the root file system is read-only. A template may name others."""
SILENT: Final = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
"""Variables that turn off usage statistics, unless a template overrides them."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
"""Variables of a job whose models are all folders: libraries do not contact the hub."""
LOOPBACK: Final = {"VLLM_HOST_IP": "127.0.0.1"}
"""Address that vLLM's processes of one worker use for each other."""


def may_decode_by_vllm(job: RLHFJob, group: Group) -> bool:
    """Return whether vLLM may decode in the workers of a group."""
    chosen = job.spec.generation
    large = chosen.gpus_per_replica > 0 or chosen.parallelism.tensor > 1
    return group is Group.GENERATION and (chosen.engine == "vllm" or (chosen.engine == "Auto" and large))


def environment(job: RLHFJob, group: Group) -> dict[str, str]:
    """Return the variables for vLLM in the pods of a group; empty if it cannot decode there."""
    if not may_decode_by_vllm(job, group):
        return {}
    return CACHES | SILENT | LOOPBACK | (OFFLINE if _all_in_folders(job) else {})


def processes(job: RLHFJob, group: Group) -> int:
    """Return the compute processes in a pod of a group: parallelism.tensor for generation, else workers or ranks."""
    return job.spec.generation.parallelism.tensor if group is Group.GENERATION else workers_a_pod(job.spec, group)


def shared_memory(job: RLHFJob, group: Group) -> int:
    """Return the mebibytes of /dev/shm of a group's pods; 0 for a single process."""
    count = processes(job, group)
    return SHARED_BASE_MEBIBYTES + count * SHARED_PROCESS_MEBIBYTES if count > 1 else 0


def shared_bytes(volumes: list[dict[str, Any]]) -> int:
    """Return the limit of the volume shm among a pod's volumes in bytes; 0 if there is none."""
    sizes = (volume.get("emptyDir", {}).get("sizeLimit", 0) for volume in volumes if volume.get("name") == "shm")
    return int(amount(next(sizes, 0)))


def _all_in_folders(job: RLHFJob) -> bool:
    models, draft = job.spec.models, job.spec.generation.speculation.draft_model
    rewards = (entry.reward.own_model for entry in models.all_rewards)
    sources = (*map(models.explicit_source, ModelRole), *rewards, draft)
    adapter = job.spec.training.lora.adapter if job.spec.training.lora is not None else None
    paths = [source.path for source in sources if source is not None] + ([adapter] if adapter else [])
    return all(path.startswith("/") for path in paths)
