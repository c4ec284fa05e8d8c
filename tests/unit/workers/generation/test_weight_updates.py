"""Weights of the policy and of its trained draft model: both are loaded, or both stay at the earlier version."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_folders import models
from tests.support.workers.engine_driving import MakeEngine

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.engine import Engine, EngineLimits, SamplingParameters
from rlhf_workers.generation.generation_role import GenerationRole
from rlhf_workers.generation.speculation.model import ModelDrafter
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.models.loading import load_causal_lm
from rlhf_workers.weights.fetching import FetchedWeights
from rlhf_workers.worker_role import NO_VERSION

Tensors = dict[str, torch.Tensor]


class EngineThatDrafts:
    """An engine with a speculator, with the interface of the torch engine for weights."""

    def __init__(self, engine: Engine, speculator: Speculator) -> None:
        self.engine, self.speculator = engine, speculator

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "version":
            self.engine.version = value
        else:
            super().__setattr__(name, value)


class Source:
    """Serves both models, except those in `lacking`."""

    def __init__(self, policy: Tensors, draft: Tensors) -> None:
        self.models = {"actor": policy, "draft": draft}
        self.lacking: set[str] = set()
        self.asked: list[tuple[str, int]] = []

    @contextmanager
    def __call__(
        self, model: str, version: int, sources: Sequence[pb.WeightLocation], certificates: Path | None
    ) -> Iterator[FetchedWeights]:
        self.asked.append((model, version))
        if model in self.lacking:
            raise WorkError("WeightsUnavailable", f"{model} version {version}: the peer is gone", retryable=True)
        tensors = self.models[model]
        yield FetchedWeights(tensors, {"stream": sum(tensor.nbytes for tensor in tensors.values())})


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "draft", "llama", seed=9, num_hidden_layers=1)


def drafter_of(folder: Path) -> ModelDrafter:
    device = torch.device("cpu")
    model = load_causal_lm(str(folder), field="f", dtype=torch.float32, device=device, attention="sdpa")
    return ModelDrafter(model, SamplingParameters(), EngineLimits(4, 48, 40), models.VOCABULARY)


def state_of(model: Any, more: float = 0.0) -> Tensors:
    return {name: value.detach() + more for name, value in model.named_parameters()}


@pytest.fixture
def pair(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]], draft_folder: Path
) -> tuple[GenerationRole, ModelDrafter, Source]:
    drafter = drafter_of(draft_folder)
    speculator = Speculator([drafter], mode="Fixed", longest=4, widths=np.arange(65))
    source = Source(state_of(load("llama")[0]), state_of(drafter._model, 1.0))
    engine: Any = EngineThatDrafts(make_engine(), speculator)
    return GenerationRole(engine, load("llama")[1], weight_fetcher=source), drafter, source


def order(version: int, draft_model: str = "draft") -> pb.LoadWeights:
    sources = [pb.WeightLocation(address="10.0.0.7:7710")]
    return pb.LoadWeights(model="actor", version=version, sources=sources, draft_model=draft_model)


def test_both_come_under_one_version(pair: tuple[GenerationRole, ModelDrafter, Source]) -> None:
    role, drafter, source = pair
    done = role.load(order(3), None)
    assert source.asked == [("actor", 3), ("draft", 3)]
    assert role.versions() == {"actor": 3, "draft": 3}
    assert all(torch.equal(source.models["draft"][name], value) for name, value in state_of(drafter._model).items())
    assert done.bytes == sum(tensor.nbytes for each in source.models.values() for tensor in each.values())


@pytest.mark.parametrize("lacking", ["actor", "draft"])
def test_when_one_of_both_does_not_come_the_pair_of_before_is_kept(
    pair: tuple[GenerationRole, ModelDrafter, Source], lacking: str
) -> None:
    role, drafter, source = pair
    role.load(order(3), None)
    before, source.models["draft"] = state_of(drafter._model), state_of(drafter._model, 1.0)
    source.lacking = {lacking}
    with pytest.raises(WorkError, match=f"{lacking} version 4: the peer is gone") as raised:
        role.load(order(4), None)
    assert raised.value.failure.retryable
    assert role.versions() == {"actor": 3, "draft": 3}
    assert all(torch.equal(before[name], value) for name, value in state_of(drafter._model).items())
    source.lacking = set()
    role.load(order(4), None)
    assert role.versions() == {"actor": 4, "draft": 4}


def test_one_that_fits_no_draft_model_leaves_the_worker_without_a_version(
    pair: tuple[GenerationRole, ModelDrafter, Source],
) -> None:
    role, _, source = pair
    source.models["draft"] = {"model.embed_tokens.weight": torch.zeros(1)}
    with pytest.raises(WorkError, match="draft model"):
        role.load(order(3), None)
    assert role.versions()["actor"] == NO_VERSION


@pytest.mark.parametrize("model", ["actor", "draft"])
def test_a_copy_that_breaks_off_leaves_the_worker_without_a_version(
    pair: tuple[GenerationRole, ModelDrafter, Source], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, _, source = pair
    role.load(order(3), None)
    broken = {id(tensor) for tensor in source.models[model].values()}
    copy = torch.Tensor.copy_

    def failing(target: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        if id(tensor) in broken:
            raise RuntimeError("the device is gone")
        return copy(target, tensor, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            role.load(order(4), None)
    assert role.versions() == {"actor": NO_VERSION, "draft": 3 if model == "actor" else NO_VERSION}
    role.load(order(4), None)
    assert role.versions() == {"actor": 4, "draft": 4}


def test_an_engine_that_does_not_draft_by_a_model_is_given_the_policy_alone(
    make_engine: MakeEngine, load: Callable[[str], tuple[Any, Any]]
) -> None:
    source = Source(state_of(load("llama")[0]), {})
    role = GenerationRole(make_engine(), load("llama")[1], weight_fetcher=source)
    role.load(order(3), None)
    assert source.asked == [("actor", 3)]
    assert role.versions() == {"actor": 3}
