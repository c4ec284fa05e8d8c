"""The HTTP endpoint of a job's process: `/livez` reports whether it is alive, other paths serve its metrics.

A process is alive unless its event loop stood still for more than STALE_SECONDS, or `ailment` names a reason. Probes of
running pods use `/livez`; never remove the path.
"""

import asyncio
import logging
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

log = logging.getLogger(__name__)

LIVENESS_PATH: Final = "/livez"
BEAT_SECONDS: Final = 1.0
"""Seconds between two beats of an event loop."""
STALE_SECONDS: Final = 30.0
"""Seconds without a beat after which the loop counts as stuck."""
CLIENT_SECONDS: Final = 10.0
"""Time-out in seconds of one read from a client, or one write to it."""
FRAMES_SHOWN: Final = 12
"""Maximum number of innermost stack frames of a stuck loop to log."""
WILDCARDS: Final = frozenset({"", "::", "0.0.0.0"})  # noqa: S104 pods listen on every address
"""Hosts that mean every address of either family in gRPC."""

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""


class Endpoint:
    """Serves from its creation; `metrics` may be set later."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the endpoint; port 0 takes a free one. Raises OSError if the address cannot be bound."""
        self.metrics: Application | None = None
        self.ailment: Callable[[], str] | None = None
        """Function of a process that answers for others: why it is not alive although its own loop runs; "" if it is
        alive."""
        self._clock = clock
        self._last_beat: float | None = None
        self._logged = False
        self._server = _server(host, port, self._answer)
        self.port = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def beat(self) -> None:
        """Record a beat of the event loop."""
        self._last_beat, self._logged = self._clock(), False

    async def keep_beating(self) -> None:
        """Record beats of the running event loop, forever."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_SECONDS)

    @property
    def stuck_seconds(self) -> float:
        """Seconds for which the event loop has been stuck; 0 for at most STALE_SECONDS, and before it starts."""
        silent = 0.0 if self._last_beat is None else self._clock() - self._last_beat
        return silent if silent > STALE_SECONDS else 0.0

    def close(self) -> None:
        """Close the endpoint and free its address."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if request.get("PATH_INFO") != LIVENESS_PATH:
            if self.metrics is not None:
                return self.metrics(request, start)
            return _plain_text(start, "503 Service Unavailable", "the process is starting and has no metrics yet")
        stuck = self.stuck_seconds
        if not stuck:
            ailment = self.ailment() if self.ailment is not None else ""
            return _plain_text(start, "503 Service Unavailable" if ailment else "200 OK", ailment or "ok")
        problem = f"the event loop has not turned for {stuck:.0f} s"
        if not self._logged:
            self._logged = True
            log.error("%s; where it is:\n%s", problem, _main_stack())
        return _plain_text(start, "503 Service Unavailable", problem)


class _QuietHandler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 as the library names it
        """Log nothing: kubelets probe all day."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True


def listener(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one. Raises OSError if the address cannot be bound.

    A wildcard host listens on IPv6 and IPv4 if possible.
    """
    if host in WILDCARDS:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((str(address[0]), port), family=family)


def _server(host: str, port: int, application: Application) -> WSGIServer:
    listening = listener(host, port)
    server = _Server((host, port), _QuietHandler, bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.server_name, server.server_port = host, listening.getsockname()[1]
    server.setup_environ()
    server.set_app(application)
    return server


def _plain_text(start: Callable[..., Any], status: str, text: str) -> list[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


def _main_stack() -> str:
    """Return the innermost FRAMES_SHOWN stack frames of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-FRAMES_SHOWN:]).rstrip() if frame is not None else ""
