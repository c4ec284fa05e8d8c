"""HTTP of a job's process: `/livez` says whether it lives, every other path has its metrics.

A process lives while its event loop turns. Before the loop begins, while libraries are loaded or a journal is read, it
lives as long as it answers at all; long work runs on other threads and lets the interpreter go, so neither a training
step nor a load nor a compilation counts as a hang.
Rule: opened before anything slow, on a thread of its own that only reads. An image from before `/livez` answers every
path with its metrics once it serves them, so the same question is answered well there; never take the path away.
"""

import asyncio
import logging
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from rlhf_api.listening import listener

log = logging.getLogger(__name__)

LIVENESS_PATH: Final = "/livez"
BEAT_SECONDS: Final = 1.0
"""Between two signs of life of an event loop."""
STALE_SECONDS: Final = 30.0
"""Without one for so long, the loop is stuck: it never blocks for more than a disk's flush."""
CLIENT_SECONDS: Final = 10.0
"""A client that is slower than this is let go, so that none holds a thread for ever."""
FRAMES_SHOWN: Final = 12
"""Of the stack of a loop that is stuck: the innermost."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


class Endpoint:
    """Serves from the moment it is made; `metrics` is set when there are any."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError when the address cannot be bound; port 0 takes a free one."""
        self.metrics: Application | None = None
        self._clock = clock
        self._beaten: float | None = None
        self._told = False
        self._server = _server(host, port, self._answer)
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def beat(self) -> None:
        """The event loop has turned."""
        self._beaten, self._told = self._clock(), False

    async def keep_beating(self) -> None:
        """A sign of life of the running event loop, for ever."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    @property
    def stuck_seconds(self) -> float:
        """For how long the event loop has not turned; 0 when it is well, or has not begun."""
        silent = 0.0 if self._beaten is None else self._clock() - self._beaten
        return silent if silent > STALE_SECONDS else 0.0

    def close(self) -> None:
        """Frees the address."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if request.get("PATH_INFO") != LIVENESS_PATH:
            if self.metrics is not None:
                return self.metrics(request, start)
            return _said(start, "503 Service Unavailable", "the process is starting and has no metrics yet")
        stuck = self.stuck_seconds
        if not stuck:
            return _said(start, "200 OK", "ok")
        problem = f"the event loop has not turned for {stuck:.0f} s"
        if not self._told:
            self._told = True
            log.error("%s; where it is:\n%s", problem, _main_stack())
        return _said(start, "503 Service Unavailable", problem)


class _Quiet(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 as the library names it
        """Nothing: a kubelet asks all day."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


def _server(host: str, port: int, application: Application) -> WSGIServer:
    listening = listener(host, port)
    server = _Server((host, port), _Quiet, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.server_name, server.server_port = host, listening.getsockname()[1]
    server.setup_environ()
    server.set_app(application)
    return server


def _said(start: Callable[..., Any], status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


def _main_stack() -> str:
    """Where the main thread is, on which event loops run here."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-FRAMES_SHOWN:]).rstrip() if frame is not None else ""
