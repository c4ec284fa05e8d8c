"""Builds the torch engine of a job: `engineArgs`, the policy's folder, sampling and sizes.

Rule: every argument that the engine does not have is an error that names it; nothing is guessed.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models import Attention, load_causal_lm
from rlhf_workers.precision import compute_dtype

ACTOR_FIELD: Final = f"{GENERATE.model.manifest_path}.path"
ATTENTIONS: Final[tuple[Attention, ...]] = ("eager", "sdpa")


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> TorchEngine:
    """Return the engine with the manifest's weights; WorkError when folder, arguments or sizes do not fit."""
    attention, dtype = _attention(spec), compute_dtype(spec)
    model = load_causal_lm(spec.models.actor.path, field=ACTOR_FIELD, dtype=dtype, device=device, attention=attention)
    return TorchEngine(
        model,
        tokenizer,
        SamplingParameters.of(spec),
        EngineLimits.of(spec),
        deterministic=spec.deterministic,
        field=ACTOR_FIELD,
    )


def _attention(spec: RLHFJobSpec) -> Attention:
    """The attention that `engineArgs` ask for: by default the fused kernel, unless results must be reproducible.

    WorkError for arguments this engine does not have, and for a dtype that is not that of the whole job.
    """
    dtype = str(compute_dtype(spec)).removeprefix("torch.")
    allowed: dict[str, Sequence[str]] = {"dtype": (dtype,), "attention": ATTENTIONS}
    whys = {"dtype": f", as spec.training.precision is {spec.training.precision}, which holds for generation, too"}
    if spec.deterministic:
        allowed["attention"], whys["attention"] = ("eager",), " in a deterministic job"
    for name, value in spec.generation.engine_args.items():
        field = f"spec.generation.engineArgs.{name}"
        if name not in allowed:
            message = f"{field}: the torch engine has no such argument; it takes {', '.join(allowed)}"
            raise WorkError("EngineArgument", message, field=field, exit_code=ExitCode.USAGE)
        if value not in allowed[name]:
            message = f"{field}: {value!r} must be one of {', '.join(allowed[name])}{whys.get(name, '')}"
            raise WorkError("EngineArgument", message, field=field, exit_code=ExitCode.USAGE)
    chosen: Attention = spec.generation.engine_args.get("attention", "eager" if spec.deterministic else "sdpa")
    return chosen
