"""The reward child process with a user's file and its results: a number, an abstention, or an error message."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_workers.inference.rewards.function_host import called, load_function
from rlhf_workers.inference.rewards.function_replies import reply_of
from rlhf_workers.user_code.user_host import LoadError, describe
from rlhf_workers.user_code.user_process import child_environment

SAMPLES = [
    {"prompt": "p", "response": "ab", "record": {}, "finish_reason": "stop", "response_tokens": 2},
    {"prompt": "q", "response": "abc", "record": {}, "finish_reason": "length", "response_tokens": 3},
]


def reply(value: Any, *, many: bool = False) -> dict[str, Any]:
    """Return the child's answer if the function returned `value` for one sample, or for two."""
    return reply_of({"id": 7, "many": many, "samples": SAMPLES if many else SAMPLES[:1]}, value, [])


@pytest.mark.parametrize(
    ("value", "reward"), [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (np.int64(3), 3.0), (-0.0, 0.0)]
)
def test_numbers_are_rewards(value: Any, reward: float) -> None:
    assert reply(value) == {"id": 7, "rewards": [{"reward": reward, "metrics": {}}]}


def test_none_abstains() -> None:
    assert reply(None) == {"id": 7, "rewards": [{"reward": None, "metrics": {}}]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "returned nan (float); a reward must be finite"),
        (-math.inf, "returned -inf (float)"),
        (10**400, "(int); a reward must be finite"),
        ("0.5", "returned '0.5' (str); it must return a number"),
        ([1.0], "returned [1.0] (list)"),
        ({}, "returned {} (dict)"),
        (1j, "returned 1j (complex)"),
        ("x" * 1000, "xxx... (str)"),
    ],
)
def test_anything_else_is_a_failure_that_says_what_was_returned(value: Any, words: str) -> None:
    said = reply(value)
    assert said["reason"] == "RewardInvalid"
    assert words in said["message"]
    assert "rewards" not in said


def test_metrics_may_stand_beside_a_reward_and_several_rewards_come_as_a_list() -> None:
    both = reply([{"reward": None, "metrics": {"words": np.int64(4)}}, 0.5], many=True)
    assert both["rewards"] == [{"reward": None, "metrics": {"words": 4.0}}, {"reward": 0.5, "metrics": {}}]
    for wrong, words in (
        ([1.0], "1 rewards for 2 responses"),
        (1.0, "given 2 responses it must return a list"),
        ([1.0, "x"], "must return a number"),
        ([1.0, {"reward": 1, "metrics": {"a": math.nan}}], "metric a must be a finite number"),
        ([1.0, {"reward": 1, "metrics": [1]}], "metrics must be a mapping"),
    ):
        assert words in reply(wrong, many=True)["message"]


def test_a_function_that_asks_is_given_how_a_response_ended(tmp_path: Path) -> None:
    file = tmp_path / "reward_end.py"
    file.write_text("def score(prompt, response, record, finish_reason, response_tokens=0):\n"
                    "    return finish_reason, response_tokens, response\n")  # fmt: skip
    function = load_function(str(file), "", "score")
    assert called(function, {"many": False, "samples": SAMPLES[:1]}) == ("stop", 2, "ab")
    assert called(function, {"many": True, "samples": SAMPLES}) == (["stop", "length"], [2, 3], ["ab", "abc"])


@pytest.mark.parametrize(
    ("text", "part", "words"),
    [
        ("def score(prompt, response, record)\n    return 1\n", "file", "reward.py:1: SyntaxError: expected ':'"),
        ("import no_such_module_anywhere\n", "file", "reward.py:1 in <module>: ModuleNotFoundError"),
        ("x = 1\n\n\nraise SystemExit(3)\n", "file", "reward.py:4 in <module>: SystemExit: 3"),
        ("def other(prompt, response, record): return 1\n", "name", "has no score; it defines other"),
        ("score = 3\n", "name", "is a int, not a function"),
        ("def score(prompt): return 1\n", "name", "must take (prompt, response, record): too many"),
        (None, "file", "there is no such file"),
    ],
)
def test_a_function_that_cannot_be_used_is_named_before_the_first_sample(
    tmp_path: Path, text: str | None, part: str, words: str
) -> None:
    file = tmp_path / "reward.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LoadError) as caught:
        load_function(str(file), "", "score")
    assert caught.value.part == part
    assert words in str(caught.value)


def test_a_failure_names_the_line_of_the_users_own_file(tmp_path: Path) -> None:
    file = tmp_path / "reward_line.py"
    file.write_text("import json\n\ndef score(prompt, response, record):\n    return json.loads(response)\n")
    function = load_function(str(file), "", "score")
    with pytest.raises(ValueError) as caught:
        function("p", "{", {})
    assert describe(caught.value, str(file)).startswith("reward_line.py:4 in score: json.decoder.JSONDecodeError: ")


def test_the_child_inherits_no_secret() -> None:
    environ = {"PATH": "/bin", "HF_TOKEN": "secret", "AWS_SECRET_ACCESS_KEY": "secret", "RLHF_COORDINATOR": "c:1"}
    seen = child_environment(environ, threads=2)
    assert seen == {"PATH": "/bin", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}
