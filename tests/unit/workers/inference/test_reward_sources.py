"""The contract of every reward source: one answer per sample: a finite number, an abstention, or a failure.

A failure names a field of this reward, and a sample's result does not depend on other samples.
"""

import math
import time
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.model_folders import models
from tests.support.training.training_ranks import make_job
from tests.support.workers.answering_server import answering
from tests.support.workers.reward_samples import sample

from rlhf_api.algorithms import graph_of
from rlhf_api.job import RLHFJob
from rlhf_workers.inference.group_comparisons import GroupScorer
from rlhf_workers.inference.rewards.registry import REWARDS, load_reward
from rlhf_workers.inference.rewards.reward_calls import RewardCalls, RewardOutcome

CPU = torch.device("cpu")
TEXTS = ("long", "fault", "none", "longer", "x" * 40)
FUNCTION = """
def score(prompt, response, record):
    return None if response == "none" else 1 / (response != "fault")

def many(prompts, responses, records, response_tokens):
    assert len(prompts) == len(responses) == len(records) == len(response_tokens)
    return [score(*each) for each in zip(prompts, responses, records)]
"""


def endpoint_and_judge(request: dict[str, Any], _: Message) -> tuple[int, Any]:
    asked = request["messages"][0]["content"] if "messages" in request else ""
    samples = request.get("samples", [])
    rewards = [None if each["response"] == "none" else 0.5 for each in samples]
    broken = "fault" in asked or any(each["response"] == "fault" for each in samples)
    top = [{"token": "5", "logprob": -0.5}, {"token": "6", "logprob": -1.5}]
    answer = {"rewards": rewards, "choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]}
    return 500 if broken else 200, answer


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with answering(endpoint_and_judge) as address:
        yield f"{address}/score"


@pytest.fixture(scope="module")
def rewards(url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return a reward of every kind, under a name that begins with the kind."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "reward.py").write_text(FUNCTION)
    function, policy = str(folder / "reward.py"), models.write_policy(folder / "judge", "llama", seed=2)
    return {
        "function": {"function": {"file": function}},
        "function-batch": {"function": {"file": function, "name": "many"}, "calls": "Batch", "batchSize": 3},
        "model": {"model": {"path": str(models.write_reward_model(folder / "reward", "llama", seed=3))}},
        "endpoint": {"endpoint": {"url": url}},
        "endpoint-batch": {"endpoint": {"url": url}, "calls": "Batch"},
        "judge": {"judge": {"endpoint": {"url": url, "model": "judge"}}},
        "environment": {"environment": {}},
        "judge-model": {"judge": {"model": {"path": str(policy)}, "template": "{response}:"}},
    }


def job_of(reward: dict[str, Any], folder: Path) -> RLHFJob:
    """Return a job whose second reward is this one."""
    document = make_job(folder, folder).model_dump(mode="json", by_alias=True, exclude_none=True)
    del document["spec"]["models"]["reward"]
    document["spec"]["models"]["actor"] = reward.get("model", document["spec"]["models"]["actor"])
    other = {"name": "other", "endpoint": {"url": "http://127.0.0.1:9"}}
    document["spec"]["models"]["rewards"] = [other, {"name": "mine", **reward}]
    return RLHFJob.model_validate(document)


def answered(calls: RewardCalls, texts: tuple[str, ...]) -> dict[str, RewardOutcome]:
    """Return the results of samples with these texts; each is answered once."""
    done: list[RewardOutcome] = []
    for text in texts:
        calls.submit(sample(text))
    deadline = time.monotonic() + 60
    while calls.pending:
        assert time.monotonic() < deadline, "waited 60 s for rewards"
        done += calls.collect()
        time.sleep(0.01)
    assert sorted(outcome.sample.response_text for outcome in done) == sorted(texts)
    return {outcome.sample.response_text: outcome for outcome in done}


KINDS = ("function", "function-batch", "model", "endpoint", "endpoint-batch", "judge", "judge-model", "environment")


def test_every_kind_of_the_registry_is_held_to_the_contract() -> None:
    assert {kind.partition("-")[0] for kind in KINDS} == set(REWARDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_is_answered_alone_and_once(kind: str, rewards: dict[str, Any], tmp_path: Path) -> None:
    job = job_of(rewards[kind], tmp_path)
    task = next(task for task in graph_of(job.spec).tasks if task.part and task.part.name == "mine")
    source = load_reward(task, job.spec, CPU, CPU)
    assert not isinstance(source, GroupScorer)
    if not isinstance(source, RewardCalls):
        together = source.score([sample(text) for text in TEXTS])
        assert [(str(each.dtype), each.shape) for each in together] == [("float32", (1,))] * len(TEXTS)
        assert all(math.isfinite(each[0]) for each in together)
        alone = [source.score([sample(text)])[0] for text in TEXTS]
        assert [float(each[0]) for each in alone] == pytest.approx([float(each[0]) for each in together], abs=1e-5)
        return
    try:
        outcomes = answered(source, TEXTS)
        assert source.collect() == []
        fault = outcomes.pop("fault")
        assert fault.judgment is None
        assert fault.failure is not None
        assert fault.failure.field.startswith("spec.models.rewards[1].")
        for text, outcome in outcomes.items():
            assert outcome.failure is None, outcome.failure
            assert outcome.judgment is not None
            reward = outcome.judgment.reward
            assert (text == "none" and kind != "judge" and reward is None) or math.isfinite(reward or 0.0)
        assert answered(source, ("long",))["long"].judgment == outcomes["long"].judgment
    finally:
        source.close()
