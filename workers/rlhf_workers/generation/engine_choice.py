"""Which engine decodes where the manifest leaves it open (`engine: Auto`): vLLM where it is there and serves the job.

Rule: a function of the manifest, the worker's device and image, and the model's folder, never of what other workers
chose, so workers of one image on one kind of device choose alike. Where images are mixed the choices may differ and the
samples are right all the same: both engines draw a token by the sample's key alone, and samples move between them by
their tokens. vLLM is chosen on GPUs only: on CPU, and for results that must be the same to the last bit, torch stays.
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
"""Of `engineArgs`: those of the torch engine."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine, and why it is this one."""

    engine: str
    """Name or module path."""
    reason: str
    """CamelCase, one of few: a label of a metric."""
    message: str

    @property
    def words(self) -> str:
        """Return both, as the job's status shows them."""
        return f"{self.engine}: {self.message}"


@dataclass(frozen=True)
class WorkerMeans:
    """What a worker has; the second is asked only when it matters."""

    device: str
    """Type of its device, such as cpu."""
    unsupported: Callable[[], str]
    """Why vLLM here cannot serve the policy; empty: it can."""


def choose_engine(spec: RLHFJobSpec, means: WorkerMeans) -> EngineChoice:
    """Return what the manifest names or, where it says Auto, what suits."""
    generation = spec.generation
    if generation.engine != AUTO:
        return EngineChoice(generation.engine, "Named", "spec.generation.engine names it")
    if spec.rollout.environment is not None:
        return EngineChoice(TORCH, "Environment", "spec.rollout.environment writes tokens that torch goes on after")
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
    """Return why vLLM in this image cannot serve a model whose config.json names these; empty: it can."""
    if not installed():
        return NOT_INSTALLED
    registry = import_module("vllm.model_executor.models.registry").ModelRegistry
    return unregistered(architectures, registry.get_supported_archs())


def installed() -> bool:
    """Return whether this worker's image has vLLM."""
    return find_spec("vllm") is not None


def unregistered(architectures: Collection[str], served: Collection[str]) -> str:
    """Return why none of a model's architectures is served; empty: one is."""
    if any(name in served for name in architectures):
        return ""
    return f"vLLM has no model {' or '.join(architectures) or 'for a config.json that names no architecture'}"
