"""Settings of reward code: named variables and headers, including secrets, which no message or log contains."""

import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.workers.answering_server import answering

from rlhf_api.job.reward_headers import secret_variables
from rlhf_api.job.rewards import Reward
from rlhf_common.samples import SampleKey, ScoringSample
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.rewards.endpoint import EndpointReward
from rlhf_workers.inference.rewards.function import FunctionReward
from rlhf_workers.inference.rewards.reward_settings import INVALID, header_values, redacted
from rlhf_workers.inference.rewards.reward_source import RewardError
from rlhf_workers.user_code.code_settings import CodeSettings, resolve_settings
from rlhf_workers.user_code.user_process import child_environment

SECRET = "sk-tell-nobody"
CODE = """
import os, sys

def score(prompt, response, record):
    if response == "raise":
        print("the token is", os.environ["JUDGE_TOKEN"])
        sys.stderr.write(os.environ["JUDGE_TOKEN"])
        raise ValueError("refused: " + os.environ["JUDGE_TOKEN"])
    if response == "return":
        return "x" * 80 + os.environ["JUDGE_TOKEN"]
    if response == "measure":
        return {"reward": 1.0, "metrics": {"x" * 50 + os.environ["JUDGE_TOKEN"]: 1.0}}
    names = [name for name in os.environ if name in ("JUDGE_TOKEN", "MODE", "RLHF_SECRET_JUDGE_TOKEN", "OTHER")]
    return float(sorted(names) == ["JUDGE_TOKEN", "MODE"] and os.environ["JUDGE_TOKEN"] == "sk-tell-nobody")
"""


def sample(response: str) -> ScoringSample:
    token = np.ones(1, np.int32)
    return ScoringSample(SampleKey(0, 0, 0), token, token, "2+2=", response, "{}")


def function_of(file: str) -> Reward:
    secret = {"name": "JUDGE_TOKEN", "secretKeyRef": {"name": "judge", "key": "token"}}
    env = [secret, {"name": "MODE", "value": "fast"}]
    return Reward.model_validate({"function": {"file": file, "env": env}})


def given_of(reward: Reward, environ: dict[str, str]) -> CodeSettings:
    assert reward.function is not None
    field, secrets = "spec.models.reward.function.env", secret_variables(reward.secret_keys())
    return resolve_settings(reward.function.env, field, secrets, environ, invalid=INVALID)


def test_every_secret_has_a_variable_of_its_own() -> None:
    keys = [("judge", "token"), ("judge", "Token"), ("judge-token", "x.pem"), ("judge", "token")]
    env = [{"name": f"V{i}", "secretKeyRef": {"name": n, "key": k}} for i, (n, k) in enumerate(keys)]
    reward = Reward.model_validate({"function": {"file": "r.py", "env": env}})
    settings = secret_variables(reward.secret_keys())
    assert {(each.name, each.key): variable for each, variable in settings.items()} == {
        ("judge", "token"): "RLHF_SECRET_JUDGE_TOKEN",
        ("judge", "Token"): "RLHF_SECRET_JUDGE_TOKEN_2",
        ("judge-token", "x.pem"): "RLHF_SECRET_JUDGE_TOKEN_X_PEM",
    }


def test_the_child_sees_what_is_named_and_nothing_else_of_the_worker() -> None:
    environ = {"PATH": "/bin", "HF_TOKEN": "other", "RLHF_SECRET_JUDGE_TOKEN": SECRET}
    settings = given_of(function_of("r.py"), environ)
    seen = child_environment(environ, 1, settings.values, settings.secret)
    assert (seen["JUDGE_TOKEN"], seen["MODE"]) == (SECRET, "fast")
    assert not {"HF_TOKEN", "RLHF_SECRET_JUDGE_TOKEN"} & seen.keys()
    assert seen["PYTHONHASHSEED"] == "0"


def test_a_secret_that_is_not_there_names_its_key_and_variable() -> None:
    with pytest.raises(WorkError, match=r"JUDGE_TOKEN: key token of Secret judge is not in .* RLHF_SECRET_JUDGE_TOKEN"):
        given_of(function_of("r.py"), {})


async def test_a_function_gets_its_secret_and_no_message_or_log_quotes_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(CODE)
    reward = function_of(str(file))
    assert reward.function is not None
    settings = given_of(reward, {"RLHF_SECRET_JUDGE_TOKEN": SECRET + "\n"})
    source = FunctionReward(
        reward.function,
        60,
        1,
        1,
        CodeSettings({**settings.values, "JUDGE_TOKEN": SECRET}, settings.secret),
        field="spec.models.reward",
    )
    await source.start()
    try:
        assert (await source.score(sample("ok"))).reward == 1.0
        for response, words in (
            ("raise", r"ValueError: refused: \*\*\*"),
            ("return", r"returned 'x+"),
            ("measure", r"a metric is called 'x+\*\*\*"),
        ):
            with pytest.raises(RewardError, match=words) as caught:
                await source.score(sample(response))
            assert "sk-" not in caught.value.failure.message
    finally:
        await source.close()
    message = "".join(capfd.readouterr())
    assert "the token is ***" in message
    assert "refused: ***" in message
    assert SECRET not in message


async def test_a_module_that_fails_with_its_secret_does_not_tell_it(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text('import os\nraise RuntimeError("bad key " + os.environ["JUDGE_TOKEN"])\n')
    reward = function_of(str(file))
    assert reward.function is not None
    source = FunctionReward(
        reward.function, 60, 1, 1, given_of(reward, {"RLHF_SECRET_JUDGE_TOKEN": SECRET}), field="spec.models.reward"
    )
    with pytest.raises(WorkError, match=r"bad key \*\*\*") as caught:
        await source.start()
    assert SECRET not in caught.value.failure.message


def as_the_response_says(request: dict[str, Any], headers: Message) -> tuple[int, Any]:
    """Answer with the received header, as the response text requests."""
    authorization, (entry,) = headers.get("Authorization", "none"), request["samples"]
    if entry["response"] == "refuse":
        return 401, f"who is {authorization}?"
    if entry["response"] == "quote":
        return 200, {"rewards": [authorization]}
    if entry["response"] == "measure":
        return 200, {"rewards": [1.0], "metrics": [{"x" * 50 + authorization: 1.0}]}
    right = authorization == f"Bearer {SECRET}" and headers.get("X-Kind") == "math"
    return 200, {"rewards": [1.0 if right else 0.0]}


@pytest.fixture
def url() -> Iterator[str]:
    with answering(as_the_response_says) as address:
        yield f"{address}/score"


async def test_headers_reach_the_endpoint_and_a_secret_one_is_in_no_message(url: str) -> None:
    secret = {"name": "Authorization", "secretKeyRef": {"name": "judge", "key": "token"}}
    endpoint = {"url": url, "headers": [secret, {"name": "X-Kind", "value": "math"}]}
    reward = Reward.model_validate({"endpoint": endpoint})
    assert reward.endpoint is not None
    environ = {"RLHF_SECRET_JUDGE_TOKEN": f"Bearer {SECRET}\n"}
    field, secrets = "spec.models.reward.endpoint.headers", secret_variables(reward.secret_keys())
    settings = resolve_settings(reward.endpoint.headers, field, secrets, environ, invalid=INVALID)
    source = EndpointReward(reward.endpoint, 60.0, settings, field="spec.models.reward")
    await source.start()
    try:
        assert (await source.score(sample("right"))).reward == 1.0
        for response, words in (
            ("refuse", r"status 401: who is \*\*\*\?"),
            ("quote", r"the reward is '\*\*\*'"),
            ("measure", r"a metric is called 'x+\*\*\*"),
        ):
            with pytest.raises(RewardError, match=words) as caught:
                await source.score(sample(response))
            assert "Bearer" not in caught.value.failure.message
    finally:
        await source.close()


def test_a_header_of_two_lines_is_refused_without_being_shown() -> None:
    with pytest.raises(WorkError, match=r"Authorization: its value must be one line") as caught:
        header_values(CodeSettings({"Authorization": f"{SECRET}\nX-Other: 1"}, frozenset({"Authorization"})), "field")
    assert SECRET not in caught.value.failure.message


def test_what_is_hidden_is_hidden_in_every_form() -> None:
    assert redacted(f"a {SECRET} b", (f"{SECRET}\n", "")) == "a *** b"


def test_what_is_hidden_is_hidden_in_json_too() -> None:
    secret = 'p"a\\s\u00e9'
    for text in (json.dumps({"key": secret}), json.dumps({"key": secret}, ensure_ascii=False)):
        assert redacted(text, (secret,)) == '{"key": "***"}'
