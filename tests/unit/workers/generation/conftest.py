"""Engines over tiny models, built once per session; one thread by default."""

import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import MakeEngine

from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.drafting import ProposesDrafts
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward_choice import KernelMode
from rlhf_workers.models.loading import Attention, load_causal_lm, load_tokenizer


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_before_is_walked() -> Iterator[None]:
    """Keep earlier objects out of the garbage collections of vLLM.

    An engine of vLLM that is closed collects garbage seven times, and first unfreezes all objects: libraries,
    collected tests and survivors of earlier tests, which take most of its time.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Results may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of the tiny model of an architecture."""
    return cache(lambda architecture: write_policy(tmp_path_factory.mktemp(architecture) / "policy", architecture))


@pytest.fixture(scope="session")
def load(policy: Callable[[str], Path]) -> Callable[..., tuple[Any, Any]]:
    """Return (model, tokenizer) of an architecture, with eager attention by default."""

    @cache
    def _load(architecture: str, attention: Attention, dtype: torch.dtype) -> tuple[Any, Any]:
        folder, device = str(policy(architecture)), torch.device("cpu")
        model = load_causal_lm(folder, field="model", dtype=dtype, device=device, attention=attention)
        return model, load_tokenizer(folder, "model")

    return lambda architecture, attention="eager", dtype=torch.float32: _load(architecture, attention, dtype)


@pytest.fixture
def make_engine(load: Callable[..., tuple[Any, Any]]) -> MakeEngine:
    """Return a function that builds an engine: make_engine("llama", deterministic=True, slots=4, temperature=0)."""

    def make(
        architecture: str = "llama",
        *,
        attention: Attention = "eager",
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        static_shapes: bool = False,
        fused_kernels: KernelMode = "Disabled",
        slots: int = 8,
        prompt_tokens: int = 48,
        response_tokens: int = 96,
        version: int = 0,
        speculator: ProposesDrafts | None = None,
        **sampling: Any,
    ) -> TorchEngine:
        model, tokenizer = load(architecture, attention, dtype)
        return TorchEngine(
            model,
            tokenizer,
            SamplingParameters(**sampling),
            EngineLimits(slots, prompt_tokens, response_tokens),
            deterministic=deterministic,
            static_shapes=static_shapes,
            fused_kernels=fused_kernels,
            version=version,
            speculator=speculator,
        )

    return make
