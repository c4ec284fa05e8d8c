"""The child process that runs a user's reward function: `python -m ...reward_host --file F --name N`.

JSON lines. Out, once: {"ready": "sync" | "async"} or {"failed": message, "part": file | module | name}. Then for every
{"id", "many", "samples": [{"prompt", "response", "record", "finish_reason", "response_tokens"}]} that comes in: {"id",
"rewards": [{"reward": number | null, "metrics": {name: number}}]} or {"id", "reason", "message"}. With `many` the
function is given a list for each argument, and returns a list.
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
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, TextIO

from rlhf_workers.inference.rewards.function_replies import forms_of, hide, reply_of

MESSAGE_CHARACTERS: Final = 2000
PR_SET_PDEATHSIG: Final = 1
OFFERS: Final = ("finish_reason", "response_tokens")
"""Parameters that a function may have beside prompt, response and record: how the response ended, "stop" or "length",
and how many tokens it has."""
HIDE: Final = "RLHF_HIDE"
"""Names of the variables whose values no text may quote, separated by commas."""

Reply = Callable[[dict[str, Any]], None]


class LoadError(Exception):
    """The function cannot be used; `part` of the manifest's `function` is to blame."""

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
        inspect.signature(function).bind("", "", {}, **dict.fromkeys(offers_taken(function), ""))
    except TypeError as error:
        message = f"{name} in {place} must take (prompt, response, record): {error}"
        raise LoadError("name", message) from error
    except ValueError:  # a built-in without a signature; the first call will tell
        pass
    return function  # type: ignore[no-any-return]


def offers_taken(function: Callable[..., Any]) -> list[str]:
    """Return the names of OFFERS that are parameters of the function."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return []
    return [name for name in OFFERS if name in parameters]


def called(function: Callable[..., Any], request: dict[str, Any]) -> Any:
    """Call the function on the samples of a request, or on its only one."""
    samples, many = request["samples"], request["many"]

    def column(name: str) -> Any:
        return [sample[name] for sample in samples] if many else samples[0][name]

    offered = {name: column(name) for name in offers_taken(function)}
    return function(column("prompt"), column("response"), column("record"), **offered)


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
            value = called(function, request)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            reply(reply_of(request, value, SECRETS))
        except BaseException as error:
            reply(_failure(request["id"], error, file))


def _serve_async(function: Callable[..., Any], requests: BinaryIO, reply: Reply, file: str) -> None:
    async def score(request: dict[str, Any]) -> None:
        try:
            reply(reply_of(request, await called(function, request), SECRETS))
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
