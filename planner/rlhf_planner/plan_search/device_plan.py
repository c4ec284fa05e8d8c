"""A plan: groups, placement, layouts and modes of a job, and the manifest that has them.

Owns which fields of a manifest a plan sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_api import manifest
from rlhf_api.device_sizes import (
    GenerationSizes,
    InferenceSizes,
    JobSizes,
    TrainingSizes,
    generation_gpus,
    job_devices,
    training_gpus,
)
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.groups import TrainingParallelism
from rlhf_api.problems import ManifestError, Problem
from rlhf_planner.training_layouts import layout_words

Placement = Literal["Dedicated", "Colocated"]
CriticOverlap = Literal["Disabled", "Enabled", "Auto"]


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

    def sizes(self, spec: RLHFJobSpec) -> JobSizes:
        """Return this plan's sizes for a job's manifest."""
        ranks = 0 if self.placement == "Colocated" else training_gpus(spec)
        return JobSizes(
            placement=self.placement,
            generation=self._generation(spec),
            inference=InferenceSizes(replicas=self.inference_workers),
            training=self._training(ranks),
        )

    def applied(self, spec: RLHFJobSpec) -> RLHFJobSpec:
        """Return the spec with this plan, unchecked."""
        generation = self._generation(spec)
        ranks = generation.gpus_per_replica if self.placement == "Colocated" else training_gpus(spec)
        return spec.model_copy(
            update={
                "placement": self.placement,
                "generation": spec.generation.model_copy(update=dict(generation)),
                "inference": spec.inference.model_copy(update={"replicas": self.inference_workers}),
                "training": spec.training.model_copy(update=dict(self._training(ranks))),
            }
        )

    def _generation(self, spec: RLHFJobSpec) -> GenerationSizes:
        return GenerationSizes(
            replicas=self.generation_workers,
            max_batch_size=self.max_batch_size,
            parallelism=spec.generation.parallelism.model_copy(update={"tensor": self.engine_tensor}),
            gpus_per_replica=generation_gpus(spec, self.engine_tensor),
        )

    def _training(self, gpus: int) -> TrainingSizes:
        return TrainingSizes(
            parallelism=self.parallelism,
            micro_batch_size=self.micro_batch_size,
            activation_checkpointing=self.activation_checkpointing,
            critic_overlap=self.critic_overlap,
            gpus_per_replica=gpus,
        )


def devices_of(spec: RLHFJobSpec, plan: DevicePlan) -> int:
    """Return the devices of a plan."""
    return job_devices(plan.applied(spec))


def manifest_with(document: Mapping[str, Any], job: RLHFJob, plan: DevicePlan) -> dict[str, Any]:
    """Return a manifest's data with a plan's fields, without `spec.devices` and contradicting fields of spec.training.

    `job` is the checked job.
    """
    data = plan.sizes(job.spec).written_into(document)
    data["spec"].pop("devices", None)
    return data


def refused_manifest(data: dict[str, Any]) -> list[Problem]:
    """Return why validation refuses a manifest's data; empty for a valid one."""
    try:
        manifest.parse_stored(data)
    except ManifestError as error:
        return list(error.problems)
    return []
