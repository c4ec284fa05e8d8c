"""What the engine promises its role: no sample lost, none taken half, progress once, weights whole or not at all."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.engine_driving import MakeEngine, finish, requests

from rlhf_api.samples import SampleKey
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.torch_engine.engine import TorchEngine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": np.zeros(0, np.int32)}, "the prompt has 0 tokens, must have 1 to 48"),
        ({"prompt": np.full(49, 5, np.int32)}, "the prompt has 49 tokens"),
        ({"prompt": np.array([5, 999], np.int32)}, "prompt token 999 is outside the vocabulary"),
        ({"max_response_tokens": 97}, "asked for 97 response tokens in total with 0 known, must be 1 to 96"),
        ({"max_response_tokens": 0}, "asked for 0 response tokens"),
        ({"tokens": np.array([5], np.int32)}, "do not match its 1 known tokens"),
        ({"key": SampleKey(0, 0, 0)}, "sample 0 of iteration 0 is here already"),
    ],
)
def test_a_wrong_request_is_named_and_none_of_its_batch_is_taken(
    change: dict[str, Any], words: str, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    good, bad = requests(2, response=10)
    with pytest.raises(EngineError, match=words):
        engine.submit([good, replace(bad, **change)])
    assert engine.held == 0
    assert not engine.step().finished


def test_progress_reports_every_token_exactly_once(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3)
    engine.submit(requests(7, response=25))
    told: dict[int, list[int]] = {}
    for step in range(200):
        for response in engine.step().finished:
            known = told.pop(response.key.sample, [])
            assert response.tokens.tolist()[: len(known)] == known
        if step % 3 == 0:
            for part in engine.progress():
                assert part.offset == len(told.setdefault(part.key.sample, []))
                told[part.key.sample] += part.tokens.tolist()
        if not engine.held:
            break
    assert not engine.held
    assert not engine.progress()


def test_withdraw_returns_queued_and_decoding_samples_and_ignores_unknown_ones(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    samples = requests(4, response=30)
    engine.submit(samples)
    for _ in range(5):
        engine.step()
    unknown = SampleKey(9, 9, 9)
    given = engine.withdraw([samples[0].key, samples[3].key, unknown])
    assert {response.key.sample: len(response.tokens) for response in given} == {0: 5, 3: 0}
    assert len(engine.withdraw()) == engine.held + 2
    assert engine.kv_bytes() == 0


def test_an_unknown_stale_attempt_is_not_withdrawn(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sample = requests(1)[0]
    engine.submit([sample])
    assert engine.withdraw([sample.key._replace(attempt=1)]) == []
    assert engine.held == 1


def test_weights_are_replaced_whole_and_tokens_bear_their_version(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    before = {name: tensor.clone() for name, tensor in load("llama")[0].state_dict().items()}
    engine = make_engine(slots=2)
    sample = requests(1, response=12)[0]
    try:
        engine.submit([sample])
        for _ in range(4):
            engine.step()
        half = dict(list(before.items())[:5])
        with pytest.raises(WorkError, match=r"actor version 1: .* is missing"):
            engine.load_weights({name: tensor + 1 for name, tensor in half.items()}, 1)
        misshapen = {**before, "model.norm.weight": torch.zeros(3)}
        with pytest.raises(WorkError, match=r"model.norm.weight has shape \[3\], the model needs \[32\]"):
            engine.load_weights(misshapen, 1)
        assert engine.version == 0
        assert all(torch.equal(tensor, before[name]) for name, tensor in load("llama")[0].state_dict().items())
        engine.load_weights({name: tensor * 1.01 for name, tensor in before.items()}, 3)
        assert finish(engine)[0].versions == ((0, 4), (3, 8))
    finally:
        engine.load_weights(before, 0)


def test_a_policy_without_probabilities_is_an_error_not_a_token(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    before = {name: tensor.clone() for name, tensor in load("llama")[0].state_dict().items()}
    engine = make_engine()
    engine.submit(requests(1))
    try:
        engine.load_weights({name: tensor * float("nan") for name, tensor in before.items()}, 8)
        with pytest.raises(EngineError, match="weight version 8 of the actor gives logits that are not finite"):
            engine.step()
        assert len(engine.withdraw()) == 1
    finally:
        engine.load_weights(before, 0)


def test_memory_follows_the_samples_and_never_passes_slots_times_length(make_engine: MakeEngine) -> None:
    for deterministic, factor in ((False, 1), (True, 2)):
        engine = make_engine(deterministic=deterministic, slots=32, prompt_tokens=48, response_tokens=96)
        engine.submit(requests(2, longest=4, response=8))
        engine.step()
        small = engine.kv_bytes()
        engine.withdraw()
        engine.submit(requests(40, response=60))
        most = 0
        while engine.held:
            engine.step()
            most = max(most, engine.kv_bytes())
        per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, key-value heads, head size, float32
        assert small < most <= factor * 32 * (48 + 96) * per_token
        assert engine.kv_bytes() == 0


def test_sleep_frees_memory_and_wake_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine()
    samples = requests(3, response=10)
    first = finish(engine, samples)
    engine.submit(samples)
    with pytest.raises(EngineError, match="3 samples must be withdrawn"):
        engine.sleep()
    engine.withdraw()
    engine.sleep()
    engine.wake()
    again = finish(engine, samples)
    assert [again[n].tokens.tolist() for n in first] == [first[n].tokens.tolist() for n in first]


def test_a_sequence_longer_than_the_model_is_refused_when_built(make_engine: MakeEngine) -> None:
    with pytest.raises(WorkError, match=r"maxPromptTokens 48 \+ maxResponseTokens 500 = 548 is more than the 512"):
        make_engine(response_tokens=500)


def test_an_engine_is_built_from_a_folder_only(policy: Callable[[str], Path], make_engine: MakeEngine) -> None:
    assert isinstance(make_engine("qwen3"), TorchEngine)
    assert not list(policy("qwen3").glob("*.bin"))
