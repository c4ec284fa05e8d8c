"""Child process of a user's reward function: `python -m ...function_host --file F --name N` (or `--module M`).

Request: {"id", "many", "samples": [{"prompt", "response", "record", "finish_reason", "response_tokens"}]}. Reply:
{"id", "rewards": [{"reward": number | null, "metrics": {name: number}}]} or {"id", "reason", "message"}. With `many`
the function gets a list for each argument and returns a list.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

from rlhf_workers.inference.rewards.function_replies import reply_of
from rlhf_workers.user_code.user_host import HostedCode, LoadError, load_name, serve

OFFERS: Final = ("finish_reason", "response_tokens")
"""Optional parameters of a function: how the response ended ("stop" or "length"), and its number of tokens."""


def load_function(file: str, module: str, name: str) -> Callable[..., Any]:
    """Return the function `name` of a file or module; LoadError if it cannot be used."""
    function = load_name(file, module, name)
    place = file or module
    if not callable(function):
        raise LoadError("name", f"{name} in {place} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind("", "", {}, **dict.fromkeys(offers_taken(function), ""))
    except TypeError as error:
        message = f"{name} in {place} must take (prompt, response, record): {error}"
        raise LoadError("name", message) from error
    except ValueError:  # a built-in without a signature; the first call will show
        pass
    return function  # type: ignore[no-any-return]


def offers_taken(function: Callable[..., Any]) -> list[str]:
    """Return the names in OFFERS that the function has as parameters."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in OFFERS if name in parameters]


def called(function: Callable[..., Any], request: dict[str, Any]) -> Any:
    """Call the function on all samples of a request, or on its one sample."""
    samples, many = request["samples"], request["many"]

    def column(name: str) -> Any:
        return [sample[name] for sample in samples] if many else samples[0][name]

    offered = {name: column(name) for name in offers_taken(function)}
    return function(column("prompt"), column("response"), column("record"), **offered)


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls of the function are awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


REWARD_FUNCTION: Final = HostedCode(load_function, is_async, called, reply_of, "function", "RewardRaised")


if __name__ == "__main__":
    sys.exit(serve(REWARD_FUNCTION))
