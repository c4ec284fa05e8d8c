"""Decode passes with few shapes give the same tokens as dynamic passes, for any events of samples.

The CPU runs the same passes without a graph: a replay is another call.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.model_folders.models import ARCHITECTURES, write_policy
from tests.support.workers.engine_driving import MakeEngine, disturb, finish, requests, resumed, same_tokens

from rlhf_common.samples import ResponsePart
from rlhf_workers.generation.torch_engine.buckets import length_bucket, width_bucket
from rlhf_workers.generation.torch_engine.capture import Captured, CaptureError, Run
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward_choice import KernelMode
from rlhf_workers.generation.torch_engine.fused_forward import FAMILIES
from rlhf_workers.generation.torch_engine.static_decoder import MAX_GRAPHS, StaticDecoder
from rlhf_workers.models.loading import load_causal_lm, replace_weights

LENIENT = settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}])
@pytest.mark.parametrize(
    ("architecture", "fused"),
    [*((name, "Disabled") for name in ARCHITECTURES), *((name, "Enabled") for name in FAMILIES)],
)
def test_tokens_equal_those_of_plain_passes(
    architecture: str, fused: KernelMode, sampling: dict[str, Any], make_engine: MakeEngine
) -> None:
    samples = [replace(sample, max_response_tokens=5 + 3 * sample.key.sample) for sample in requests(20, longest=48)]
    engine = make_engine(architecture, static_shapes=True, fused_kernels=fused, slots=9, **sampling)
    same_tokens(finish(engine, samples), finish(make_engine(architecture, slots=9, **sampling), samples))
    figures = engine.graphs
    assert figures is not None
    assert 0 < figures.captures <= MAX_GRAPHS
    assert figures.replayed > figures.passes / 2, "shapes come back"
    assert make_engine(architecture).graphs is None


def churned(make: Callable[[], TorchEngine], seed: int) -> dict[int, ResponsePart]:
    """Run samples that join, leave, pause, and move with and without their caches between two engines."""
    moves = random.Random(seed)
    samples = requests(10, seed=seed, response=30)
    engines = [make(), make()]
    by_number = {sample.key.sample: sample for sample in samples}
    waiting, done = list(samples), dict[int, ResponsePart]()
    while waiting or any(engine.in_flight for engine in engines):
        if waiting and moves.random() < 0.5:
            moves.choice(engines).submit([waiting.pop()])
        for engine, other in (engines, engines[::-1]):
            done |= {response.key.sample: response for response in engine.step().finished}
            keys = sorted(engine._state.in_flight)
            if keys and moves.random() <= 0.2:
                disturb(engine, other, moves, by_number, done)
    return done


@LENIENT
@given(seed=st.integers(0, 2**32 - 1), fused=st.sampled_from(["Disabled", "Enabled"]))
def test_tokens_hold_while_samples_come_and_go(make_engine: MakeEngine, seed: int, fused: KernelMode) -> None:
    moved = churned(lambda: make_engine("qwen3", static_shapes=True, fused_kernels=fused), seed)
    same_tokens(moved, finish(make_engine("qwen3"), requests(10, seed=seed, response=30)))


def test_weights_are_replaced_in_place(policy: Callable[[str], Path], tmp_path: Path) -> None:
    """Captured graphs contain the addresses of the weights."""
    model = load_causal_lm(
        str(policy("qwen2")), field="model", dtype=torch.float32, device=torch.device("cpu"), attention="sdpa"
    )
    other = load_causal_lm(
        str(write_policy(tmp_path, "qwen2", seed=5)),
        field="model",
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention="sdpa",
    )
    before = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    replace_weights(model, dict(other.named_parameters()), subject="actor version 2")
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == before
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("fused", ["Disabled", "Enabled"])
def test_new_weights_and_sleep_in_the_middle_change_what_they_should(
    fused: KernelMode, load: Callable[[str], tuple[Any, Any]], make_engine: MakeEngine
) -> None:
    model = load("llama")[0]
    first = {name: tensor.clone() for name, tensor in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    second = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in first.items()}
    samples = requests(6, response=30)

    def run(static_shapes: bool) -> dict[int, ResponsePart]:
        engine = make_engine(static_shapes=static_shapes, fused_kernels=fused)
        engine.submit(samples)
        for _ in range(8):
            engine.step()
        engine.load_weights(second, 1)
        for _ in range(8):
            engine.step()
        withdrawn = engine.withdraw()
        engine.sleep()
        assert engine.graph_bytes() == 0
        engine.wake()
        numbered = {sample.key.sample: sample for sample in samples}
        return finish(engine, [resumed(numbered[part.key.sample], part) for part in withdrawn])

    try:
        plain = run(False)
        replace_weights(model, first, subject="the first version")
        same_tokens(run(True), plain)
    finally:
        replace_weights(model, first, subject="the first version")
    assert any(len(response.versions) == 2 for response in plain.values())


class FailingCapture:
    """A device that captures only so many graphs."""

    def __init__(self, good: int) -> None:
        self.good = good

    def capture(self, function: Run) -> Captured:
        if not self.good:
            raise CaptureError("operation not permitted when stream is capturing")
        self.good -= 1
        return Captured(function, 100)

    def clear(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("good", [0, 2])
def test_a_failed_capture_is_said_and_decoding_goes_on(
    good: int, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    samples = requests(6)
    engine = make_engine(static_shapes=True)
    decoder = StaticDecoder(engine._forward, engine.parameters, 8, FailingCapture(good))
    engine._decoder = engine._graphs = decoder
    engine._decoding = engine._decoding_by(engine._stop, None)
    same_tokens(finish(engine, samples), finish(make_engine(), samples))
    assert (decoder.figures.captures, decoder.figures.failures) == (good, 1)
    assert caplog.text.count("cannot be captured: operation not permitted") == 1
    assert decoder.bytes() >= 100 * good


def test_the_pool_keeps_its_storage_between_iterations(make_engine: MakeEngine) -> None:
    engine = make_engine(static_shapes=True)
    finish(engine, requests(6))
    pool = engine._state.pools._samples.pool  # type: ignore[attr-defined]
    finish(engine, requests(6, seed=1))
    assert engine._state.pools._samples.pool is pool  # type: ignore[attr-defined]
    captures = engine.graphs.captures if engine.graphs else 0
    finish(engine, requests(6))
    assert engine.graphs is not None
    assert engine.graphs.captures - captures < captures, "most shapes were captured already"
    assert engine.graph_bytes() > 0


@given(rows=st.integers(1, 600), length=st.integers(1, 9000), spare=st.integers(0, 9000))
def test_buckets_hold_what_they_are_for_and_little_more(rows: int, length: int, spare: int) -> None:
    width, capacity = width_bucket(rows), length + spare
    keys = length_bucket(length, capacity)
    assert rows <= width < max(2 * rows, rows + 16)
    assert width <= -(-rows // 16) * 16, "a pool has as many rows"
    assert length <= keys <= capacity
    assert keys <= max(64, 1.25 * length + 16)
    assert length_bucket(keys, capacity) == keys
    assert width_bucket(width) == width
