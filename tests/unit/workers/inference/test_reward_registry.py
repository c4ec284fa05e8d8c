"""Reward sources are selected by the manifest's member, and no error is answered with a number."""

import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.support.training.training_ranks import make_job
from tests.support.workers.reward_samples import sample

from rlhf_api.algorithms.graph import SCORE_REWARD
from rlhf_api.job import RLHFJob
from rlhf_api.job.rewards import Reward
from rlhf_workers.inference.rewards.registry import REWARDS, load_reward
from rlhf_workers.inference.rewards.reward_calls import RewardCalls, RewardOutcome
from rlhf_workers.inference.rewards.reward_source import Judgment

CPU = torch.device("cpu")
FUNCTION = """
def score(prompt, response, record):
    return None if response == "nothing" else len(response) / (0 if response == "fault" else 1)
"""


def job_with(reward: dict[str, object], folder: Path) -> RLHFJob:
    document = make_job(folder, folder).model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["models"]["reward"] = reward
    return RLHFJob.model_validate(document)


def outcomes(calls: RewardCalls, count: int) -> dict[str, RewardOutcome]:
    done: list[RewardOutcome] = []
    deadline = time.monotonic() + 60
    while len(done) < count:
        assert time.monotonic() < deadline, "waited 60 s"
        done += calls.collect()
        time.sleep(0.01)
    return {outcome.sample.response_text: outcome for outcome in done}


def test_every_kind_of_the_manifest_has_a_module() -> None:
    assert set(REWARDS) == set(Reward.exactly_one)
    for module in REWARDS.values():
        assert callable(import_module(module).load_reward)


def test_a_source_answers_each_sample_once_with_a_number_nothing_or_a_failure(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(FUNCTION)
    job = job_with({"function": {"file": str(tmp_path / "reward.py")}}, tmp_path)
    calls = load_reward(SCORE_REWARD, job.spec, CPU, CPU)
    assert isinstance(calls, RewardCalls)
    try:
        for text in ("three", "nothing", "fault"):
            calls.submit(sample(text))
        result = outcomes(calls, 3)
    finally:
        calls.close()
    assert result["three"].judgment == Judgment(5.0)
    assert (result["nothing"].judgment, result["nothing"].failure) == (Judgment(None), None)
    failure = result["fault"].failure
    assert result["fault"].judgment is None
    assert failure is not None
    assert "ZeroDivisionError" in failure.message


def test_an_endpoint_that_nobody_serves_is_a_failure_and_no_zero(tmp_path: Path) -> None:
    job = job_with({"endpoint": {"url": "http://127.0.0.1:9/score"}}, tmp_path)
    calls = load_reward(SCORE_REWARD, job.spec, CPU, CPU)
    assert isinstance(calls, RewardCalls)
    try:
        calls.submit(sample("text"))
        outcome = outcomes(calls, 1)["text"]
    finally:
        calls.close()
    assert outcome.judgment is None
    assert outcome.failure is not None
    assert outcome.failure.reason == "RewardUnreachable"


def test_what_cannot_be_loaded_names_its_field(tmp_path: Path) -> None:
    job = job_with({"model": {"path": str(tmp_path / "absent")}}, tmp_path)
    with pytest.raises(Exception, match=r"spec.models.reward.model.path: .*absent"):
        load_reward(SCORE_REWARD, job.spec, CPU, CPU)
