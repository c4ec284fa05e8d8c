"""Builds the vLLM engine of a job: arguments, the policy's folder, sampling and sizes.

Importing this module does not import vLLM: `build_engine` imports the modules that do.
"""

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from rlhf_api.algorithms.graph import GENERATE
from rlhf_api.job import RLHFJobSpec
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.speculation.speculator_build import build_speculator
from rlhf_workers.generation.stopping import StopRule, stop_ids
from rlhf_workers.generation.vllm_engine.arguments import cpu_defaults, engine_arguments
from rlhf_workers.generation.vllm_engine.batch_invariance import require_batch_invariance
from rlhf_workers.generation.vllm_engine.expected_weights import ExpectedWeights
from rlhf_workers.generation.vllm_engine.failures import build_failure
from rlhf_workers.generation.vllm_engine.log_lines import reported_build
from rlhf_workers.generation.vllm_engine.vllm_draft_model import VllmDraftModel
from rlhf_workers.generation.vllm_engine.vllm_speculation import DRAFT_MODEL, speculation_arguments
from rlhf_workers.generation.vllm_engine.vllm_speculation import NAME as OWN_DRAFTER
from rlhf_workers.models.loading import checked_folder
from rlhf_workers.models.precision import compute_dtype

if TYPE_CHECKING:
    from rlhf_workers.generation.vllm_engine.engine import VllmEngine

log = logging.getLogger(__name__)

ACTOR_FIELD: Final = f"{GENERATE.model.manifest_path}.path"


def build_engine(spec: RLHFJobSpec, tokenizer: Any, device: torch.device) -> "VllmEngine":
    """Return the engine with the manifest's weights. Raises WorkError when folder, arguments, sizes or drafters do not
    fit, or when vLLM cannot be built.
    """
    if spec.deterministic:
        require_batch_invariance(device)
    from rlhf_workers.generation.vllm_engine.core import ARGUMENTS, VERSION, VllmCore, available_memory
    from rlhf_workers.generation.vllm_engine.engine import VllmEngine

    folder = str(checked_folder(spec.models.actor.path, ACTOR_FIELD))
    weights, limits = ExpectedWeights(folder), EngineLimits.from_spec(spec)
    parameters = SamplingParameters.from_spec(spec)
    weights.require_context(limits)
    user_arguments = dict(spec.generation.engine_args)
    drafter = {}
    if OWN_DRAFTER in user_arguments:
        drafter = speculation_arguments(user_arguments.pop(OWN_DRAFTER), device.type, spec.generation.speculation)
    arguments = engine_arguments(
        user_arguments,
        ARGUMENTS,
        folder,
        str(compute_dtype(spec)).removeprefix("torch."),
        limits,
        spec.generation.parallelism.tensor,
    )
    if device.type == "cpu":
        token_bytes = weights.cache_bytes_per_token(compute_dtype(spec))
        arguments = cpu_defaults(spec.generation.engine_args, token_bytes, limits, available_memory()) | arguments
    if device.type == "cuda":
        arguments = {"enable_sleep_mode": True} | arguments
    if drafter:
        arguments[OWN_DRAFTER] = drafter
    stop = StopRule(tokenizer, weights.vocabulary, stop_ids(weights, tokenizer, parameters), parameters.stop)
    try:
        with reported_build():
            core = VllmCore(arguments, parameters, moves=_caches_move(spec) and not drafter)
    except Exception as error:
        longest = limits.max_prompt_tokens + limits.max_response_tokens
        raise build_failure(error, spec.models.actor.path, longest) from error
    engine = VllmEngine(core, weights, stop, limits, facts=_facts(spec, weights, device, VERSION))
    if drafter:
        log.warning("vLLM drafts by %s: the drafters of spec.generation.speculation are not asked", drafter["method"])
        if drafter["method"] == DRAFT_MODEL:
            engine.vllm_draft_model = VllmDraftModel(core, ExpectedWeights(drafter["model"]))
    elif spec.generation.speculation.mode != "Disabled" and core.drafts.refusal:
        log.warning("samples of this model are decoded without drafts: %s", core.drafts.refusal)
    else:
        engine.draft_by(build_speculator(spec, tokenizer, device, core.drafts.widths))
    return engine


def _caches_move(spec: RLHFJobSpec) -> bool:
    """Return whether this job may move samples with their caches."""
    fusion = spec.fusion.inter_stage
    return fusion.mode != "Disabled" and fusion.transfer != "Tokens"


def _facts(spec: RLHFJobSpec, weights: ExpectedWeights, device: torch.device, version: str) -> dict[str, Any]:
    """Return what two workers must share beside sizes; in deterministic mode also what affects the last bits."""
    facts = {"model": weights.model_type, "vocabulary": weights.vocabulary, "deterministic": spec.deterministic}
    if spec.deterministic:
        cpu = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
        facts["bits"] = [device.type, spec.generation.parallelism.tensor, torch.get_num_threads(), cpu, version]
    return facts
