"""The child process of an environment: loadable files, valid step results, and repeated turns."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_api.job.environment import Environment
from rlhf_api.job.reward_headers import secret_variables
from rlhf_common import control_pb2 as pb
from rlhf_common.samples import SampleKey
from rlhf_workers.failures import WorkError, failure_of
from rlhf_workers.generation.environment.environment_calls import EnvironmentCalls, EnvironmentOutcome
from rlhf_workers.generation.environment.environment_host import Episodes, StepError, checked_step, load_environment
from rlhf_workers.generation.environment.turns import AnsweredTurn, episode_of
from rlhf_workers.user_code.code_settings import resolve_settings
from rlhf_workers.user_code.user_host import LoadError

KEY = SampleKey(2, 5, 1)
TURN_SECONDS = 8
"""Seconds for one turn, and for the restart of a process: a second on a busy machine."""
PATIENCE_SECONDS = 300.0
CODE = """
import os
import time

class Environment:
    def reset(self, record):
        self.record, self.turns = record, 0

    def step(self, response):
        self.turns += 1
        if response == "raise":
            raise ValueError("not that")
        if response == "die":
            os._exit(3)
        if response == "hang":
            time.sleep(3600)
        done = response == "end"
        return {"message": f"{self.record['name']}{self.turns}", "done": done, "reward": 0.5 if done else None}
"""

SECRET = "sk-tell-nobody"
ASKS_FOR_VARIABLES = """
import os

class Environment:
    def reset(self, record): ...

    def step(self, response):
        if response == "raise":
            raise ValueError("refused: " + os.environ["SEARCH_TOKEN"])
        return {"message": os.environ.get(response, "none")}
"""


class Adding:
    instances = 0

    def __init__(self) -> None:
        type(self).instances += 1

    def reset(self, record: dict[str, Any]) -> None:
        self.total = record["start"]

    def step(self, response: str) -> dict[str, Any]:
        self.total += int(response)
        return {"message": str(self.total), "done": self.total >= 10, "metrics": {"total": self.total}}


def taken(episodes: Episodes, name: str, *turns: str) -> list[str]:
    request = {"episode": name, "record": {"start": 1}, "turns": list(turns)}
    return [step["message"] for step in asyncio.run(episodes.taken(request))]


def test_known_turns_are_not_taken_again_and_unknown_ones_are() -> None:
    Adding.instances = 0
    episodes = Episodes(Adding)
    assert taken(episodes, "a", "1") == ["2"]
    assert taken(episodes, "a", "1", "2") == ["2", "4"]
    assert Adding.instances == 1
    assert taken(episodes, "a", "3", "2") == ["4", "6"], "another first turn is another episode"
    assert taken(episodes, "b", "3", "2", "4") == ["4", "6", "10"]
    assert Adding.instances == 3
    with pytest.raises(StepError, match="an earlier step was done"):
        taken(episodes, "c", "9", "1")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", "step returned 'text' (str); it must return a mapping"),
        ({"mesage": "a"}, "step returned the key 'mesage' (str); known are message, messages, done"),
        ({}, "message is empty, but done is not True"),
        ({"message": "", "done": False}, "message is empty"),
        ({"message": "a", "messages": [{"role": "tool", "content": "b"}]}, "message and messages are given"),
        ({"messages": "a"}, "messages is 'a' (str); it must be a list of 64 at most"),
        ({"messages": [{"role": "tool"}]}, "each must have a role and a content, both text"),
        ({"messages": [{"role": "tool", "content": 4}]}, "each must have a role and a content, both text"),
        ({"messages": [{"role": "tool", "content": "a" * 100_001}]}, "the answer has 100001 characters"),
        ({"message": 3}, "message is 3 (int); it must be text"),
        ({"message": "a\ud83d"}, r"message has half a surrogate pair, which is not text: 'a\ud83d' (str)"),
        ({"messages": [{"role": "tool", "content": "\ude00"}]}, "messages[0].content has half a surrogate pair"),
        ({"done": 1}, "done is 1 (int); it must be True or False"),
        ({"done": True, "reward": "1"}, "reward is '1' (str); it must be a finite number"),
        ({"done": True, "reward": float("nan")}, "reward is nan (float)"),
        ({"done": True, "metrics": {"calls": None}}, "metric calls is None (NoneType)"),
    ],
)
def test_what_is_no_answer_is_named(value: Any, words: str) -> None:
    with pytest.raises(StepError) as caught:
        checked_step(value)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def Environment(): ...", "is a function, not a class"),
        ("class Other: ...", "has no Environment; it defines Other"),
        ("class Environment:\n    def reset(self, record): ...", "has no step"),
        ("class Environment:\n    def reset(self): ...\n    def step(self, a): ...", "reset of Environment"),
        (
            "class Environment:\n    def __init__(self, a): ...\n    reset = step = lambda self, a: 1",
            "without arguments",
        ),
    ],
)
def test_a_class_that_is_no_environment_is_refused_before_the_first_sample(
    tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "environment.py"
    file.write_text(text + "\n")
    with pytest.raises(LoadError) as caught:
        load_environment(str(file), "", "Environment")
    assert words in str(caught.value)


def test_texts_of_strangers_in_a_failure_or_in_the_name_of_a_metric_can_be_sent() -> None:
    step = checked_step({"done": True, "metrics": {"a\ud83d": 1}})
    assert episode_message(AnsweredTurn(**step)).metrics == {r"a\ud83d": 1.0}
    assert WorkError("EnvironmentRaised", "no \ud83d").failure.message == r"no \ud83d"
    assert failure_of(ValueError("no \ud83d"), "environment").message.endswith(r"ValueError: no \ud83d")


def episode_message(step: AnsweredTurn) -> pb.Episode:
    return pb.Episode(turns=1, metrics=episode_of([step]).metrics)


def outcome(calls: EnvironmentCalls, *turns: str) -> EnvironmentOutcome:
    calls.submit(KEY, '{"name": "n"}', turns)
    until = time.monotonic() + PATIENCE_SECONDS
    while not (outcomes := calls.collect()):
        assert time.monotonic() < until, f"no answer to {turns} in {PATIENCE_SECONDS:.0f} s"
        time.sleep(0.005)
    return outcomes[0]


def test_a_process_answers_and_its_failures_are_of_one_sample(tmp_path: Path) -> None:
    file = tmp_path / "environment.py"
    file.write_text(CODE)
    calls = EnvironmentCalls(Environment(file=str(file), timeout_seconds=TURN_SECONDS), threads=1)
    calls.start()
    try:
        assert [step.message for step in outcome(calls, "go", "on").steps] == ["n1", "n2"]
        assert outcome(calls, "go", "end").steps[-1].reward == 0.5
        for turn, reason, words in (
            ("raise", "EnvironmentRaised", "environment.py:12 in step: ValueError: not that"),
            ("die", "EnvironmentDied", "the environment's process ended: exit status 3"),
            ("hang", "EnvironmentTimeout", f"did not return within {TURN_SECONDS} s; its process was killed"),
        ):
            failure = outcome(calls, turn).failure
            assert failure is not None
            assert (failure.reason, words in failure.message) == (reason, True), failure.message
        assert [step.message for step in outcome(calls, "go").steps] == ["n1"], "others go on"
    finally:
        calls.close()


def test_an_environment_has_its_variables_and_no_answer_or_failure_quotes_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "environment.py"
    file.write_text(ASKS_FOR_VARIABLES)
    monkeypatch.setenv("RLHF_SECRET_SEARCH_TOKEN", SECRET)
    token = {"name": "SEARCH_TOKEN", "secretKeyRef": {"name": "search", "key": "token"}}
    environment = Environment.model_validate({"file": str(file), "env": [token, {"name": "MODE", "value": "fast"}]})
    settings = resolve_settings(
        environment.env, "env", secret_variables(environment.secret_keys()), os.environ, invalid=""
    )
    calls = EnvironmentCalls(environment, 1, settings)
    calls.start()
    try:
        assert [step.message for step in outcome(calls, "MODE").steps] == ["fast"]
        assert [step.message for step in outcome(calls, "SEARCH_TOKEN").steps] == ["***"]
        assert [step.message for step in outcome(calls, "RLHF_SECRET_SEARCH_TOKEN").steps] == ["none"]
        failure = outcome(calls, "raise").failure
        assert failure is not None
        assert "ValueError: refused: ***" in failure.message
        assert SECRET not in failure.message
    finally:
        calls.close()


def test_an_environment_that_cannot_be_loaded_names_the_field(tmp_path: Path) -> None:
    calls = EnvironmentCalls(Environment(file=str(tmp_path / "none.py")), threads=1)
    with pytest.raises(WorkError, match="there is no such file") as caught:
        calls.start()
    failure = caught.value.failure
    assert (failure.reason, failure.field) == ("EnvironmentInvalid", "spec.rollout.environment.file")
