"""The torch engine with generated models.

Owns the shared code of the decoding steps. No token ends a response here, so all samples decode the same number of
tokens.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tests.gpu.models import write_model
from tests.gpu.timing import name_of
from tests.support.workers.engine_driving import finish
from transformers import LlamaConfig

from gpu_check.plugin import CheckedMachine
from rlhf_common.samples import SampleKey, SampleRequest, ScoringSample
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_causal_lm

WAYS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"static_shapes": False},
    "captured": {"static_shapes": True},
    "fused": {"static_shapes": True, "fused_kernels": "Enabled"},
}
"""Ways of decoding: `plain` and `captured` passes of the model's own kernels, and captured passes of `fused` ones."""


class EndlessText:
    """A tokenizer without a token that ends a response."""

    eos_token_id = None


def load(machine: CheckedMachine, config: LlamaConfig, dtype: torch.dtype) -> Any:
    """Write a model and return it loaded."""
    folder = machine.scratch / name_of(dtype)
    write_model(folder, config, dtype, machine.device)
    return load_written(folder, dtype, machine.device)


def load_written(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model of a folder, loaded as in a job."""
    model = load_causal_lm(str(folder), field="model", dtype=dtype, device=device, attention="sdpa")
    model.generation_config.eos_token_id = None  # every sample decodes the same number of tokens
    return model


def engine_of(
    model: Any, rows: int, prompt: int, tokens: int, *, greedy: bool = False, deterministic: bool = False, **way: Any
) -> TorchEngine:
    """Return an engine over a loaded model; `way`: one of WAYS, or the engine's default."""
    sampling, limits = SamplingParameters(temperature=0 if greedy else 1), EngineLimits(rows, prompt, tokens)
    return TorchEngine(model, EndlessText(), sampling, limits, deterministic=deterministic, **way)


def requests(count: int, prompt: int, tokens: int, vocabulary: int, shortest: int | None = None) -> list[SampleRequest]:
    """Return samples with random prompts of one length, or of `shortest` tokens to that length."""
    random = np.random.default_rng(0)
    lengths = random.integers(prompt if shortest is None else shortest, prompt + 1, count)
    prompts = [random.integers(1, vocabulary, length).astype(np.int32) for length in lengths]
    return [SampleRequest(SampleKey(0, index, 0), words, index + 1, tokens) for index, words in enumerate(prompts)]


def to_score(prompt: int, responses: Iterable[int], vocabulary: int) -> list[ScoringSample]:
    """Return samples with random prompts of one length, and responses of these lengths."""
    random = np.random.default_rng(0)
    return [
        ScoringSample(
            key=SampleKey(0, index, 0),
            prompt=random.integers(1, vocabulary, prompt).astype(np.int32),
            response=random.integers(1, vocabulary, response).astype(np.int32),
            prompt_text="",
            response_text="",
            record="{}",
        )
        for index, response in enumerate(responses)
    ]


def decoded(engine: TorchEngine, samples: list[SampleRequest]) -> dict[int, list[int]]:
    """Return the tokens by sample."""
    return {number: response.tokens.tolist() for number, response in finish(engine, samples).items()}
