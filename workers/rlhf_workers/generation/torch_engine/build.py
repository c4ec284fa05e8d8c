"""Builds the torch engine of a job: `engineArgs`, the policy's folder, sampling and sizes.

Rule: an unknown argument is an error that names it.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.speculation.speculator_build import build_speculator
from rlhf_workers.generation.torch_engine.buckets import pass_widths
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward_choice import KernelMode
from rlhf_workers.models.loading import Attention, load_causal_lm
from rlhf_workers.models.precision import compute_dtype

ACTOR_FIELD: Final = f"{GENERATE.model.manifest_path}.path"
ATTENTIONS: Final[tuple[Attention, ...]] = ("eager", "sdpa")
COARSE: Final = "bfloat16"
"""Coarser type that generation may use if training recomputes log-probabilities; see `_arguments`."""
PASS_ARGUMENTS: Final = ("staticShapes", "fusedKernels")
"""Arguments for decode passes."""
MODES: Final[tuple[KernelMode, ...]] = ("Auto", "Enabled", "Disabled")
"""Values of these arguments; the first is the default outside deterministic jobs."""


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> TorchEngine:
    """Return the engine with the manifest's weights; WorkError when folder, arguments, sizes or drafters do not fit."""
    chosen = _arguments(spec)
    attention: Attention = chosen["attention"]
    dtype: torch.dtype = getattr(torch, chosen["dtype"])
    model = load_causal_lm(spec.models.actor.path, field=ACTOR_FIELD, dtype=dtype, device=device, attention=attention)
    static_shapes = _for_gpus(chosen["staticShapes"], device) != "Disabled"
    most_rows = spec.generation.max_batch_size * (spec.generation.speculation.max_tokens + 1)
    widths = pass_widths(most_rows, tiled=spec.deterministic, static=static_shapes)
    return TorchEngine(
        model,
        tokenizer,
        SamplingParameters.from_spec(spec),
        EngineLimits.from_spec(spec),
        deterministic=spec.deterministic,
        static_shapes=static_shapes,
        fused_kernels=_for_gpus(chosen["fusedKernels"], device),
        field=ACTOR_FIELD,
        speculator=build_speculator(spec, tokenizer, device, widths),
    )


def _for_gpus(mode: KernelMode, device: torch.device) -> KernelMode:
    """Return the mode for a device: on a CPU, `Auto` is Disabled."""
    return mode if device.type == "cuda" or mode == "Enabled" else "Disabled"


def _arguments(spec: RLHFJobSpec) -> dict[str, Any]:
    """Return the checked `engineArgs` with defaults. Raises WorkError for unknown arguments and invalid values.

    The dtype is the job's; a coarser one is allowed if the algorithm recomputes log-probabilities, and corrects the
    mismatch of tokens of older weights if there are any.
    """
    dtype, algorithm = str(compute_dtype(spec)).removeprefix("torch."), spec.algorithm.fields
    # Ratios of tokens that older weights drew use the engine's log-probabilities, unless a correction weighs them.
    against = not algorithm.recomputes_logprobs or (spec.rollout.may_be_stale and not algorithm.corrects_mismatch)
    dtypes = (dtype,) if against else tuple(dict.fromkeys((dtype, COARSE)))
    allowed: dict[str, Sequence[str]] = {"dtype": dtypes, "attention": ATTENTIONS}
    allowed.update(dict.fromkeys(PASS_ARGUMENTS, MODES))
    whys = {
        "dtype": f", because spec.training.precision {spec.training.precision} also applies to generation, unless the "
        f"algorithm's oldLogProbabilities is Trainer and mismatchCorrection covers the tokens of older weights"
    }
    if spec.deterministic:
        for name, only in (("attention", ("eager",)), *((name, ("Disabled",)) for name in PASS_ARGUMENTS)):
            allowed[name], whys[name] = only, " in a deterministic job"
    for name, value in spec.generation.engine_args.items():
        field = f"spec.generation.engineArgs.{name}"
        if name not in allowed:
            message = f"{field}: the torch engine has no such argument; it takes {', '.join(allowed)}"
            raise WorkError("EngineArgument", message, field=field, exit_code=ExitCode.USAGE)
        if value not in allowed[name]:
            message = f"{field}: {value!r} must be one of {', '.join(allowed[name])}{whys.get(name, '')}"
            raise WorkError("EngineArgument", message, field=field, exit_code=ExitCode.USAGE)
    defaults = {"dtype": dtype, "attention": "eager" if spec.deterministic else "sdpa"}
    return defaults | {name: allowed[name][0] for name in PASS_ARGUMENTS} | spec.generation.engine_args
