"""Chooses the engine: the one that the manifest names or, for `engine: Auto`, torch or vLLM, with the reason.

Rule: equal workers of a job choose alike.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from rlhf_api.job import RLHFJobSpec

AUTO: Final = "Auto"
TORCH: Final = "torch"
VLLM: Final = "vllm"
NOT_INSTALLED: Final = "vLLM is not installed in this worker's image"
TORCH_ARGUMENTS: Final = frozenset({"dtype", "attention", "staticShapes", "fusedKernels"})
"""Arguments of the torch engine in `engineArgs`."""


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine with the reason."""

    engine: str
    """Name or module path."""
    reason: str
    """Reason in CamelCase, one of a fixed set; it is a label of a metric."""
    message: str

    @property
    def words(self) -> str:
        """Engine and message, for people."""
        return f"{self.engine}: {self.message}"


@dataclass(frozen=True)
class WorkerMeans:
    """A worker's device and vLLM support; the second is computed on demand."""

    device: str
    """Type of its device, such as cpu."""
    unsupported: Callable[[], str]
    """Returns why vLLM here cannot serve the policy; empty if it can."""


def choose_engine(spec: RLHFJobSpec, means: WorkerMeans) -> EngineChoice:
    """Return the engine that the manifest names or, for Auto, the suitable one."""
    generation = spec.generation
    if generation.engine != AUTO:
        return EngineChoice(generation.engine, "Named", "spec.generation.engine names it")
    if spec.rollout.environment is not None:
        return EngineChoice(
            TORCH, "Environment", "spec.rollout.environment writes tokens after which only torch continues"
        )
    foreign = [name for name in generation.engine_args if name not in TORCH_ARGUMENTS]
    if generation.parallelism.tensor > 1:
        return EngineChoice(VLLM, "TensorParallel", "spec.generation.parallelism.tensor splits the model over GPUs")
    if foreign:
        return EngineChoice(VLLM, "EngineArgs", f"spec.generation.engineArgs.{foreign[0]} is an argument of vLLM")
    if generation.engine_args:
        name = next(iter(generation.engine_args))
        return EngineChoice(TORCH, "EngineArgs", f"spec.generation.engineArgs.{name} is an argument of torch")
    if means.device == "cpu":
        return EngineChoice(TORCH, "NoGpu", "the worker has no GPU; spec.generation.engine: vllm decodes on CPU, too")
    if spec.deterministic:
        return EngineChoice(TORCH, "Deterministic", "spec.deterministic needs the same bits in every batch")
    why = means.unsupported()
    if why:
        return EngineChoice(TORCH, "NotServed", why)
    return EngineChoice(VLLM, "Served", "vLLM is installed and serves the model")


def unsupported_by_vllm(architectures: Collection[str]) -> str:
    """Return why vLLM in this image cannot serve a model of these architectures; empty if it can."""
    if not installed():
        return NOT_INSTALLED
    registry = import_module("vllm.model_executor.models.registry").ModelRegistry
    return unregistered(architectures, registry.get_supported_archs())


def installed() -> bool:
    """Return whether this worker's image has vLLM."""
    return find_spec("vllm") is not None


def unregistered(architectures: Collection[str], served: Collection[str]) -> str:
    """Return why none of a model's architectures is served; empty if one is."""
    if any(name in served for name in architectures):
        return ""
    return f"vLLM has no model {' or '.join(architectures) or 'for a config.json that names no architecture'}"
