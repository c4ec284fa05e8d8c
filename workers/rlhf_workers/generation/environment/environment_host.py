"""Child process of a user's environment: `python -m ...environment_host --file F --name N` (or `--module M`).

Request: {"id", "episode", "record", "turns": [text]}. Reply: {"id", "steps": [{"message", "messages", "done", "reward",
"metrics"}]}, a step for each turn, or {"id", "reason", "message"}.
"""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from rlhf_common.surrogates import escaped, half_pair
from rlhf_workers.user_code.returned_values import finite, shown
from rlhf_workers.user_code.user_host import SECRETS, HostedCode, LoadError, hide, load_name, serve

MAX_EPISODES: Final = 1024
"""Maximum unfinished episodes that a child remembers; a forgotten one starts again from its first turn."""
MAX_MESSAGE: Final = 100_000
"""Maximum characters of an answer."""
MAX_MESSAGES: Final = 64
"""Maximum chat messages of an answer."""
KEYS: Final = ("message", "messages", "done", "reward", "metrics")

StepReply = dict[str, Any]


class StepError(Exception):
    """An invalid return value of `step`, or a turn after the environment was done."""


class OpenEpisode:
    """One environment with the turns that it has answered."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.turns: list[str] = []
        self.steps: list[StepReply] = []


class Episodes:
    """Episodes of one child, by name."""

    def __init__(self, environment: type) -> None:
        self._environment = environment
        self._episodes: OrderedDict[str, OpenEpisode] = OrderedDict()

    @property
    def is_async(self) -> bool:
        """Whether `step` is a coroutine function, so that several episodes run at once."""
        return inspect.iscoroutinefunction(getattr(self._environment, "step", None))

    async def taken(self, request: Mapping[str, Any]) -> list[StepReply]:
        """Return the steps of all turns of an episode; those of an unfinished episode that is remembered are not
        repeated."""
        name, turns = request["episode"], request["turns"]
        episode = self._episodes.pop(name, None)  # one that raises or hangs starts again
        if episode is None or episode.turns != turns[: len(episode.turns)]:
            episode = OpenEpisode(self._environment())
            await _awaited(episode.environment.reset(request["record"]))
        for turn in turns[len(episode.turns) :]:
            if episode.steps and episode.steps[-1]["done"]:
                raise StepError("an earlier step was done, but the response went on: answers differ between two times")
            step = checked_step(await _awaited(episode.environment.step(turn)))
            episode.turns.append(turn)
            episode.steps.append(step)
        if not episode.steps[-1]["done"]:
            self._episodes[name] = episode
        while len(self._episodes) > MAX_EPISODES:
            self._episodes.popitem(last=False)
        return episode.steps


def checked_step(value: Any) -> StepReply:
    """Return the value of `step` with all its keys; StepError if it is invalid."""
    if not isinstance(value, Mapping):
        raise StepError(f"step returned {_shown(value)}; it must return a mapping of {', '.join(KEYS)}")
    if unknown := [key for key in value if key not in KEYS]:
        raise StepError(f"step returned the key {_shown(unknown[0])}; known are {', '.join(KEYS)}")
    done, message, metrics = value.get("done", False), value.get("message"), value.get("metrics") or {}
    if not isinstance(done, bool):
        raise StepError(f"done is {_shown(done)}; it must be True or False")
    if message is not None and not isinstance(message, str):
        raise StepError(f"message is {_shown(message)}; it must be text")
    messages = _checked_messages(value.get("messages"))
    if message and messages:
        raise StepError("message and messages are given; an answer is one of them")
    if not done and not message and not messages:
        raise StepError("message is empty, but done is not True: the policy has no text to continue after")
    length = len(message or "") + sum(len(each["content"]) for each in messages)
    if length > MAX_MESSAGE:
        raise StepError(f"the answer has {length} characters, allowed are {MAX_MESSAGE}")
    if (half := half_pair({"message": message, "messages": messages})) is not None:
        raise StepError(f"{half} has half a surrogate pair, which is not text: {_shown(message or messages)}")
    if not isinstance(metrics, Mapping):
        raise StepError(f"metrics is {_shown(metrics)}; it must be a mapping of names to numbers")
    named = {escaped(hide(str(name), SECRETS)): metric for name, metric in metrics.items()}
    numbers = {name: _number(f"metric {name}", metric) for name, metric in named.items()}
    reward = value.get("reward")
    given_reward = None if reward is None else _number("reward", reward)
    answer = {"message": message or "", "messages": messages}
    return {**answer, "done": done, "reward": given_reward, "metrics": numbers}


def _checked_messages(value: Any) -> list[dict[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > MAX_MESSAGES:
        raise StepError(f"messages is {_shown(value)}; it must be a list of {MAX_MESSAGES} at most")
    for message in value:
        whole = isinstance(message, Mapping) and message.keys() == {"role", "content"}
        if not whole or not all(isinstance(part, str) for part in message.values()):
            raise StepError(f"messages has {_shown(message)}; each must have a role and a content, both text")
    return [dict(message) for message in value]


def load_environment(file: str, module: str, name: str) -> Episodes:
    """Return the episodes of class `name` in a file or module; LoadError if it cannot be used."""
    environment, place = load_name(file, module, name), file or module
    if not inspect.isclass(environment):
        raise LoadError("name", f"{name} in {place} is a {type(environment).__name__}, not a class")
    for method, argument in (("reset", "record"), ("step", "response")):
        function = getattr(environment, method, None)
        if not callable(function):
            raise LoadError("name", f"{name} in {place} has no {method}; it must have reset(record), step(response)")
        try:
            inspect.signature(function).bind(None, "")
        except TypeError as error:
            raise LoadError("name", f"{method} of {name} in {place} must take ({argument}): {error}") from error
    try:
        inspect.signature(environment).bind()
    except TypeError as error:
        raise LoadError("name", f"{name} in {place} must be made without arguments: {error}") from error
    return Episodes(environment)


def _reply_of(request: dict[str, Any], value: Any, secrets: list[str]) -> dict[str, Any]:
    def hidden(step: StepReply) -> StepReply:
        messages = [{name: hide(part, secrets) for name, part in each.items()} for each in step["messages"]]
        return {**step, "message": hide(step["message"], secrets), "messages": messages}

    return {"id": request["id"], "steps": [hidden(step) for step in value]}


def _number(name: str, value: Any) -> float:
    number = finite(value)
    if number is None:
        raise StepError(f"{name} is {_shown(value)}; it must be a finite number")
    return number


def _shown(value: Any) -> str:
    return shown(value, SECRETS)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


ENVIRONMENT: Final = HostedCode(
    load_environment,
    lambda episodes: episodes.is_async,
    lambda episodes, request: episodes.taken(request),
    _reply_of,
    "environment",
    "EnvironmentRaised",
)


if __name__ == "__main__":
    sys.exit(serve(ENVIRONMENT))
