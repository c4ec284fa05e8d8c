"""Rewards over HTTP from a real server on loopback: numbers, abstentions, and every kind of invalid answer."""

import json
import time
from collections.abc import Iterator
from email.message import Message
from typing import Any

import numpy as np
import pytest
from tests.support.workers.answering_server import answering

from rlhf_api.job.rewards import RewardEndpoint
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.inference.rewards.endpoint import EndpointReward
from rlhf_workers.inference.rewards.reward_source import RewardError


def sample(response: str) -> ScoringSample:
    token = np.ones(1, np.int32)
    return ScoringSample(SampleKey(0, 0, 0), token, token, "2+2=", response, '{"answer": 4}')


def as_the_response_says(request: dict[str, Any], _: Message) -> tuple[int, Any]:
    """Answer as the response text requests."""
    (entry,) = request["samples"]
    assert entry["prompt"] == "2+2="
    assert entry["record"] == {"answer": 4}
    status, body = json.loads(entry["response"])
    if status == 0:
        time.sleep(1.5)
    return status or 200, body


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with answering(as_the_response_says) as address:
        yield f"{address}/score"


async def reward(url: str, status: int, body: Any) -> float | None:
    source = EndpointReward(
        RewardEndpoint(url=url), timeout_seconds=60.0 if status else 0.5, field="spec.models.reward"
    )
    await source.start()
    try:
        return (await source.score(sample(json.dumps([status, body])))).reward
    finally:
        await source.close()


async def test_a_number_is_the_reward_and_null_abstains(url: str) -> None:
    assert await reward(url, 200, {"rewards": [0.25]}) == 0.25
    assert await reward(url, 200, {"rewards": [None]}) is None


@pytest.mark.parametrize(
    ("status", "body", "reason", "words"),
    [
        (500, "the judge is tired", "RewardInvalid", "status 500: the judge is tired"),
        (302, "", "RewardInvalid", "status 302"),
        (200, "<html>", "RewardInvalid", "no JSON: <html>"),
        (200, [1.0], "RewardInvalid", 'no list under "rewards": [1.0]'),
        (200, {"rewards": 1.0}, "RewardInvalid", 'no list under "rewards"'),
        (200, {"rewards": []}, "RewardInvalid", "0 rewards for 1 sample"),
        (200, {"rewards": [1, 2]}, "RewardInvalid", "2 rewards for 1 sample"),
        (200, '{"rewards": [NaN]}', "RewardInvalid", "the reward is nan (float)"),
        (
            200,
            {"rewards": [1e39]},
            "RewardInvalid",
            "the reward is 1e+39 (float); it must be a finite number of float32",
        ),
        (200, {"rewards": [10**400]}, "RewardInvalid", "the reward is 1000"),
        (200, {"rewards": [1], "metrics": [{"a": 10**400}]}, "RewardInvalid", "metric a is 1000"),
        (200, {"rewards": ["1"]}, "RewardInvalid", "the reward is '1' (str)"),
        (200, {"rewards": [True]}, "RewardInvalid", "the reward is True (bool)"),
        (200, "x" * 2_000_000, "RewardInvalid", "more than 1048576 bytes"),
        (0, {"rewards": [1.0]}, "RewardTimeout", "did not answer within 0.5 s"),
    ],
)
async def test_a_wrong_answer_is_a_failure_and_never_a_zero(
    url: str, status: int, body: Any, reason: str, words: str
) -> None:
    with pytest.raises(RewardError) as caught:
        await reward(url, status, body)
    failure = caught.value.failure
    assert (failure.reason, failure.exit_code, failure.retryable) == (reason, 20, True)
    assert words in failure.message
    assert failure.field.startswith("spec.models.reward.")


async def test_an_endpoint_that_is_down_is_named(url: str) -> None:
    with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9/x cannot be reached"):
        await reward("http://127.0.0.1:9/x", 200, {})
