"""The child process that runs a user's reward function: `python -m ...reward_host --file F --name N`.

JSON lines. Out, once: {"ready": "sync" | "async"} or {"failed": message, "part": file | module | name}. Then for every
{"id", "prompt", "response", "record"} that comes in: {"id", "reward": number | null} or {"id", "reason", "message"}.
Rule: standard library only, so it starts in milliseconds and holds no model; what the function prints goes to stderr,
the worker's log, and what came from Secrets is in no text that leaves. It dies with its parent, whatever the function
does. Must never guess a reward.
"""

import argparse
import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, TextIO

MESSAGE_CHARACTERS: Final = 2000
PR_SET_PDEATHSIG: Final = 1
HIDE: Final = "RLHF_HIDE"
"""Names of the variables whose values no text may quote, separated by commas."""
HIDDEN: Final = "***"
"""Stands for such a value."""

Reply = Callable[[dict[str, Any]], None]


class LoadError(Exception):
    """The function cannot be used; `part` of spec.models.reward.function is to blame."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class HidingStream:
    """A text stream that writes HIDDEN for each secret; a value that is written in parts is not seen."""

    def __init__(self, stream: TextIO, secrets: list[str]) -> None:
        self._stream, self._secrets = stream, secrets

    def write(self, text: str) -> int:
        self._stream.write(hide(text, self._secrets))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forms_of(secrets: Iterable[str]) -> list[str]:
    """Return the secrets as they are and without white space at their ends, the longest first."""
    return sorted({form for secret in secrets for form in (secret, secret.strip()) if form}, key=len, reverse=True)


def hide(text: str, secrets: list[str]) -> str:
    """`text` with HIDDEN for each of `secrets`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


SECRETS: Final = forms_of(os.environ.get(name, "") for name in os.environ.get(HIDE, "").split(","))
"""Of this process; its environment is what it was started with."""


def load_function(file: str, module: str, name: str) -> Callable[..., Any]:
    """The function `name` of a file or a module; LoadError says what is wrong with it."""
    part, place = ("file", file) if file else ("module", module)
    try:
        loaded = _load_file(Path(file)) if file else importlib.import_module(module)
    except BaseException as error:
        if isinstance(error, FileNotFoundError) and not Path(file or ".").exists():
            raise LoadError(part, f"{place}: there is no such file") from error
        raise LoadError(part, f"{place}: {describe(error, file)}") from error
    function = getattr(loaded, name, None)
    if function is None:
        raise LoadError("name", f"{place} has no {name}; it defines {', '.join(_functions(loaded)) or 'no function'}")
    if not callable(function):
        raise LoadError("name", f"{name} in {place} is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind("", "", {})
    except TypeError as error:
        message = f"{name} in {place} must take (prompt, response, record): {error}"
        raise LoadError("name", message) from error
    except ValueError:  # a built-in without a signature; the first call will tell
        pass
    return function  # type: ignore[no-any-return]


def describe(error: BaseException, file: str) -> str:
    """`reward.py:12 in score: ValueError: text`, at the innermost line of the user's own code."""
    text = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {text}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    own = [frame for frame in frames if file and Path(frame.filename).is_relative_to(Path(file).absolute().parent)]
    if not (own or frames):
        return text
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {text}"


def reply_of(number: int, value: Any) -> dict[str, Any]:
    """The reply for what the function returned: a reward, or a failure that says what it was instead."""
    if value is None:
        return {"id": number, "reward": None}
    shown = hide(repr(value), SECRETS)
    shown = shown if len(shown) <= 100 else shown[:100] + "..."
    what = f"the function returned {shown} ({type(value).__name__})"
    if not isinstance(value, numbers.Real):
        message = f"{what}; it must return a number, or None to abstain"
        return {"id": number, "reason": "RewardInvalid", "message": message}
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        message = f"{what}; a reward must be finite, or None to abstain"
        return {"id": number, "reason": "RewardInvalid", "message": message}
    return {"id": number, "reward": reward}


def _failure(number: int, error: BaseException, file: str) -> dict[str, Any]:
    traceback.print_exception(error)
    message = f"the function raised: {describe(error, file)}"
    return {"id": number, "reason": "RewardRaised", "message": message}


def _serve_sync(function: Callable[..., Any], requests: BinaryIO, reply: Reply, file: str) -> None:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(json.loads(line))
        os._exit(0)  # the parent is gone or wants no more; a hanging function must not outlive it

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = waiting.get()
        try:
            value = function(request["prompt"], request["response"], request["record"])
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            reply(reply_of(request["id"], value))
        except BaseException as error:
            reply(_failure(request["id"], error, file))


def _serve_async(function: Callable[..., Any], requests: BinaryIO, reply: Reply, file: str) -> None:
    async def score(request: dict[str, Any]) -> None:
        try:
            reply(reply_of(request["id"], await function(request["prompt"], request["response"], request["record"])))
        except BaseException as error:
            reply(_failure(request["id"], error, file))

    async def serve() -> None:
        loop, tasks = asyncio.get_running_loop(), set()

        def begin(request: dict[str, Any]) -> None:
            task = loop.create_task(score(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        def read() -> None:
            for line in requests:
                loop.call_soon_threadsafe(begin, json.loads(line))
            os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _awaited(value: Any) -> Any:
    return await value


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path.name} is not a Python file (.py)")
    module = importlib.util.module_from_spec(specification)
    sys.modules[path.stem] = module
    specification.loader.exec_module(module)
    return module


def _functions(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Serves until the input ends; 1 when the function cannot be loaded."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", default="")
    parser.add_argument("--module", default="")
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    lock = threading.Lock()
    if SECRETS:
        sys.stdout = sys.stderr = HidingStream(sys.stderr, SECRETS)

    def reply(message: dict[str, Any]) -> None:
        for part in ("message", "failed"):
            if part in message:
                message[part] = hide(message[part], SECRETS)[:MESSAGE_CHARACTERS]
        with lock:
            replies.write(json.dumps(message, allow_nan=False).encode() + b"\n")
            replies.flush()

    try:
        function = load_function(arguments.file, arguments.module, arguments.name)
    except LoadError as error:
        reply({"failed": str(error), "part": error.part})
        return 1
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    reply({"ready": "async" if is_async else "sync"})
    (_serve_async if is_async else _serve_sync)(function, requests, reply, arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
