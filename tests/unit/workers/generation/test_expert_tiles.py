"""Experts tile by tile: a row's bits do not depend on other rows, and its values are transformers'."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_bits

from rlhf_workers.models.experts import EXPERT_ROWS, TILED, WHOLE

FAMILIES = ("mixtral", "qwen3_moe")
HIDDEN = 32


@pytest.fixture(params=FAMILIES)
def layer(request: pytest.FixtureRequest, load: Any) -> Iterator[Any]:
    """Return router and experts of a first layer, tile by tile."""
    block = load(request.param)[0].model.layers[0].mlp
    yield block
    block.experts.config._experts_implementation = TILED


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("threads", [1, 2])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_neighbours(layer: Any, threads: int) -> None:
    """Alone in its experts, among as many as fill a tile, and with all others in one expert."""
    torch.set_num_threads(threads)
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(1, EXPERT_ROWS, HIDDEN, generator=random)
    wanted = layer(rows)
    for others in (1, 15, 16, 48, 200):
        for neighbour in (torch.randn(others, HIDDEN, generator=random), rows[0, :1].expand(others, HIDDEN)):
            every = torch.cat([rows[0], neighbour])
            order = torch.randperm(len(every), generator=random)
            _, weights, choices = layer.gate(rows[0])
            _, their_weights, their_choices = layer.gate(neighbour)
            found = layer.experts(
                every[order], torch.cat([choices, their_choices])[order], torch.cat([weights, their_weights])[order]
            )
            assert torch.equal(found[order.argsort()][:EXPERT_ROWS], wanted[0]), (others, threads)


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("way", [TILED, WHOLE])
@torch.inference_mode()
def test_they_compute_what_transformers_computes(layer: Any, way: str) -> None:
    rows = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(1))
    layer.experts.config._experts_implementation = "eager"
    wanted = layer(rows)
    layer.experts.config._experts_implementation = way
    assert torch.allclose(layer(rows), wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_no_rows_at_all_are_none(layer: Any) -> None:
    assert layer(torch.empty(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)


def test_gradients_are_those_of_transformers(layer: Any) -> None:
    rows = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
    parameters, found = list(layer.parameters()), {}
    for way in ("eager", TILED, WHOLE):
        layer.experts.config._experts_implementation = way
        inputs = rows.clone().requires_grad_()
        for parameter in parameters:
            parameter.requires_grad_()
        found[way] = torch.autograd.grad(layer(inputs).square().sum(), [inputs, *parameters])
        for parameter in parameters:
            parameter.requires_grad_(False)
    for way in (TILED, WHOLE):
        for ours, theirs in zip(found[way], found["eager"], strict=True):
            assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_sample_has_the_bits_that_it_has_alone(family: str, threads: int, make_engine: MakeEngine) -> None:
    torch.set_num_threads(threads)
    samples = requests(20, seed=4, response=50)
    together = finish(make_engine(family, deterministic=True, slots=20), samples)
    few = make_engine(family, deterministic=True, slots=3)
    for sample in samples[::4]:
        assert same_bits(finish(few, [sample])[sample.key.sample], together[sample.key.sample])
