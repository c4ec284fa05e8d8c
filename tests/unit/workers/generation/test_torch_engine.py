"""The torch engine beyond the contract: its memory, its rejections, and its construction."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.workers.engine_driving import MakeEngine, finish, requests

from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import EngineError
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.generation.torch_engine.forward import CausalForward


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


def test_a_model_whose_full_pass_gives_no_numbers_is_refused(load: Callable[[str], tuple[Any, Any]]) -> None:
    model = deepcopy(load("llama")[0])
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(WorkError, match="a full pass gives logits that are NaN or infinite"):
        CausalForward(model, "spec.models.actor.path").verify()


def test_a_token_that_a_model_never_draws_is_compared_as_such(
    load: Callable[[str], tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deepcopy(load("llama")[0])
    project, calls = model.lm_head.forward, list[int]()

    def masked(states: torch.Tensor) -> torch.Tensor:
        calls.append(states.shape[1])
        logits: torch.Tensor = project(states)
        if len(calls) not in excused:
            logits[..., 3] = float("-inf")
        return logits

    monkeypatch.setattr(model.lm_head, "forward", masked)
    excused = set[int]()
    CausalForward(model, "spec.models.actor.path").verify()
    excused, passes = {2}, len(calls)
    calls.clear()
    with pytest.raises(WorkError, match="differ from a full pass by inf"):
        CausalForward(model, "spec.models.actor.path").verify()
    assert len(calls) == passes


def test_memory_follows_the_samples_and_never_passes_slots_times_length(make_engine: MakeEngine) -> None:
    for deterministic, factor in ((False, 1), (True, 2)):
        engine = make_engine(deterministic=deterministic, slots=32, prompt_tokens=48, response_tokens=96)
        engine.submit(requests(2, longest=4, response=8))
        engine.step()
        small = engine.kv_bytes()
        engine.withdraw()
        engine.submit(requests(40, response=60))
        most = 0
        while engine.in_flight:
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
