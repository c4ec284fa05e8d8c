"""Requests determine how their tokens are drawn; a rollout's requests get the same tokens next to any others."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import finish, requests
from tests.support.workers.generation_roles import generation_job

from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.evaluation import Evaluation
from rlhf_common.samples import Drawing, SampleRequest
from rlhf_workers.generation.engine import Engine
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.models.loading import load_tokenizer

COUNT = 6


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("llama") / "policy", "llama", head_dim=32)


def decoded(engine: Engine, samples: list[SampleRequest]) -> dict[int, list[int]]:
    return {number: part.tokens.tolist() for number, part in finish(engine, samples).items()}


@pytest.mark.full(quick=1)
@pytest.mark.parametrize("name", ["torch", "vllm", "your_engine.plain_engine"])
def test_a_request_is_drawn_as_it_says_and_no_other_by_it(name: str, policy: Path) -> None:
    job = generation_job(policy, deterministic=name != "vllm", engine=name, maxBatchSize=8)
    tokenizer = load_tokenizer(str(policy), "model")

    @cache
    def engine_at(temperature: float, evaluation: float | None) -> Engine:
        rollout = job.spec.rollout.model_copy(update={"temperature": temperature})
        fields = None if evaluation is None else Evaluation(temperature=evaluation)
        spec: RLHFJobSpec = job.spec.model_copy(update={"rollout": rollout, "evaluation": fields})
        return build_engine(spec, tokenizer, torch.device("cpu"))

    plain = requests(COUNT, response=12)
    greedy = [replace(request, drawing=Drawing.GREEDY) for request in plain]
    cooler = [replace(request, drawing=Drawing.EVALUATION) for request in plain]
    mixed = [*plain[:2], *greedy[2:4], *cooler[4:]]
    wanted = {kind: decoded(engine_at(kind, None), plain) for kind in (1.0, 0.0, 0.5)}
    beside = decoded(engine_at(1.0, 0.5), mixed)
    for index, temperature in enumerate((1.0, 1.0, 0.0, 0.0, 0.5, 0.5)):
        assert beside[index] == wanted[temperature][index]
    assert decoded(engine_at(0.0, 0.5), mixed)[0] == wanted[0.0][0], "a greedy rollout beside sampled evaluation"
    for temperature, evaluation in ((1.0, None), (0.0, None), (0.5, None), (1.0, 0.5), (0.0, 0.5)):
        engine = engine_at(temperature, evaluation)
        if isinstance(engine, VllmEngine):
            engine.close()
