"""Every tensor of decoding and scoring is on the right device: the real code on a GPU without computation.

torch's fake tensors have shape, type and device, and refuse to mix devices like a GPU. Numbers that the host reads are
zeros.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.support.model_folders.models import build_config, build_tokenizer
from tests.support.workers.engine_driving import requests
from tests.support.workers.outbox import RecordedOutbox
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlhf_common import control_pb2 as pb
from rlhf_common.arrays import pack
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.devices.copy_stream import HostCopyStream
from rlhf_workers.devices.host_copies import CopyToHost
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.kv_staging import KvStaging
from rlhf_workers.generation.torch_engine import decode_costs, forward, fused_forward
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.inference import chunk_forward, model_scorer
from rlhf_workers.inference.incremental_scoring import IncrementalScoring
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, TokenScorer, ValueScorer
from rlhf_workers.models.loading import ValueModel

GPU = torch.device("cuda:0")
MODULES = (forward, fused_forward, model_scorer, chunk_forward)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the host read zeros, and compare values as equal."""
    for module in MODULES:
        monkeypatch.setattr(module, "float", lambda _: 0.0, raising=False)
        monkeypatch.setattr(module, "bool", lambda _: True, raising=False)
    monkeypatch.setattr(torch, "equal", lambda first, second: first.device == second.device == GPU)
    monkeypatch.setattr(decode_costs, "STEPS", 2)
    monkeypatch.setattr(KvStaging.__init__, "__defaults__", (HostCopyStream(), unpinned))  # no stream, no pinned memory
    monkeypatch.setattr(CopyToHost, "wait", lambda copy: made_up(copy._host))
    mode, from_numpy = FakeTensorMode(allow_non_fake_inputs=True), torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: mode.from_tensor(from_numpy(array)))
    with mode, torch.inference_mode():
        yield


def unpinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def made_up(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    assert isinstance(tensor, FakeTensor)
    assert tensor.device.type == "cpu", "numpy reads host memory only"
    return np.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))


def model_of(architecture: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa") -> Any:
    with GPU, torch.inference_mode(False):
        config = build_config(architecture, head_dim=16, num_hidden_layers=2 if architecture == "gemma2" else 1)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        ).requires_grad_(False)


def is_there(tensors: Any) -> bool:
    return all(tensor.device == GPU for pair in tensors.values() for tensor in pair)


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "arguments"),
    [
        ("llama", {"deterministic": False}),
        ("llama", {"deterministic": True}),
        ("gemma2", {"deterministic": False, "static_shapes": True}),
        ("qwen3", {"deterministic": False, "static_shapes": True, "fused_kernels": "Enabled"}),
    ],
)
def test_an_engine_decodes_moves_and_measures(architecture: str, arguments: dict[str, Any]) -> None:
    model = model_of(architecture, attention="sdpa" if architecture == "qwen3" else "eager")
    sampling = SamplingParameters(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(3,))
    engine = TorchEngine(model, build_tokenizer(), sampling, EngineLimits(20, 62, 8), **arguments)
    samples = requests(20, longest=62, response=5)
    engine.submit(samples[:3])
    for _ in range(4):  # a shape is captured at its second pass
        engine.step()
    engine.submit(samples[3:])
    engine.step()
    assert engine.kv_bytes()
    key = min(engine._state.in_flight)
    stop = engine.moves.cached(key)
    assert stop
    cache = engine.moves.export(key, 0, stop)
    assert all(part.device.type == "cpu" for layer in cache.layers for part in layer)
    request = engine.moves.carried(key)
    engine.withdraw([key])
    assert engine.moves.reserve()
    engine.moves.admit(replace(request, key=key._replace(attempt=1)), cache)
    engine.withdraw(sorted(engine._state.in_flight)[3:5])  # rows in the middle: the rest is gathered
    engine.step()
    pool, _ = engine._state.pools.row(engine._state.slot(key._replace(attempt=1)) or 0)
    assert is_there(pool.storage)
    host = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in model.named_parameters()}
    engine.load_weights(host, 3)
    while engine.in_flight:
        engine.step()
    assert decode_costs._decode_seconds(engine, 20, 30) > 0
    assert decode_costs._prefill_seconds(engine, 4, 70) > 0


def samples_to_score() -> list[ScoringSample]:
    random = np.random.default_rng(0)
    return [
        ScoringSample(
            key=SampleKey(0, number, 0),
            prompt=random.integers(3, 40, 5 + number).astype(np.int32),
            response=random.integers(3, 40, 100 + number).astype(np.int32),
            prompt_text="",
            response_text="",
            record="{}",
        )
        for number in range(3)
    ]


def scorer_of(kind: str, *, blocks: bool) -> TokenScorer:
    model = model_of("gemma2", torch.float32, "eager")
    if kind == "values":
        with GPU, torch.inference_mode(False):
            return ValueScorer(ValueModel(model.model, "model").requires_grad_(False), GPU, blocks=blocks)
    return LogProbabilityScorer(model, 0.7, GPU, blocks=blocks)


@pytest.mark.full
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("kind", ["values", "log-probabilities"])
def test_samples_are_scored_at_once_and_as_they_grow(kind: str, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(scores: list[torch.Tensor], subject: str, samples: list[ScoringSample]) -> list[torch.Tensor]:
        for score, sample in zip(scores, samples, strict=True):
            assert (score.device, score.dtype, len(score)) == (GPU, torch.float32, len(sample.response))
        return scores

    monkeypatch.setattr(model_scorer, "finite_each", numbers)
    scorer, samples = scorer_of(kind, blocks=blocks), samples_to_score()
    assert scorer.chunks is not None
    assert len(scorer.score(samples)) == len(samples)
    ahead, outbox = IncrementalScoring({"task": scorer}, 0 if blocks else 4096, 1 << 30), RecordedOutbox()
    for part in (70, 90):
        for sample in samples:
            tokens = [pack(values) for values in (sample.prompt, sample.response[:part])]
            key = pb.SampleKey(iteration=0, sample=sample.key.sample)
            ahead.ask(pb.PrefixSample(key=key, tasks=["task"], prompt=tokens[0], response=tokens[1]))
        while ahead.step(outbox, lambda task: True):
            pass
    begun = [ahead.take("task", sample) for sample in samples]
    prefixes = [prefix for prefix in begun if prefix is not None]
    assert len(prefixes) == len(samples)
    assert all(is_there(dict(enumerate(prefix.layers))) for prefix in prefixes)
    assert len(scorer.finish(samples, prefixes)) == len(samples)
    assert outbox.tokens
