"""A plan: groups, placement, layouts and modes of a job, and the manifest that has them.

Owns which fields of a manifest a plan sets. None of them changes what a job learns, except for the order of sums.
Must never set a field that the search did not choose or that does not follow from its choice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from rlhf_api import manifest
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.groups import TrainingParallelism
from rlhf_api.problems import ManifestError, Problem
from rlhf_planner.training_layouts import layout_words

Placement = Literal["Dedicated", "Colocated"]
CriticOverlap = Literal["Disabled", "Enabled", "Auto"]
GENERATION_DECIDES: Final = ("gpusPerReplica", "cpuThreads", "template", "ranksPerPod")
"""Fields of spec.training that generation workers decide with placement Colocated."""


@dataclass(frozen=True)
class DevicePlan:
    """Groups, placement, layouts and modes."""

    placement: Placement
    generation_workers: int
    engine_tensor: int
    max_batch_size: int
    inference_workers: int
    parallelism: TrainingParallelism
    micro_batch_size: int
    activation_checkpointing: bool
    critic_overlap: CriticOverlap

    @classmethod
    def from_spec(cls, spec: RLHFJobSpec) -> DevicePlan:
        """Return the plan that a job has."""
        training, generation = spec.training, spec.generation
        return cls(
            spec.placement, generation.replicas, generation.parallelism.tensor, generation.max_batch_size,
            spec.inference.replicas, training.parallelism, training.micro_batch_size,
            training.activation_checkpointing, training.critic_overlap,
        )  # fmt: skip

    @property
    def groups(self) -> str:
        """Placement and workers in words, such as `Dedicated 2 x 4 + 1`."""
        tensor = f" x {self.engine_tensor}" if self.engine_tensor > 1 else ""
        scorers = f" + {self.inference_workers}" if self.inference_workers else ""
        return f"{self.placement} {self.generation_workers}{tensor}{scorers}"

    @property
    def training(self) -> str:
        """Training in words, such as `pipeline 2, micro-batch 4`."""
        checkpointing = ", checkpointing" if self.activation_checkpointing else ""
        overlap = ", criticOverlap" if self.critic_overlap != "Disabled" else ""
        return f"{layout_words(self.parallelism)}, micro-batch {self.micro_batch_size}{checkpointing}{overlap}"

    def applied(self, spec: RLHFJobSpec) -> RLHFJobSpec:
        """Return the spec with this plan, unchecked."""
        gpus = generation_gpus(spec, self.engine_tensor)
        colocated = self.placement == "Colocated"
        ranks = gpus if colocated else training_gpus(spec)
        parallel = spec.generation.parallelism.model_copy(update={"tensor": self.engine_tensor})
        generation = {
            "replicas": self.generation_workers, "max_batch_size": self.max_batch_size, "parallelism": parallel,
            "gpus_per_replica": gpus,
        }  # fmt: skip
        training = {
            "parallelism": self.parallelism, "micro_batch_size": self.micro_batch_size, "gpus_per_replica": ranks,
            "activation_checkpointing": self.activation_checkpointing, "critic_overlap": self.critic_overlap,
        }  # fmt: skip
        return spec.model_copy(
            update={
                "placement": self.placement,
                "generation": spec.generation.model_copy(update=generation),
                "inference": spec.inference.model_copy(update={"replicas": self.inference_workers}),
                "training": spec.training.model_copy(update=training),
            }
        )


def generation_gpus(spec: RLHFJobSpec, tensor: int) -> int:
    """Return the GPUs of a generation worker of this tensor size."""
    own = spec.generation
    return own.gpus_per_replica if not own.gpus_per_replica or tensor == own.parallelism.tensor else tensor


def training_gpus(spec: RLHFJobSpec) -> int:
    """Return the GPUs of a dedicated training rank: the job's, or one if its ranks were colocated with GPUs."""
    if spec.placement == "Colocated":
        return min(1, spec.generation.gpus_per_replica)
    return spec.training.gpus_per_replica


@dataclass(frozen=True)
class DeviceUse:
    """Devices of one process of each group."""

    generation: int
    inference: int
    """Devices of an inference worker; 0 if it needs none of those that are counted, such as a CPU worker beside GPUs.
    """
    training: int


def device_use(spec: RLHFJobSpec, tensor: int) -> DeviceUse:
    """Return the devices of each process: GPUs, or processes in a job without GPUs."""
    if spec.generation.gpus_per_replica:
        return DeviceUse(generation_gpus(spec, tensor), spec.inference.gpus_per_replica, max(1, training_gpus(spec)))
    return DeviceUse(tensor, 1, 1)


def devices_of(spec: RLHFJobSpec, plan: DevicePlan) -> int:
    """Return the devices of a plan."""
    use = device_use(spec, plan.engine_tensor)
    count = plan.generation_workers * use.generation + plan.inference_workers * use.inference
    return count + (plan.parallelism.ranks * use.training if plan.placement == "Dedicated" else 0)


def manifest_with(document: Mapping[str, Any], job: RLHFJob, plan: DevicePlan) -> dict[str, Any]:
    """Return the data of a manifest with a plan's fields, without fields of spec.training that contradict them; the
    other fields are as written. `job` is the checked job.
    """
    data: dict[str, Any] = copy.deepcopy(dict(document))
    spec, own = data["spec"], job.spec
    spec["placement"] = plan.placement
    generation = spec.setdefault("generation", {})
    generation |= {"replicas": plan.generation_workers, "maxBatchSize": plan.max_batch_size}
    generation.setdefault("parallelism", {})["tensor"] = plan.engine_tensor
    if own.generation.gpus_per_replica:
        generation["gpusPerReplica"] = generation_gpus(own, plan.engine_tensor)
    spec.setdefault("inference", {})["replicas"] = plan.inference_workers
    training = spec.setdefault("training", {})
    training |= {
        "parallelism": _parallelism(plan.parallelism),
        "microBatchSize": plan.micro_batch_size,
        "activationCheckpointing": plan.activation_checkpointing,
        "criticOverlap": plan.critic_overlap,
    }
    if plan.placement == "Colocated":
        for name in GENERATION_DECIDES:
            training.pop(name, None)
    elif training_gpus(own):
        training["gpusPerReplica"] = training_gpus(own)
    if plan.parallelism.ranks % own.training.ranks_per_pod:
        training.pop("ranksPerPod", None)
    return data


def refused_manifest(data: dict[str, Any]) -> list[Problem]:
    """Return why validation refuses a manifest's data; empty for a valid one."""
    try:
        manifest.parse_stored(data)
    except ManifestError as error:
        return list(error.problems)
    return []


def _parallelism(parallelism: TrainingParallelism) -> dict[str, Any]:
    """Return the fields of a layout that differ from their defaults."""
    return parallelism.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
