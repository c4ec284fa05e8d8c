"""The sizes of a job's groups as a part of its manifest: how they are written into it, and how many devices they use.

Must never decide a size.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field

from rlhf_api.api_model import ApiModel
from rlhf_api.job import RLHFJob, RLHFJobSpec
from rlhf_api.job.devices import SIZE_GROUPS, SizeGroup
from rlhf_api.job.groups import TensorParallelism, TrainingParallelism
from rlhf_api.protocol import read_job
from rlhf_api.rules.table import LAYOUT

GENERATION_DECIDES: Final = ("gpusPerReplica", "cpuThreads", "template", "ranksPerPod")
"""Fields of spec.training that generation workers decide with placement Colocated."""


class GenerationSizes(ApiModel):
    """Sizes in spec.generation."""

    replicas: int
    max_batch_size: int
    parallelism: TensorParallelism
    gpus_per_replica: int = 0


class InferenceSizes(ApiModel):
    """Sizes in spec.inference."""

    replicas: int


class TrainingSizes(ApiModel):
    """Layout and modes in spec.training."""

    parallelism: TrainingParallelism
    micro_batch_size: int
    activation_checkpointing: bool
    critic_overlap: Literal["Disabled", "Enabled", "Auto"]
    gpus_per_replica: int = 0


class JobSizes(ApiModel):
    """Sizes of a job; None for those that are not part of a plan."""

    placement: Literal["Dedicated", "Colocated"] | None = None
    generation: GenerationSizes | None = None
    inference: InferenceSizes | None = None
    training: TrainingSizes | None = None

    def without(self, fixed: frozenset[SizeGroup]) -> Self:
        """Return the sizes without the fixed ones."""
        return self.model_copy(update={group.lower(): None for group in fixed})

    def written_into(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a manifest with these sizes.

        Fields of spec.training that do not fit them, or that generation workers decide, are removed.
        """
        data: dict[str, Any] = copy.deepcopy(dict(document))
        spec = data["spec"]
        if self.placement is not None:
            spec["placement"] = self.placement
        if self.generation is not None:
            sizes = _data(self.generation)
            generation = _part(spec, "generation")
            _part(generation, "parallelism")["tensor"] = sizes.pop("parallelism").get("tensor", 1)
            generation |= sizes
        if self.inference is not None:
            _part(spec, "inference")["replicas"] = self.inference.replicas
        training = _part(spec, "training")
        if self.training is not None:
            training |= _data(self.training)
            if self.training.parallelism.ranks % int(training.get("ranksPerPod") or 1):
                training.pop("ranksPerPod", None)
        if self.placement == "Colocated":
            for name in GENERATION_DECIDES:
                training.pop(name, None)
        return data


FigureOrigin = Literal["measured", "learned", "assumed"]
"""Origin of a predicted figure: a profile of the job's devices, earlier iterations, or public hardware figures."""


STAGES: Final = ("generate", "score", "train", "publish", "switch")
"""Stages of a predicted iteration, in their order."""


class PlannedStage(ApiModel):
    """Prediction for one stage of an iteration."""

    seconds: Annotated[float, Field(ge=0)]
    """Predicted seconds of the stage in an iteration."""
    source: FigureOrigin
    """Origin of the weakest figure in it."""


class DevicePlanRecord(ApiModel):
    """A plan for `spec.devices` in the form in which it is recorded."""

    request: Annotated[str, Field(max_length=64)]
    """Request that the plan answers, as `plan_request` returns it."""
    summary: Annotated[str, Field(max_length=1024)]
    """Sizes in words."""
    predicted_seconds: Annotated[float, Field(ge=0)]
    """Predicted seconds of one iteration."""
    sizes: JobSizes
    stages: Annotated[dict[Annotated[str, Field(max_length=32)], PlannedStage], Field(max_length=8)] = Field(
        default_factory=dict
    )
    """Stage -> prediction; stages that overlap add up to more than an iteration. Empty in older records."""
    since: Annotated[int, Field(ge=0, le=2**53)] = 0
    """First iteration with the plan."""

    @property
    def fixed(self) -> list[SizeGroup]:
        """Groups of sizes that the plan leaves as the manifest has them."""
        return [group for group in SIZE_GROUPS if getattr(self.sizes, group.lower()) is None]

    @property
    def origins(self) -> str:
        """Origins of the predictions in words, such as `generate l, train m; m: measured, l: learned`."""
        shown = {name: stage for name, stage in sorted(self.stages.items(), key=_order) if stage.seconds}
        each = ", ".join(f"{name} {stage.source[0]}" for name, stage in shown.items())
        used = {stage.source for stage in shown.values()}
        legend = ", ".join(f"{origin[0]}: {origin}" for origin in get_args(FigureOrigin) if origin in used)
        return f"{each}; {legend}" if each else "origin unknown"

    @property
    def words(self) -> str:
        """The plan in words, with its prediction and the origin of its figures."""
        return f"{self.summary}; {self.predicted_seconds:.3g} s per iteration predicted ({self.origins})"


def _order(item: tuple[str, PlannedStage]) -> tuple[int, str]:
    """Return the sort key of a stage: its place in an iteration, then its name."""
    name = item[0]
    return (STAGES.index(name) if name in STAGES else len(STAGES)), name


def _data(sizes: ApiModel) -> dict[str, Any]:
    """Return sizes as data, without gpusPerReplica 0 and without fields of the layout that have their defaults."""
    data: dict[str, Any] = sizes.model_dump(mode="json", by_alias=True, exclude_none=True)
    parallelism: ApiModel | None = getattr(sizes, "parallelism", None)
    if parallelism is not None:
        data["parallelism"] = parallelism.model_dump(
            mode="json", by_alias=True, exclude_defaults=True, exclude_none=True
        )
    if not data.get("gpusPerReplica"):
        data.pop("gpusPerReplica", None)
    return data


def _part(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a block of a manifest; add an empty one if it is absent or null."""
    if data.get(name) is None:
        data[name] = {}
    part: dict[str, Any] = data[name]
    return part


def planned_document(document: Mapping[str, Any], sizes: JobSizes) -> dict[str, Any]:
    """Return the data of a manifest with `spec.devices`, with these sizes, and with all sizes marked as fixed."""
    data = sizes.written_into(document)
    data["spec"]["devices"] = {**data["spec"]["devices"], "fixed": list(SIZE_GROUPS)}
    return data


def asking_job(job: RLHFJob, plan: DevicePlanRecord) -> RLHFJob:
    """Return a job with a plan's sizes as the job that asks for another plan: the same sizes are chosen again."""
    assert job.spec.devices is not None, "the job has a plan"
    devices = job.spec.devices.model_copy(update={"fixed": plan.fixed})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"devices": devices})})


def planned_job(job: RLHFJob, sizes: JobSizes) -> RLHFJob:
    """Return a resolved job with `spec.devices`, with these sizes, and with all sizes marked as fixed."""
    # With nulls, because a null that disables a feature must not become its default again.
    return read_job(planned_document(job.model_dump(mode="json", by_alias=True, exclude={"status"}), sizes))


def plan_request(spec: RLHFJobSpec) -> str:
    """Return a digest of the fields that a plan answers: `spec.devices` and the layout of training."""
    # Default values are omitted, so that a new field changes no digest.
    data = spec.model_dump(mode="json", by_alias=True, include={"devices", "training"}, exclude_defaults=True)
    data.get("devices", {}).pop("replan", None)  # it changes no size
    training = data.get("training", {})
    layout = {path: training.get(path.rpartition(".")[2]) for path in LAYOUT if path.startswith("spec.training.")}
    said = {path: value for path, value in layout.items() if value is not None}
    return hashlib.sha256(json.dumps([data.get("devices"), said], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class DeviceUse:
    """Devices of one process of each group."""

    generation: int
    inference: int
    """Devices of an inference worker; 0 if it needs none of those that are counted, such as a CPU worker beside GPUs.
    """
    training: int


def device_use(spec: RLHFJobSpec, tensor: int) -> DeviceUse:
    """Return the devices of one process of each group: GPUs, or processes if generation workers have no GPUs."""
    if spec.generation.gpus_per_replica:
        return DeviceUse(generation_gpus(spec, tensor), spec.inference.gpus_per_replica, max(1, training_gpus(spec)))
    return DeviceUse(tensor, 1, 1)


def generation_gpus(spec: RLHFJobSpec, tensor: int) -> int:
    """Return the GPUs of a generation worker of this tensor size."""
    own = spec.generation
    return own.gpus_per_replica if not own.gpus_per_replica or tensor == own.parallelism.tensor else tensor


def training_gpus(spec: RLHFJobSpec) -> int:
    """Return the GPUs of a dedicated training rank. For a Colocated job: 1 if generation workers have GPUs, else 0."""
    if spec.placement == "Colocated":
        return min(1, spec.generation.gpus_per_replica)
    return spec.training.gpus_per_replica


def job_devices(spec: RLHFJobSpec) -> int:
    """Return the devices of a job whose sizes are set."""
    use = device_use(spec, spec.generation.parallelism.tensor)
    count = spec.generation.replicas * use.generation + spec.inference.replicas * use.inference
    return count + (spec.training.ranks * use.training if spec.placement == "Dedicated" else 0)
