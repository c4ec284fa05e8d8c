"""Engines over tiny models, built once a session; one thread unless a test says otherwise."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.engine_driving import MakeEngine
from tests.support.models import write_policy

from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models import load_causal_lm, load_tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Results may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model of an architecture."""
    return cache(lambda architecture: write_policy(tmp_path_factory.mktemp(architecture) / "policy", architecture))


@pytest.fixture(scope="session")
def load(policy: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """(model, tokenizer) of an architecture, attention written out."""

    @cache
    def _load(architecture: str) -> tuple[Any, Any]:
        folder, device = str(policy(architecture)), torch.device("cpu")
        model = load_causal_lm(folder, field="model", dtype=torch.float32, device=device, attention="eager")
        return model, load_tokenizer(folder, "model")

    return _load


@pytest.fixture
def make_engine(load: Callable[[str], tuple[Any, Any]]) -> MakeEngine:
    """Builds an engine: make_engine("llama", deterministic=True, slots=4, temperature=0)."""

    def make(
        architecture: str = "llama",
        *,
        deterministic: bool = False,
        slots: int = 8,
        prompt_tokens: int = 48,
        response_tokens: int = 96,
        version: int = 0,
        **sampling: Any,
    ) -> TorchEngine:
        model, tokenizer = load(architecture)
        return TorchEngine(
            model,
            tokenizer,
            SamplingParameters(**sampling),
            EngineLimits(slots, prompt_tokens, response_tokens),
            deterministic=deterministic,
            version=version,
        )

    return make
