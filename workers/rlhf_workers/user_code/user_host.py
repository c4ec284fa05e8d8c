"""Child process that runs a user's code: `python -m <a module that calls serve> --file F --name N`.

It speaks JSON lines. First it writes {"ready": "sync" | "async"} or {"failed": message, "part": file | module | name}.
For a request {"id", ...} it writes {"id", ...} with the reply of HostedCode, or {"id", "reason", "message"}.

Rule: it imports the user's code and the standard library only. Must never report a value for code that raised.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Final, TextIO

MESSAGE_CHARACTERS: Final = 2000
PR_SET_PDEATHSIG: Final = 1
HIDE: Final = "RLHF_HIDE"
"""Environment variable with the names of secret variables, separated by commas."""

HIDDEN: Final = "***"
"""Replacement of a secret value in texts."""

Reply = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class HostedCode:
    """How a child process loads and calls its code."""

    load: Callable[[str, str, str], Any]
    """(file, module, name) -> the code; raises LoadError with the problem."""
    is_async: Callable[[Any], bool]
    """Whether the code can run many calls at once."""
    call: Callable[[Any, dict[str, Any]], Any]
    """Calls the code for a request; the result may be awaitable."""
    reply: Callable[[dict[str, Any], Any, list[str]], dict[str, Any]]
    """(request, returned value, secrets that no text may quote) -> the reply, or a failure."""
    name: str
    """Name of the code in messages, such as function."""
    raised: str
    """Failure reason if the code raised."""


def forms_of(secrets: Iterable[str]) -> list[str]:
    """Return the secrets and their text in JSON, with and without white space at their ends, longest first."""
    trimmed = {form for secret in secrets for form in (secret, secret.strip()) if form}
    escaped = {json.dumps(form, ensure_ascii=ascii_only)[1:-1] for form in trimmed for ascii_only in (True, False)}
    return sorted(trimmed | escaped, key=len, reverse=True)


def hide(text: str, secrets: list[str]) -> str:
    """Return `text` with HIDDEN in place of each secret."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


class LoadError(Exception):
    """The code cannot be used because of field `part` in the manifest."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class HidingStream:
    """A text stream that replaces secrets with HIDDEN; a secret split over two writes is not found."""

    def __init__(self, stream: TextIO, secrets: list[str]) -> None:
        self._stream, self._secrets = stream, secrets

    def write(self, text: str) -> int:
        self._stream.write(hide(text, self._secrets))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_OURS: Final = Path(__file__).parents[1]
SECRETS: Final = forms_of(os.environ.get(name, "") for name in os.environ.get(HIDE, "").split(","))
"""Secrets of this process, from the environment at its start."""


def load_name(file: str, module: str, name: str) -> Any:
    """Return the object `name` of a file or module; LoadError if that fails."""
    part, place = ("file", file) if file else ("module", module)
    try:
        loaded = _load_file(Path(file)) if file else importlib.import_module(module)
    except BaseException as error:
        if isinstance(error, FileNotFoundError) and not Path(file or ".").exists():
            raise LoadError(part, f"{place}: there is no such file") from error
        raise LoadError(part, f"{place}: {describe(error, file)}") from error
    found = getattr(loaded, name, None)
    if found is None:
        raise LoadError("name", f"{place} has no {name}; it defines {', '.join(_defined(loaded)) or 'no function'}")
    return found


def describe(error: BaseException, file: str) -> str:
    """Return `reward.py:12 in score: ValueError: text`, with the innermost line of the user's folder, or else of a
    library.

    A SyntaxError has its own place; an error without a place has only its text.
    """
    lines = traceback.format_exception_only(error)
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}: {lines[-1].strip()}"
    text = "".join(lines).strip()  # the last entries are notes
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    own = [frame for frame in frames if file and Path(frame.filename).is_relative_to(Path(file).absolute().parent)]
    if not (own or frames):
        return text
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {text}"


def _failure(hosted: HostedCode, number: int, error: BaseException, file: str) -> dict[str, Any]:
    traceback.print_exception(error)
    message = f"the {hosted.name} raised: {describe(error, file)}"
    return {"id": number, "reason": hosted.raised, "message": message}


def _serve_sync(hosted: HostedCode, code: Any, requests: BinaryIO, reply: Reply, file: str) -> None:
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in requests:
            waiting.put(json.loads(line))
        os._exit(0)  # The parent ended or closed the pipe; hanging code must not outlive it.

    threading.Thread(target=read, daemon=True).start()
    while True:
        request = waiting.get()
        try:
            value = hosted.call(code, request)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            reply(hosted.reply(request, value, SECRETS))
        except BaseException as error:
            reply(_failure(hosted, request["id"], error, file))


def _serve_async(hosted: HostedCode, code: Any, requests: BinaryIO, reply: Reply, file: str) -> None:
    async def score(request: dict[str, Any]) -> None:
        try:
            reply(hosted.reply(request, await hosted.call(code, request), SECRETS))
        except BaseException as error:
            reply(_failure(hosted, request["id"], error, file))

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


def _defined(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or (inspect.isclass(value) and value.__module__ == module.__name__))
    ]


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_OURS) or filename.startswith("<frozen")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(hosted: HostedCode) -> int:
    """Serve until the input ends; return 1 when the code cannot be loaded."""
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
        code = hosted.load(arguments.file, arguments.module, arguments.name)
    except LoadError as error:
        reply({"failed": str(error), "part": error.part})
        return 1
    is_async = hosted.is_async(code)
    reply({"ready": "async" if is_async else "sync"})
    (_serve_async if is_async else _serve_sync)(hosted, code, requests, reply, arguments.file)
    return 0
