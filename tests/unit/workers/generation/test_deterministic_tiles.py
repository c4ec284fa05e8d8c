"""Deterministic mode detects irreproducible kernels of this machine, and rejects or avoids their shapes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import MakeEngine

from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.torch_engine.buckets import TILE_ROWS
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.kv_cache import KvPool
from rlhf_workers.generation.torch_engine.tiles import Tiles
from rlhf_workers.models.loading import load_causal_lm


class Neighbourly(CausalForward):
    """A forward pass whose rows depend on their position, like the tail of an elementwise kernel."""

    def decode(
        self, pool: KvPool, first: int, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        logits = super().decode(pool, first, tokens, positions, length)
        logits[-1] += 1e-6
        return logits


class Wide(CausalForward):
    """A forward pass that sums in another order beyond 32 rows or 2 prompts."""

    def decode(
        self, pool: KvPool, first: int, tokens: torch.Tensor, positions: torch.Tensor, length: int
    ) -> torch.Tensor:
        logits = super().decode(pool, first, tokens, positions, length)
        return logits + 1e-6 if len(tokens) > 2 * TILE_ROWS else logits

    def prefill(self, tokens: torch.Tensor) -> Any:
        cache = super().prefill(tokens)
        if len(tokens) > 2:
            cache.states = {layer: (keys + 1e-6, values) for layer, (keys, values) in cache.states.items()}
        return cache


@pytest.fixture
def model(load: Any) -> Any:
    return load("llama")[0]


def test_a_machine_whose_rows_depend_on_their_place_is_refused(model: Any) -> None:
    with pytest.raises(WorkError, match="a sample's results depend on the rest of its batch") as raised:
        Tiles(Neighbourly(model, "model")).require()
    assert raised.value.failure.field == "spec.deterministic"


def test_numbers_in_which_a_trial_shows_nothing_are_refused(model: Any) -> None:
    with pytest.raises(WorkError, match=r"set spec\.training\.precision to Float32") as raised:
        Tiles(CausalForward(copy.deepcopy(model).to(torch.bfloat16), "model")).require()
    assert raised.value.failure.reason == "NotReproducible"


def test_only_proven_widths_are_used(model: Any) -> None:
    proven = Tiles(Wide(model, "model"))
    assert list(proven.widths(70, 64)) == [(0, 32), (32, 32), (64, 16)]
    assert proven.prompts(7, 16) == 2
    assert list(Tiles(CausalForward(model, "model")).widths(17, 64)) == [(0, 32)]
    assert list(proven.widths(0, 64)) == []


def test_layers_of_odd_size_are_refused_or_harmless(tmp_path: Path) -> None:
    """An elementwise kernel computes the last elements of 16 x 129 with other instructions, so rows would differ."""
    folder = write_policy(tmp_path / "odd", intermediate_size=129)
    model = load_causal_lm(
        str(folder), field="model", dtype=torch.float32, device=torch.device("cpu"), attention="eager"
    )
    values = torch.randn(16, 129, generator=torch.Generator().manual_seed(0))
    tail_differs = not torch.equal(
        torch.nn.functional.silu(values.roll(1, 0)).roll(-1, 0), torch.nn.functional.silu(values)
    )
    if tail_differs:
        with pytest.raises(WorkError, match="layer sizes must be multiples of 32"):
            Tiles(CausalForward(model, "model")).require()
    else:
        Tiles(CausalForward(model, "model")).require()


def test_a_model_whose_experts_take_all_their_rows_at_once_is_refused(load: Any, policy: Any) -> None:
    """The number of rows of an expert, and so its matrix kernel, depends on the other rows."""
    folder, device = str(policy("mixtral")), torch.device("cpu")
    model = load_causal_lm(folder, field="model", dtype=torch.float32, device=device, attention="sdpa")
    model.set_attn_implementation("eager")
    limits = EngineLimits(4, 48, 48)
    TorchEngine(model, load("llama")[1], SamplingParameters(), limits, deterministic=False)
    with pytest.raises(WorkError, match=r"not those of this mixtral model: set it to false") as raised:
        TorchEngine(model, load("llama")[1], SamplingParameters(), limits, deterministic=True)
    assert raised.value.failure.field == "spec.deterministic"


def test_experts_of_another_kind_are_refused(tmp_path: Path) -> None:
    """GPT-OSS has biases and another gate: the code for Mixtral's experts would compute other numbers."""
    with torch.random.fork_rng(devices=[]):
        config = transformers.GptOssConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
            max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    device = torch.device("cpu")
    model = load_causal_lm(str(tmp_path), field="model", dtype=torch.float32, device=device, attention="eager")
    with pytest.raises(WorkError, match="not those of this gpt_oss model"):
        Tiles(CausalForward(model, "model")).require()


def test_fast_mode_tries_nothing(make_engine: MakeEngine) -> None:
    assert make_engine()._tiles is None
